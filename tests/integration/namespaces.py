"""Hosts as network namespaces: each with an address and a name of its own, joined by one switch."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

DEVICE = "veth0"
BOTH = ("10.97.0.1", "10.97.0.2")


def ip(*arguments: object) -> None:
    """Configure the network."""
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True)


class Hosts:
    """Some hosts. What runs on them shares the file system, and nothing else but the network."""

    def __init__(self, number: int) -> None:
        self.names = [f"sft{os.getpid()}{letter}" for letter in "abcdefgh"[:number]]
        self.addresses = [f"10.97.0.{number + 1}" for number in range(number)]
        self.started: list[subprocess.Popen] = []
        self._switch = f"sft{os.getpid()}switch"

    def begin(self) -> None:
        for name in (*self.names, self._switch):
            ip("netns", "add", name)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            port = f"port-{name[-1]}"
            ip("link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
            ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", DEVICE, "up")

    def cut(self, whole: bool) -> None:
        """Cut the second host off, or mend that."""
        ip("-n", self.names[1], "link", "set", DEVICE, "up" if whole else "down")

    def start(self, number: int, command: list[object], environment: dict[str, str], said: Path) -> subprocess.Popen:
        """Start a command on a host; what it says goes into a file."""
        name = f"node-{self.names[number][-1]}"
        inside = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c"]
        environment = {"NODE_RANK": str(number), **environment, "GLOO_SOCKET_IFNAME": DEVICE}
        with said.open("ab") as file:
            process = subprocess.Popen(
                [*inside, f'hostname {name}; exec "$@"', "sh", *map(str, command)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    def kill(self, number: int) -> None:
        """Kill all that was ever started on a host, whoever its parent is by now."""
        name = self.names[number]
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, found.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def end(self) -> None:
        for number in range(len(self.names)):
            self.kill(number)
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for process in self.started:
            process.wait(60)


@contextlib.contextmanager
def hosts_of(number: int) -> Iterator[Hosts]:
    """So many hosts, gone with all that runs there when this ends."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("hosts of a network of their own want root, ip and unshare")
    hosts = Hosts(number)
    try:
        hosts.begin()
        yield hosts
    finally:
        hosts.end()


def two_hosts() -> contextlib.AbstractContextManager[Hosts]:
    """Two of them."""
    return hosts_of(2)
