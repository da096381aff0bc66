"""One container of a pod: a process in namespaces of its own, on a copy of this machine that only it writes to."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.pod_spec import Identity

REPOSITORY = Path(__file__).parents[2]
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH = f"{Path(sys.executable).parent}:{_SYSTEM_PATH}"
"""Where an image looks for its programs: `sftriage` and `python` are those of the tests."""
_DEVICES = "null zero full random urandom tty"
_PRIVATE = ("tmp", "run", "var/tmp")
"""What an image has nothing in."""
_ALONE = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20020000):  # new mounts, new process ids
    raise OSError(ctypes.get_errno(), "unshare")
if not (child := os.fork()):
    libc.prctl(1, signal.SIGKILL)  # it dies with us
    os.execvp(sys.argv[1], sys.argv[1:])
status = os.waitpid(child, 0)[1]
if os.WIFSIGNALED(status):
    if (number := os.WTERMSIG(status)) != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.waitstatus_to_exitcode(status))
"""
"""As `unshare --mount --pid --fork --kill-child`, which ends with 1 where its child was killed (util-linux 2.38)."""
_SHARED_MEMORY = "64m"  # as container runtimes have it


@dataclass(frozen=True, slots=True)
class Bound:
    """A folder or file of the pod, at a path of the container."""

    source: Path
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Made:
    """All that a container is started with."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    identity: Identity
    bound: Sequence[Bound]
    hosts: str
    working_directory: str = "/"
    read_only_root: bool = False

    def command(self, argv: Sequence[str]) -> list[str]:
        """A command as the container's user runs it, with its variables."""
        home = "/root" if self.identity.uid == 0 else "/"
        variables = {"PATH": PATH, "HOME": home, **self.environment}
        return [*self.identity.command(), "env", "-i", *(f"{name}={value}" for name, value in variables.items()), *argv]


class Process:
    """A container that runs, or has run."""

    def __init__(self, made: Made, pause: int, folder: Path, log: Path, *, shared: bool) -> None:
        """Start it beside a pod's pause process.

        Args:
            made: what it is.
            pause: the process whose name, network and IPC it shares, and (``shared``) process ids too.
            folder: a folder for what it writes beside its volumes.
            log: what it says goes there, behind what is there already.
            shared: whether it sees the processes of the pod's other containers.
        """
        self._made, self._pause, self._shared = made, pause, shared
        folder.mkdir(parents=True, exist_ok=True)
        (started, ready), (go, held) = os.pipe(), os.pipe()
        begin = ["unshare", "--mount", "--"] if shared else [sys.executable, "-c", _ALONE]
        command = [*begin, "bash", "-c", _script(made, folder, ready, go)]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*_entered(pause, pid=shared), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[ready, go],
                env={"PATH": _SYSTEM_PATH},
            )
        os.close(ready)
        os.close(go)
        with os.fdopen(started, encoding="ascii") as told, os.fdopen(held):
            # It says its own mount namespace, by which all that it starts is known, and waits until that is held here:
            # else, once it has ended, another one may be called so, with somebody else's processes.
            self._namespace = told.readline().strip()
            self._held = [os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY) for pid in self.pids[:1]]
        self.started = bool(self._namespace)

    @property
    def exit_code(self) -> int | None:
        """What it ended with, 128 and a signal's number where that was it; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return 128 - code if code < 0 else code

    @property
    def pids(self) -> list[int]:
        """Its processes, as this machine counts them."""
        mine = self._namespace or "none"
        return [pid for pid in _all_pids() if pid != self._process.pid and _mount_namespace(pid) == mine]

    @property
    def first(self) -> int | None:
        """The process that it began with, as this machine counts; None once that has ended."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def signal(self, number: int) -> None:
        """Tell its first process. The first of a namespace does not hear what it has not said that it listens to."""
        if (pid := self.first) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End all of it now."""
        while pids := self.pids:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if not self.started:
            self._process.kill()
        self._process.wait(60)
        self._namespace = ""
        while self._held:
            os.close(self._held.pop())

    def run(self, argv: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `kubectl exec` does."""
        first = self.first
        assert first is not None, "the container does not run"
        enter = ["nsenter", "-t", str(first), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        command = [*enter, *self._made.command(argv)]
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PATH": _SYSTEM_PATH},
        )


def _entered(pause: int, *, pid: bool) -> list[str]:
    return ["nsenter", "-t", str(pause), "--mount", "--uts", "--ipc", "--net", *(["--pid"] if pid else []), "--"]


def _script(made: Made, folder: Path, ready: int, go: int) -> str:
    """What makes a container of a process that has namespaces of its own, and becomes its command."""
    stage, root = folder / "stage", folder / "stage" / "root"
    lines = [
        "set -e",
        "mount --make-rprivate /",
        f"mkdir -p {stage}",
        f"mount -t tmpfs -o mode=755 tmpfs {stage}",
        f"mkdir {stage}/upper {stage}/work {root}",
        f"mount -t overlay -o lowerdir=/,upperdir={stage}/upper,workdir={stage}/work overlay {root}",
        f"cd {root}",
        *_opened(),
        "mount -t proc proc proc",
        "mount --rbind /sys sys",
        *_devices(),
        *(f"mkdir -p {one} && mount -t tmpfs -o mode=1777 tmpfs {one}" for one in _PRIVATE),
        *_carried(),
        f"printf %s {shlex.quote(made.hosts)} > etc/hosts",
        "hostname > etc/hostname",
    ]
    # (links in the image lead to places in it once it is the root)
    lines += ["pivot_root . mnt", "cd /"]
    for one in made.bound:
        lines += _bound(one)
    if made.read_only_root:
        taken = {one.path.strip("/") for one in made.bound}
        lines += [f"mount -o remount,ro /{one}" for one in ("", *_PRIVATE) if one not in taken]
    lines += [
        "umount -l /mnt",
        f"mkdir -p {shlex.quote(made.working_directory)} 2>/dev/null || true",
        f"cd {shlex.quote(made.working_directory)}",
        f"readlink /proc/self/ns/mnt >&{ready}",
        f"exec {ready}>&-",
        f"read -r <&{go} || true",
        f"exec {go}<&-",
        f"exec {shlex.join(made.command(made.argv))}",
    ]
    return "\n".join(lines)


def _opened() -> list[str]:
    """An image's programs are for everybody, though on this machine they may lie where only root comes."""
    ways = {way for path in _programs() for way in path.parents if way != Path("/")}
    return [f"chmod a+x .{shlex.quote(str(way))}" for way in sorted(ways)]


def _carried() -> list[str]:
    """What of the programs is on another disk, or where an image has nothing."""
    here = Path("/").stat().st_dev
    hidden = tuple(f"/{one}/" for one in _PRIVATE)
    lines = []
    for path in sorted(_programs()):
        if path.stat().st_dev != here or str(path).startswith(hidden):
            place = f".{shlex.quote(str(path))}"
            lines += [f"mkdir -p {place}", f"mount --bind {shlex.quote(str(path))} {place}"]
            lines += [f"mount -o remount,bind,ro {place}"]
    return lines


def _programs() -> set[Path]:
    return {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix).resolve()}


def _devices() -> list[str]:
    return [
        "mount -t tmpfs -o mode=755 tmpfs dev",
        f"for one in {_DEVICES}; do : > dev/$one; mount --bind /dev/$one dev/$one; done",
        "mkdir dev/shm dev/pts",
        f"mount -t tmpfs -o mode=1777,size={_SHARED_MEMORY} tmpfs dev/shm",
        "ln -s /proc/self/fd dev/fd",
        "for one in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${one%:*} dev/${one#*:}; done",
    ]


def _bound(one: Bound) -> list[str]:
    source, place = shlex.quote(f"/mnt{one.source}"), shlex.quote(one.path)
    made = f"if [ -d {source} ]; then mkdir -p {place}; else mkdir -p $(dirname {place}); : >> {place}; fi"
    bind = f"mount --bind {source} {place}"
    return [made, bind, *([f"mount -o remount,bind,ro {place}"] if one.read_only else [])]


def _all_pids() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]


def _mount_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:
        return ""


def missing() -> str:
    """Why no container can be made here, or ""."""
    if os.geteuid() != 0:
        return "containers are made by root"
    lacking = [name for name in ("unshare", "nsenter", "setpriv", "pivot_root") if shutil.which(name) is None]
    if lacking:
        return f"no {', no '.join(lacking)} here"
    tried = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && cd /mnt && mkdir u w r && "
    tried += "mount -t overlay -o lowerdir=/,upperdir=u,workdir=w overlay r"
    command = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", tried]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"no container can be made here: {done.stderr.strip()}" if done.returncode else ""
