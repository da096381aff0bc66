"""Hosts as namespaces: each with an address, a name and memory of its own, joined by one link."""

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


ALONE = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep infinity'
"""What makes a host of a process: what is in memory on one host is on no other."""


class TwoHosts:
    """Two hosts. What runs on them shares the disk, and nothing else but the link."""

    def __init__(self) -> None:
        self.names = [f"sft{os.getpid()}{letter}" for letter in "ab"]
        self.started: list[subprocess.Popen] = []
        self.inits: list[subprocess.Popen] = []

    def begin(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        (a, b) = self.names
        ip("link", "add", DEVICE, "netns", a, "type", "veth", "peer", "name", DEVICE, "netns", b)
        for name, address in zip(self.names, BOTH, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", DEVICE, "up")
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", ALONE, self.host(name)]
            self.inits.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert self.inits[-1].stdout.readline() == "up\n"

    @staticmethod
    def host(name: str) -> str:
        """What a host calls itself."""
        return f"node-{name[-1]}"

    def memory(self, number: int) -> Path:
        """What is in a host's memory."""
        return Path(f"/proc/{self.inits[number].pid}/root/dev/shm")

    def cut(self, whole: bool) -> None:
        """Cut the link, or mend it."""
        ip("-n", self.names[1], "link", "set", DEVICE, "up" if whole else "down")

    def inside(self, number: int, command: list[object]) -> list[str]:
        """A command, as it is run on a host."""
        words = ["nsenter", "-t", self.inits[number].pid, "--net", "--uts", "--mount", "--", *command]
        return [str(word) for word in words]

    def start(self, number: int, command: list[object], environment: dict[str, str], said: Path) -> subprocess.Popen:
        """Start a command on a host; what it says goes into a file."""
        environment = {**environment, "NODE_RANK": str(number), "GLOO_SOCKET_IFNAME": DEVICE}
        with said.open("ab") as file:
            process = subprocess.Popen(
                self.inside(number, command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    def end(self) -> None:
        for name in self.names:
            # All that was ever started there, whoever its parent is by now.
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in map(int, found.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for process in (*self.started, *self.inits):
            process.wait(60)
        for process in self.inits:
            process.stdout.close()


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts, gone with all that runs there when this ends."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("hosts of a network of their own want root, ip, nsenter and unshare")
    hosts = TwoHosts()
    try:
        hosts.begin()
        yield hosts
    finally:
        hosts.end()
