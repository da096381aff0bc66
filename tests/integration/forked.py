"""Programs in processes that share one import of torch, which takes longer than most programs here.

`Forked` is a `subprocess.Popen` of ``python SCRIPT WORDS`` or ``python -c SOURCE WORDS``, as far as tests use one. It
is forked from a process that has imported what DistributedDataParallel and optimizers import when first used.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests.integration.processes import DEADLINE_S, ROOT, ended

READY = b"ready"


@cache
def _server() -> socket.socket:
    """To the process that others are forked from; it ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, "-m", "tests.integration.forked", str(there.fileno())]
        subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()])
    assert here.recv(16) == READY
    return here


class Forked:
    """A program, with pipes for what goes in and out unless ``stderr`` is None, when that is ours."""

    def __init__(
        self, *words: object, env: Mapping[str, str] = os.environ, stderr: int | None = None, text: bool = False
    ) -> None:
        (stdin, into), (out, stdout), (self._status, status), (errors, err) = (os.pipe() for _ in range(4))
        program = json.dumps({"words": [*map(str, words)], "env": dict(env), "cwd": str(Path.cwd())})
        socket.send_fds(_server(), [program.encode()], [stdin, stdout, status, 2 if stderr is None else err])
        for descriptor in (stdin, stdout, status, err):
            os.close(descriptor)
        mode, buffered = ("", -1) if text else ("b", 0)
        self.stdin: IO[Any] = os.fdopen(into, f"w{mode}", buffered)
        self.stdout, self.stderr = (os.fdopen(descriptor, f"r{mode}", buffered) for descriptor in (out, errors))
        self.pid = int(os.read(self._status, 16))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Wait for the end of a program that prints little."""
        self.wait(timeout)
        with self.stdin, self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()


def forked_output(*words: object, env: Mapping[str, str]) -> str:
    """What a program prints that ends with status 0."""
    process = Forked(*words, env=env, stderr=subprocess.PIPE, text=True)
    with ended(process):
        out, err = process.communicate(DEADLINE_S)
    assert process.returncode == 0, err
    return str(out)


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a program for each request, in which this returns."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    # This process waits for the program's, whose exit status it passes on.
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin, stdout, status, stderr = descriptors
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return json.loads(data), [stdin, stdout, stderr]
    os.write(status, str(pid).encode())
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def become(program: dict[str, Any], streams: list[int]) -> None:
    """Run a program in this process, with its own environment and streams, which ends as any does."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    first, *words = program["words"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    main = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        sys.path[0], sys.argv, source, where = "", ["-c", *words[1:]], words[0], "<string>"
    else:
        sys.path[0], sys.argv, source, where = str(Path(first).parent), [first, *words], Path(first).read_text(), first
        main.__file__ = first
    exec(compile(source, where, "exec"), main.__dict__)


if __name__ == "__main__":
    import gc

    import torch._dynamo
    import torch.distributed  # noqa: F401

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connected:
        connected.send(READY)
        asked = serve(connected)
    become(*asked)
