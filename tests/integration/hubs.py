"""Hubs, and jobs beside them: hub, controller and agents are processes that can be killed and started again."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sftriage.fleet.hub import Hub, HubAddress
from sftriage.runtime.hub_server import HubServer, make_secret
from sftriage.windows.gather import Shape
from sftriage.windows.logs import LogReader
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, ROOT, Processes, free_port, wait_until
from tests.integration.runs import verdicts

SIMULATED = Path(__file__).parent / "jobs" / "simulated.py"
WORLD_SIZE, SLOW, STEP_S = 4, 3, 0.05
SHAPE = Shape(40, 20, 5)
RULE = 'name: slow, match: {gain: ">= 5%"}, capture: {steps: 2, warmup_steps: 0, max_seconds: 60}, cooldown: 10m'
POLICY = policy(RULE, steps=(40, 20, 5))
PATIENT = "from sftriage.fleet import over_nats; over_nats.SILENT_S = 120.0"
"""On a busy machine, what was killed is not there again within the time after which a host is given up."""
START = "import sys\n{patch}\nfrom sftriage.commands import main\nsys.argv[0] = 'sftriage'\nmain()"


@contextlib.contextmanager
def own_hub(directory: Path, tls: Path | None = None) -> Iterator[tuple[HubServer, int]]:
    port, secret = free_port(), directory / "secret"
    make_secret(secret)
    with contextlib.closing(HubServer(("127.0.0.1", port), directory / "nats", secret, tls)) as server:
        yield server, port


@contextlib.contextmanager
def connection(port: int, credentials: Path | None, ca: Path | None = None, scheme: str = "nats") -> Iterator[Hub]:
    with contextlib.closing(Hub(HubAddress(f"{scheme}://127.0.0.1:{port}", credentials, ca), "test")) as hub:
        hub.call(hub.connect(), 10.0)
        yield hub


class Parts(Processes):
    """The parts of a job on many hosts. ``patch`` is done in each before it begins."""

    patch = ""

    def __init__(self, directory: Path, environment: dict[str, str], policy: str) -> None:
        super().__init__(directory, {**environment, "PYTHONPATH": str(ROOT)})
        self.secret, self.address = directory / "secret", ("127.0.0.1", free_port())
        self.release, self.run, self.policy = directory / "release", directory / "run", directory / "policy.yaml"
        self.policy.write_text(policy, encoding="utf-8")
        make_secret(self.secret)
        self._held.callback(lambda: self.hub.close())
        self.hub = self.start_hub()
        self.controller = self.start_controller("--out", self.run, "--policy", self.policy)

    @property
    def where(self) -> tuple[object, ...]:
        return "--job-id", "job", "--nats", f"nats://127.0.0.1:{self.address[1]}", "--creds", self.secret

    def sftriage(self, name: str, *options: object) -> subprocess.Popen:
        return self.start(sys.executable, "-c", START.format(patch=self.patch), name, *self.where, *options)

    def start_hub(self) -> HubServer:
        return HubServer(self.address, self.directory / "nats", self.secret)

    def start_controller(self, *options: object) -> subprocess.Popen:
        return self.sftriage("controller", *options)

    @staticmethod
    def kill(process: subprocess.Popen) -> None:
        process.kill()
        process.wait(DEADLINE_S)


class BesideHub(Parts):
    """A hub, a controller and the agent of one host, whose trainers somebody else starts."""

    def __init__(self, directory: Path, environment: dict[str, str], policy: str, patch: str = "") -> None:
        self.patch, self.host = patch, directory / "host"
        places = {"SFTRIAGE_RINGS": str(self.host / "rings"), "SFTRIAGE_SPOOL": str(self.host / "spool")}
        super().__init__(directory, {**environment, **places}, policy)
        self.agent = self.start_agent()
        wait_until((self.host / "host.json").exists, 60.0)

    def start_agent(self) -> subprocess.Popen:
        return self.sftriage("agent", "--directory", self.host, "--name", "host-0")


class Hosts(Parts):
    """Two hosts of a job with two made-up ranks each, the last of which is slow."""

    patch = PATIENT

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        super().__init__(directory, environment, POLICY)
        self.agents = [self.start_agent(number) for number in range(2)]
        self.trainers: list[subprocess.Popen] = []
        self.train(0, 1)

    def train(self, *numbers: int) -> None:
        self.begin_s = time.time() + 2.0
        for first_rank, number in zip((0, 2), numbers, strict=True):
            about = (self.host(number), first_rank, 2, WORLD_SIZE, self.begin_s, STEP_S, SLOW, self.release)
            self.trainers.append(self.start(sys.executable, SIMULATED, *about))

    def train_again(self, *numbers: int) -> None:
        for trainer in self.trainers:
            self.kill(trainer)
        self.trainers.clear()
        self.train(*numbers)

    def host(self, number: int) -> Path:
        return self.directory / f"host-{number}"

    def start_agent(self, number: int) -> subprocess.Popen:
        host = self.host(number)
        return self.sftriage("agent", "--rings", host / "rings", "--directory", host, "--name", f"host-{number}")

    @property
    def windows(self) -> list[dict]:
        return verdicts(self.run)

    def kept(self, number: int, name: str) -> None:
        steps = self.host(number) / "steps"
        wait_until(lambda: [one for one in steps.glob(f"{name}.steps") if len(LogReader(one).read())], 60.0)

    def judged(self, more: int) -> None:
        """Wait until so many steps more are judged than there are now."""
        wanted = (time.time() - self.begin_s) / STEP_S + more
        wait_until(lambda: max((one["last_step"] for one in self.windows), default=0) >= wanted, 60.0)

    def end(self) -> int:
        """Let the job end; how many steps every rank has taken."""
        last_step = int((time.time() - self.begin_s) / STEP_S) + 40
        partial = self.release.with_suffix(".new")
        partial.write_text(str(last_step))
        partial.rename(self.release)
        for trainer in self.trainers:
            assert trainer.wait(60) == 0
        for agent in self.agents:
            agent.terminate()
        assert self.controller.wait(DEADLINE_S) == 0, self.said
        return last_step + 1
