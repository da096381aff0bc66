"""A SLURM cluster of two nodes: Debian's slurmctld, slurmd and munged, each node a host with a network of its own.

What a node has to itself is its name, its address and its /dev/shm; all file systems beside that are shared, but for
one directory, `Cluster.apart`, which every node has for itself.
"""

import contextlib
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.namespaces import BOTH, DEVICE, Hosts, two_hosts
from tests.integration.processes import DEADLINE_S, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "nsenter")
NODES = ("node-a", "node-b")
DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd")
KILL_WAIT_S = 120  # between SIGTERM and SIGKILL: 30 s by default, of a machine that does nothing else
CONFIGURATION = """
ClusterName=test
SlurmctldHost=node-a
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
KillWait={kill_wait_s}
GresTypes=gpu
NodeName=node-a NodeAddr={a} CPUs=256 Gres=gpu:16 State=UNKNOWN
NodeName=node-b NodeAddr={b} CPUs=256 Gres=gpu:16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SETTLE = """
mount --bind {place}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs {apart}
exec "$@"
"""


class Cluster:
    def __init__(self, hosts: Hosts, place: Path, environment: dict[str, str]) -> None:
        self._hosts, self._place = hosts, place
        self.apart = place / "apart"  # a directory that each node has for itself
        self.environment = {**environment, "SLURM_CONF": str(place / "slurm.conf"), "GLOO_SOCKET_IFNAME": DEVICE}
        # (nothing of a cluster that the tests themselves run on)
        for name in [one for one in self.environment if one.startswith("SLURM_") and one != "SLURM_CONF"]:
            del self.environment[name]
        for name in ("apart", "state", *NODES):
            (place / name).mkdir()
        (place / "munge.key").write_bytes(secrets.token_bytes(128))
        (place / "munge.key").chmod(0o400)
        names = "".join(f"{address} {name}\n" for address, name in zip(BOTH, NODES, strict=True))
        (place / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (a, b) = BOTH
        (place / "slurm.conf").write_text(CONFIGURATION.format(place=place, kill_wait_s=KILL_WAIT_S, a=a, b=b))
        # (GPUs to be asked for: nobody uses them)
        (place / "gres.conf").write_text(f"Name=gpu File={place}/gpu[0-15]\n")
        for number in range(16):
            (place / f"gpu{number}").touch()
        # (which one there is is not to be looked for: nothing of it is used)
        (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._nodes: list[subprocess.Popen] = []

    def begin(self) -> None:
        place = self._place
        files = [f"--{one}-file={place}/munge.{one}" for one in ("key", "pid", "log", "seed")]
        self._daemon(0, "munged", "--foreground", "--force", f"--socket={place}/munge.socket", *files)
        wait_until(lambda: (place / "munge.socket").exists(), 30.0)
        self._daemon(0, "slurmctld", "-D", "-c")
        self._nodes = [self._daemon(number, "slurmd", "-D", "-N", name) for number, name in enumerate(NODES)]
        try:
            wait_until(lambda: self.run(0, "sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "2", 60.0)
        except AssertionError as error:
            said = "\n".join(file.read_text("utf-8", "replace") for file in place.glob("*.log"))
            raise AssertionError(f"SLURM does not come up: {said}") from error

    def _daemon(self, number: int, *command: object) -> subprocess.Popen:
        settled = ["sh", "-ec", SETTLE.format(place=self._place, apart=self.apart), "sh"]
        said = self._place / f"{command[0]}-{number}.log"
        return self._hosts.start(number, [*settled, *command], self.environment, said)

    def on(self, number: int, *command: object, cwd: Path = Path("/")) -> list[str]:
        node = ["nsenter", "-t", self._nodes[number].pid, "-m", "-n", "-u", "env", "-C", cwd]
        return [*map(str, node), *map(str, command)]

    def run(self, number: int, *command: object, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
        inside = self.on(number, *command, cwd=cwd)
        return subprocess.run(
            inside, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    def submit(self, script: Path, *options: object, cwd: Path) -> str:
        done = self.run(0, "sbatch", "--parsable", *options, script, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def about(self, job: str) -> dict[str, str]:
        shown = self.run(0, "scontrol", "show", "job", "-o", job).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def left(self) -> list[tuple[str, str]]:
        """What there is of jobs on the nodes: files in their memory; and processes, with the job that each is of."""
        found = []
        for number, name in enumerate(self._hosts.names):
            found += [("", path) for path in self.run(number, "find", "/dev/shm", "-mindepth", 1).stdout.split()]
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
            for pid in pids.stdout.split():
                with contextlib.suppress(OSError):
                    process = Path(f"/proc/{pid}")
                    if process.joinpath("comm").read_text().strip() not in DAEMONS:
                        words = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
                        of = re.search(rb"SLURM_JOB_ID=(\d+)", process.joinpath("environ").read_bytes())
                        found.append((of[1].decode() if of else "", words))
        return found

    def ended(self, job: str) -> bool:
        return self.about(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


@contextlib.contextmanager
def cluster_of_two(environment: dict[str, str]) -> Iterator[Cluster]:
    missing = [one for one in PROGRAMS if shutil.which(one) is None]
    if missing:
        pytest.skip(f"SLURM is not here ({', '.join(missing)}): tests/install-deps installs it on Debian")
    # (a socket's path has to be short)
    place = Path(tempfile.mkdtemp(prefix="sft-slurm-"))
    try:
        with two_hosts() as hosts:
            cluster = Cluster(hosts, place, environment)
            cluster.begin()
            yield cluster
    finally:
        shutil.rmtree(place, ignore_errors=True)
