"""What a thread of this process waits for by the kernel: its system call, the file, socket or lock, and its CPU time.

A process may read all this about itself. Nothing here opens a file outside ``/proc``, so nothing waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sftriage.base.process import content_of, stat_fields

_NUMBERS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, poll 7 -, ioctl 16 29, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, select 23 -, sched_yield 24 124, msync 26 227, pause 34 -, nanosleep 35 101,
sendfile 40 71, connect 42 203, accept 43 202, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212,
wait4 61 260, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83, rt_sigtimedwait 128 137, futex 202 98,
getdents64 217 61, clock_nanosleep 230 115, epoll_wait 232 -, waitid 247 95, openat 257 56, newfstatat 262 79,
pselect6 270 72, ppoll 271 73, epoll_pwait 281 22, accept4 288 242, recvmmsg 299 243, statx 332 291,
io_uring_enter 426 426, epoll_pwait2 441 441, futex_waitv 449 449
"""
"""System calls that may wait: name, and number on x86-64 and on aarch64."""
_MACHINES = ("x86_64", "aarch64")

_OF_DESCRIPTOR = frozenset(
    (
        *("read", "write", "close", "fstat", "ioctl", "pread64", "pwrite64", "readv", "writev", "sendfile", "connect"),
        *("accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg", "recvmmsg", "fcntl", "flock", "fsync"),
        *("fdatasync", "getdents64"),
    )
)
_OF_PATH = {"open": 0, "stat": 0, "openat": 1, "newfstatat": 1, "statx": 1}
"""System calls that wait for a descriptor, their first argument; and for a path, and which argument that is."""
_POLLS = frozenset({"poll", "ppoll"})
_LOCK_COMMANDS = frozenset({7, 38})
"""``F_SETLKW`` and ``F_OFD_SETLKW``."""

STREAMS = ("standard input", "standard output", "standard error")
"""What a descriptor below 3 is named if it is no file."""

MAX_PATH_BYTES, MAX_COMMAND = 512, 80


class KernelWait(NamedTuple):
    """See `sftriage.model.hangs.Wait`. ``awaited_pid``: the process whose end it waits for."""

    state: str = ""
    syscall: str = ""
    wchan: str = ""
    path: str = ""
    held_by: str = ""
    awaited_pid: int = 0


class CpuTime(NamedTuple):
    """A thread's running time, and its time of waiting for a core, at a moment of the monotonic clock."""

    run_ns: int
    waited_ns: int
    at_ns: int

    def fraction_since(self, before: CpuTime) -> float:
        """How much of a core the thread used since then, of the time in which it could have one."""
        run_ns = self.run_ns - before.run_ns
        could_ns = self.at_ns - before.at_ns - (self.waited_ns - before.waited_ns)
        return round(min(1.0, max(0.0, run_ns / max(run_ns, could_ns, 1))), 2)


def cpu_time(thread: int) -> CpuTime | None:
    """By the kernel's id of a thread; None if unknown."""
    try:
        run_ns, waited_ns, _ = _read(f"/proc/self/task/{thread}/schedstat").split()
        return CpuTime(int(run_ns), int(waited_ns), time.monotonic_ns())
    except ValueError:
        pass
    try:
        user, system = stat_fields(_read(f"/proc/self/task/{thread}/stat"))[11:13]
        tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
        return CpuTime((int(user) + int(system)) * tick_ns, 0, time.monotonic_ns())
    except ValueError:
        return None


def state_of(process: str) -> tuple[str, str]:
    """The kernel's letter and the ``wchan`` of a process or thread, by its folder in ``/proc``; empty if unknown."""
    fields = stat_fields(_read(f"{process}/stat"))
    wchan = _read(f"{process}/wchan").decode("ascii", "replace").strip()
    return (fields[0].decode("ascii", "replace") if fields else ""), "" if wchan == "0" else wchan


def wait_of(thread: int) -> KernelWait:
    """What a thread of this process waits for, by the kernel's id of it."""
    state, wchan = state_of(f"/proc/self/task/{thread}")
    number, *arguments = _read(f"/proc/self/task/{thread}/syscall").split() or [b""]
    name = syscalls(platform.machine()).get(number.decode("ascii", "replace"), "")
    found = KernelWait(state, name, wchan)
    if len(arguments) < 6:
        return found
    values = [int(argument, 16) for argument in arguments[:6]]
    if name in _OF_DESCRIPTOR:
        found = found._replace(path=_described(values[0]) or (_address_at(values) if name == "connect" else ""))
    elif name in _POLLS and values[1] == 1:
        found = found._replace(path=_described(*struct.unpack("=i", _memory(values[0], 4) or b"\xff" * 4)))
    elif name in _OF_PATH:
        found = found._replace(path=_text(_memory(values[_OF_PATH[name]], MAX_PATH_BYTES).partition(b"\0")[0]))
    if name == "flock" or (name == "fcntl" and values[1] in _LOCK_COMMANDS):
        holder = _holder_of_file_lock({"FLOCK"} if name == "flock" else {"POSIX", "OFDLCK"}, values[0])
        return found._replace(held_by=process_name(holder) if holder else "")
    # (its argument is signed; waitid's first says of what kind its second is, and 1 is a process)
    pid = values[0] if name == "wait4" else values[1] if name == "waitid" and values[0] == 1 else 0
    return found._replace(awaited_pid=pid if 0 < pid < 1 << 31 else 0)


@cache
def syscalls(machine: str) -> dict[str, str]:
    """The names of system calls by their number in text."""
    if machine not in _MACHINES:
        return {}
    rows = (row.split() for row in _NUMBERS.split(","))
    return {numbers[_MACHINES.index(machine)]: name for name, *numbers in rows}


def process_name(pid: int) -> str:
    """A process in words: its pid and its command."""
    command = _text(_read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").strip() or _read(f"/proc/{pid}/comm").strip())
    command = command if len(command) <= MAX_COMMAND else f"{command[: MAX_COMMAND - 3]}..."
    return f"process {pid} ({command})" if command else f"process {pid}"


def _read(path: str) -> bytes:
    return content_of(Path(path))


def _text(data: bytes) -> str:
    return "".join(char if char.isprintable() else "?" for char in data.decode("utf-8", "replace"))


def _described(descriptor: int) -> str:
    """The file of a descriptor of this process, or the peer of a socket; "" if unknown."""
    try:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
    if path.startswith("anon_inode:"):
        return ""
    if 0 <= descriptor < len(STREAMS) and path.startswith(("pipe:", "socket:", "/dev/")):
        return STREAMS[descriptor]
    return _peer(descriptor) if path.startswith("socket:") else _text(os.fsencode(path))


def _peer(descriptor: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        of_host = "unix:" if copy.family == socket.AF_UNIX else ""
        with contextlib.suppress(OSError):
            return of_host + _address(copy.getpeername())
        return of_host or "socket:"
    return ""


def _address(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        return f"[{address[0]}]:{address[1]}" if ":" in str(address[0]) else f"{address[0]}:{address[1]}"
    return _text(address if isinstance(address, bytes) else str(address).encode())


def _address_at(values: list[int]) -> str:
    """The address in the arguments of ``connect``."""
    data = _memory(values[1], min(values[2], 28))
    family = struct.unpack_from("=H", data)[0] if len(data) >= 8 else 0
    if family == socket.AF_INET:
        return _address((socket.inet_ntop(family, data[4:8]), int.from_bytes(data[2:4], "big")))
    if family == socket.AF_INET6 and len(data) >= 24:
        return _address((socket.inet_ntop(family, data[8:24]), int.from_bytes(data[2:4], "big")))
    return ""


def _memory(address: int, n_bytes: int) -> bytes:
    """Bytes of this process; fewer or none where it has no memory, which a pointer could not survive."""
    try:
        descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, n_bytes, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(descriptor)


def _holder_of_file_lock(kinds: set[str], descriptor: int) -> int:
    """The process that holds the file lock that this process waits for; 0 if unknown."""
    about = dict(line.split(b":", 1) for line in _read(f"/proc/self/fdinfo/{descriptor}").splitlines() if b":" in line)
    inode = about.get(b"ino", b"").strip().decode()
    holders, found = dict[str, int](), set[int]()
    for line in _read("/proc/locks").decode("ascii", "replace").splitlines():
        number, *fields = line.split()
        # (a lock, and below it those that wait for it, marked by an arrow)
        waits = fields[0] == "->"
        kind, _, _, pid, place = fields[waits : waits + 5]
        if not waits:
            holders[number] = int(pid)
        elif kind in kinds and int(pid) in (os.getpid(), -1) and inode in ("", place.rpartition(":")[2]):
            found.add(holders.get(number, 0))
    return max(0, *found) if len(found) == 1 else 0
