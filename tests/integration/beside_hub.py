"""A hub, a controller and the agent of one host, each a process of its own that can be killed and started again."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from sftriage.runtime.hub_server import HubServer, make_secret
from tests.integration.processes import DEADLINE_S, ended, wait_until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class BesideHub:
    """The parts of a job, but for its trainers, which somebody else starts. ``patch`` is done in every part before."""

    def __init__(self, directory: Path, environment: dict[str, str], policy: str, patch: str = "") -> None:
        self.directory, self.host, self.run = directory, directory / "host", directory / "run"
        self.release, self._said = directory / "release", directory / "said"
        self.environment = {
            **environment,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "SFTRIAGE_RINGS": str(self.host / "rings"),
            "SFTRIAGE_SPOOL": str(self.host / "spool"),
        }
        self._start = f"import sys\n{patch}\nfrom sftriage.commands import main\nsys.argv[0] = 'sftriage'\nmain()"
        self._held = contextlib.ExitStack()
        (directory / "policy.yaml").write_text(policy, encoding="utf-8")
        secret, self.address = directory / "secret", ("127.0.0.1", free_port())
        make_secret(secret)
        self.hub = HubServer(self.address, directory / "nats", secret)
        self._held.callback(self.hub.close)
        self._where = ("--job-id", "job", "--nats", f"nats://127.0.0.1:{self.address[1]}", "--creds", secret)
        self.controller = self.start_controller("--out", self.run, "--policy", directory / "policy.yaml")
        self.agent = self.start_agent()
        wait_until((self.host / "host.json").exists, 60.0)

    @property
    def said(self) -> str:
        return self._said.read_text(encoding="utf-8")

    def start(self, *command: object) -> subprocess.Popen:
        with self._said.open("ab") as said:
            process = subprocess.Popen([*map(str, command)], env=self.environment, stdout=said, stderr=said)
        self._held.enter_context(ended(process))
        return process

    def sftriage(self, name: str, *options: object) -> subprocess.Popen:
        return self.start(sys.executable, "-c", self._start, name, *self._where, *options)

    def start_controller(self, *options: object) -> subprocess.Popen:
        return self.sftriage("controller", *options)

    def start_agent(self) -> subprocess.Popen:
        return self.sftriage("agent", "--directory", self.host, "--name", "host-0")

    def kill(self, process: subprocess.Popen) -> None:
        """End it at once, without a word."""
        self.signal(process.pid)
        process.wait(DEADLINE_S)

    @staticmethod
    def signal(pid: int) -> None:
        """End whatever process, at once."""
        os.kill(pid, 9)

    def close(self) -> None:
        self._held.close()
