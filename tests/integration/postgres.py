"""A PostgreSQL of a test's own: Debian's server, in a folder of its own, on a socket in it and a free port."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.integration.processes import DEADLINE_S, descendants, free_port, wait_until

USER = "tester"
PASSWORD = "p@ss/word:%20"


def binaries() -> Path | None:
    """Where the newest server that is installed has its programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    return found[-1].parent if found else None


def missing() -> str | None:
    """Why no server can be started here, or None."""
    if binaries() is None:
        return "PostgreSQL is not installed"
    if os.getuid() == 0 and _unprivileged() is None:
        return "PostgreSQL does not run as root, and there is no other user"
    return None


def _unprivileged() -> str | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return None


class Postgres:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sftriage-pg-"))
        self._as = {}
        if os.getuid() == 0:
            user = pwd.getpwnam(_unprivileged())
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        self.port = free_port()
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        command = ["initdb", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", f"--username={USER}"]
        command += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}", "-D", self._data]
        self._run(*command)
        self.start()

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _run(self, program: str, *arguments: str) -> None:
        path = str(binaries() / program)
        subprocess.run(
            [path, *arguments], cwd=self.folder, check=True, timeout=DEADLINE_S, capture_output=True, **self._as
        )

    def start(self) -> None:
        command = [str(binaries() / "postgres"), "-D", self._data, "-k", str(self.folder), "-p", str(self.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self._as)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        command = [str(binaries() / "pg_isready"), "-q", "-h", str(self.folder), "-p", str(self.port)]
        return subprocess.run(command, check=False, timeout=DEADLINE_S).returncode == 0

    def kill(self) -> None:
        """End the server and what it started, as a machine that loses power does."""
        self.signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def signal(self, number: int) -> None:
        """Send a signal to the server and what it started, each of which has a session of its own."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def database(self) -> str:
        """A new database; its URL, by the socket, where no password is asked for."""
        name = f"db_{secrets.token_hex(4)}"
        self._run("createdb", "-h", str(self.folder), "-p", str(self.port), "-U", USER, name)
        return f"postgresql+psycopg://{USER}@:{self.port}/{name}?host={self.folder}"

    def drop(self, url: str) -> None:
        name = url.rpartition("?")[0].rpartition("/")[2]
        where = ["-h", str(self.folder), "-p", str(self.port), "-U", USER]
        self._run("dropdb", "--force", *where, name)
        self._run("createdb", *where, name)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)
