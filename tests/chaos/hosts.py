"""Two hosts whose clocks are apart, joined by a link that can be cut, or be slow."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.integration.namespaces import BOTH, Hosts
from tests.needs import GCC

MONOTONIC_APART_S, WALL_APART_S = 10 * 86400, 300
START_S = 20.0


class ApartHosts(Hosts):
    """Host 1 booted ten days before host 0, and its wall clock is minutes ahead, where that can be built."""

    def __init__(self, directory: Path) -> None:
        super().__init__(2)
        self._clock = directory / "wall_clock.so"
        self.wall_apart_s = (0, WALL_APART_S if GCC else 0)
        self._holders: list[subprocess.Popen] = []

    def begin(self) -> None:
        super().begin()
        if GCC:
            source = Path(__file__).with_name("wall_clock.c")
            subprocess.run([GCC, "-shared", "-fPIC", "-O2", "-o", self._clock, source], check=True)
        for number, name in enumerate(self.names):
            apart = f"{number * MONOTONIC_APART_S}"
            clocks = ["unshare", "--time", "--monotonic", apart, "--boottime", apart, "--uts", "--fork"]
            command = ["ip", "netns", "exec", name, *clocks, "sh", "-c", f"hostname node-{number}; echo $$; sleep inf"]
            holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            self._holders.append(holder)
        # (the number is that of this PID namespace: there is no other)
        self._inside = [
            ["nsenter", "-t", holder.stdout.readline().strip(), "--net", "--time", "--uts"] for holder in self._holders
        ]

    def start(self, number: int, command: list[object], environment: dict[str, str], said: Path) -> subprocess.Popen:
        """Start a command on a host; what it says goes into a file."""
        if self.wall_apart_s[number]:
            apart = {"WALL_APART_S": str(self.wall_apart_s[number]), "LD_PRELOAD": str(self._clock)}
            environment = {**environment, **apart}
        with said.open("ab") as file:
            process = subprocess.Popen(
                [*self._inside[number], *map(str, command)],
                env={**environment, "NODE_RANK": str(number)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    def left(self) -> list[int]:
        """Processes that are still there, beside those that hold the hosts."""
        of_holders = {str(one.pid) for one in (*self.inits, *self._holders)} | {words[2] for words in self._inside}
        found = set[str]()
        for name in self.names:
            found |= set(subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split())
        left = [int(pid) for pid in found - of_holders]
        return [pid for pid in left if _parent(pid) not in of_holders]

    def end(self) -> None:
        super().end()
        for holder in self._holders:
            holder.wait(START_S)
            holder.stdout.close()


class SlowLink:
    """What a host connects to as its hub: the hub, by a proxy of its own."""

    def __init__(self, hosts: ApartHosts, number: int, port: int, hub_port: int, directory: Path) -> None:
        self._control = directory / f"link-{number}"
        self.slow(0.0, 1e9)
        script = Path(__file__).with_name("proxy.py")
        command = [sys.executable, script, port, f"{BOTH[0]}:{hub_port}", self._control]
        self.process = hosts.start(number, command, dict(os.environ), directory / f"said-proxy-{number}")

    def slow(self, delay_s: float, bytes_per_s: float) -> None:
        """From now on, each way."""
        partial = self._control.with_suffix(".new")
        partial.write_text(f"{delay_s} {bytes_per_s}")
        partial.rename(self._control)

    def drop(self) -> None:
        """Break all connections, with all that is on its way."""
        self.process.send_signal(signal.SIGUSR1)


def _parent(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return ""


@contextlib.contextmanager
def apart_hosts(directory: Path) -> Iterator[ApartHosts]:
    """Two hosts, gone with all that runs there when this ends."""
    hosts = ApartHosts(directory)
    try:
        hosts.begin()
        yield hosts
    finally:
        hosts.end()
