"""A NATS server that jobs share, configured as docs/many-hosts.md tells its owner to."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sftriage.runtime.hub_server import nats_server
from tests.integration.processes import DEADLINE_S, wait_until

CONFIGURATION = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{directory}/jetstream" }}
accounts {{
{accounts}
}}
"""


class SharedNats:
    """A server with an account for each of some jobs, made by the command; their keys are in `keys`."""

    def __init__(self, directory: Path, jobs: dict[str, Sequence[str]], environment: dict[str, str]) -> None:
        self.directory = directory
        directory.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        self.log, self._configuration = directory / "server.log", directory / "server.conf"
        self._accounts: list[str] = []
        self._configure(port)
        with self.log.open("wb") as log:
            command = [nats_server(), "-c", str(self._configuration)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._says(b"Server is ready")
        for job, hosts in jobs.items():
            # (jobs come and go while it runs)
            command = [sys.executable, "-m", "sftriage", "hub", "account", "--job-id", job]
            command += ["--creds", str(self.keys(job)), *(f"--host={host}" for host in hosts)]
            made = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
            assert made.returncode == 0, made.stderr
            self._accounts.append(f"{len(self._accounts)}.conf")
            (directory / self._accounts[-1]).write_bytes(made.stdout)
        self._configure(port)
        self._process.send_signal(signal.SIGHUP)
        self._says(b"Reloaded server configuration")

    def _configure(self, port: int) -> None:
        accounts = "\n".join(f'  include "{name}"' for name in self._accounts)
        text = CONFIGURATION.format(port=port, directory=self.directory, accounts=accounts)
        self._configuration.write_text(text, encoding="utf-8")

    def _says(self, what: bytes) -> None:
        wait_until(lambda: what in self.log.read_bytes() or self._process.poll() is not None, 60.0)
        assert self._process.poll() is None, self.log.read_text()

    def keys(self, job: str) -> Path:
        """The directory with a job's keys."""
        return self.directory / f"keys-{job}"

    @property
    def violations(self) -> list[str]:
        """What the server says that somebody may not do."""
        return [line for line in self.log.read_text("utf-8", "replace").splitlines() if "Violation" in line]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
