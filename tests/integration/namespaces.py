"""Hosts as namespaces: each with an address, a name and memory of its own, joined by one switch."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import needs
from tests.integration.processes import FORKED, kill

DEVICE = "veth0"
BOTH = ("10.97.0.1", "10.97.0.2")


def printed_elsewhere(code: str, *arguments: object) -> str:
    """What Python prints where process ids of here say nothing, as in another container."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(needs.NO_NAMESPACE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True)


ALONE = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep infinity'
"""What makes a host of a process: what is in memory on one host is on no other."""


class Hosts:
    """Some hosts. What runs on them shares the disk, and nothing else but the network."""

    def __init__(self, number: int) -> None:
        self.names = [f"sft{os.getpid()}{letter}" for letter in "abcdefgh"[:number]]
        self.addresses = [f"10.97.0.{number + 1}" for number in range(number)]
        self.started: list[subprocess.Popen] = []
        self.inits: list[subprocess.Popen] = []
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
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", ALONE, self.host(name)]
            self.inits.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert self.inits[-1].stdout.readline() == "up\n"

    @staticmethod
    def host(name: str) -> str:
        return f"node-{name[-1]}"

    def memory(self, number: int) -> Path:
        return Path(f"/proc/{self.inits[number].pid}/root/dev/shm")

    def cut(self, whole: bool) -> None:
        ip("-n", self.names[1], "link", "set", DEVICE, "up" if whole else "down")

    def limit(self, number: int, rate: str, *, receiving: bool = False) -> None:
        """Limit what a host sends to its network, or receives from it."""
        name, device = (self._switch, f"port-{self.names[number][-1]}") if receiving else (self.names[number], DEVICE)
        shaped = ["tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate]
        subprocess.run([*shaped, "burst", "128kb", "latency", "50ms"], check=True, capture_output=True)

    def torchrun(
        self,
        directory: Path,
        environment: dict[str, str],
        options: Sequence[object],
        *script: object,
        ranks: int,
        port: int,
        forked: bool = False,
    ) -> list[subprocess.Popen]:
        """`sftriage run` of a job by torchrun (or ``forked``) on all hosts, each with a working directory of its own.

        Its policy is ``policy.yaml`` in ``directory``, where its run goes, and what each host says: ``said-0``, ...
        """
        started = []
        for number in range(len(self.names)):
            place = directory / f"host-{number}"
            place.mkdir(exist_ok=True)
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", len(self.names)]
            launcher += ["--node-rank", number]
            launcher += ["--nproc-per-node", ranks, "--master-addr", BOTH[0], "--master-port", port]
            launcher = [*FORKED, ranks] if forked else launcher
            run = [sys.executable, "-m", "sftriage", "run", *options, "--hub", BOTH[0], "--out", directory / "run"]
            run += ["--creds", directory / "secret", "--policy", directory / "policy.yaml"]
            # (each host may have a driver of its own)
            command = ["env", "-C", place, f"NVML_STUB={place / 'nvml'}", *run, "--", *launcher, *script]
            meeting = {"NODES": "2", "MEET_AT": f"{BOTH[0]}:{port}"} if forked else {}
            own = {**environment, **meeting, "PYTHONPATH": str(Path(__file__).parents[2])}
            started.append(self.start(number, command, own, directory / f"said-{number}"))
        return started

    def inside(self, number: int, command: list[object]) -> list[str]:
        words = ["nsenter", "-t", self.inits[number].pid, "--net", "--uts", "--mount", "--", *command]
        return [str(word) for word in words]

    def start(self, number: int, command: list[object], environment: dict[str, str], said: Path) -> subprocess.Popen:
        environment = {"NODE_RANK": str(number), **environment, "GLOO_SOCKET_IFNAME": DEVICE}
        with said.open("ab") as file:
            process = subprocess.Popen(
                self.inside(number, command), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.started.append(process)
        return process

    def kill(self, number: int) -> None:
        """Kill all that was ever started on a host, whoever its parent is by now."""
        name, init = self.names[number], [one.pid for one in self.inits[number : number + 1]]
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        kill(*{*map(int, found.split())}.difference(init))

    def pids(self, number: int, of: str) -> list[int]:
        """The processes of a host with a word in their command."""
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=True)
        commands = ((pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in map(int, found.stdout.split()))
        return [pid for pid, command in commands if of.encode() in command]

    def end(self) -> None:
        for number in range(len(self.names)):
            self.kill(number)
        for process in self.inits:
            process.kill()
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for process in (*self.started, *self.inits):
            process.wait(60)
        for process in self.inits:
            process.stdout.close()


@contextlib.contextmanager
def hosts_of(number: int) -> Iterator[Hosts]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("hosts of a network of their own want root, ip, nsenter and unshare")
    hosts = Hosts(number)
    try:
        hosts.begin()
        yield hosts
    finally:
        hosts.end()


def two_hosts() -> contextlib.AbstractContextManager[Hosts]:
    return hosts_of(2)
