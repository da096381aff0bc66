"""A NATS server that jobs share, configured as docs/many-hosts.md tells its owner to."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import nkeys

from sftriage.fleet.hub import CONTROLLER_FILE, agent_file
from sftriage.runtime.hub_server import nats_server
from tests.integration.processes import DEADLINE_S, wait_until

CONFIGURATION = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{directory}/jetstream" }}
accounts {{
{accounts}
}}
"""
DOCS = Path(__file__).parents[2] / "docs"
USER = re.compile(r'^ *\{ nkey: "KEY_OF_(?:HOST|AGENTS)".*?\n *\} \}\n', re.DOTALL | re.MULTILINE)


def documented(page: str, account: str) -> str:
    """The account that a page of the documentation shows, as it goes into ``accounts { }``."""
    (found,) = re.findall(rf"^ *{account} \{{\n.*?\n *\]\n *\}}\n", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def permissions(job: str, host: str) -> dict[str, list[str]]:
    """The subjects that a host of a job may publish and subscribe to."""
    text = documented("many-hosts.md", "sft_JOB").replace("JOB", job).replace("HOST", host)
    return {
        what: re.findall(r'"(.*?)"', re.search(rf"{what}: {{ allow: \[(.*?)\]", text, re.DOTALL)[1])
        for what in ("publish", "subscribe")
    }


def account(text: str, keys: Path, agents: Mapping[str, str]) -> str:
    """An account with keys that are made: a controller's, and an agent's in a file of each of these names."""
    (user,) = USER.findall(text)
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    users = [re.sub("KEY_OF_[A-Z]+", new_key(keys / file), user).replace("HOST", host) for host, file in agents.items()]
    text = text.replace(user, "".join(users))
    return text.replace("KEY_OF_CONTROLLER", new_key(keys / CONTROLLER_FILE))


def new_key(path: Path) -> str:
    """Make an nkey in a file, as ``nk -gen user`` does; its public part."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    path.touch(mode=0o600)
    path.write_bytes(seed + b"\n")
    key: bytes = nkeys.from_seed(bytearray(seed)).public_key
    return key.decode()


class SharedNats:
    """A server with an account for each of some jobs; their keys are in `keys`."""

    def __init__(self, directory: Path, jobs: dict[str, Sequence[str]]) -> None:
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
            text = documented("many-hosts.md", "sft_JOB").replace("JOB", job)
            self._accounts.append(f"{len(self._accounts)}.conf")
            text = account(text, self.keys(job), {host: agent_file(host) for host in hosts})
            (directory / self._accounts[-1]).write_text(text, encoding="utf-8")
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
