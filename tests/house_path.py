"""Names the files that a window enters from a rank's ring to its reduced trace: `python -m tests.house_path`.

Two ranks train in this process, and one becomes slow in data. A profiler of Python's calls notes each file of sftriage
that runs until the capture is stored and reduced: in the trainer, the agent, the controller and the store. What only
some of `RUNS` runs enter is due to time and not to the window: on a slow machine, links or a stall. Fails where the
others are more than `MOST`, which only goes down.
"""

import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import torch  # noqa: F401 (a capture profiles only where the script has imported it)

import sftriage
import sftriage.trainer.evidence  # (a thread imports it once, at the start of a rank)
from sftriage.model.events import CauseFound, Event
from sftriage.policy.in_force import PolicyFiles
from sftriage.runs.directory import create
from sftriage.runtime.copies import KEEP_ALL
from sftriage.runtime.local import ThisHost
from sftriage.runtime.triage import Triage
from sftriage.sinks.stream import Sink
from sftriage.trainer.monitor import Monitor

MOST, RUNS = 61, 3
FAULT_STEP, MAX_STEPS, DEADLINE_S = 200, 10_000, 60.0
SOURCE = str(Path(sftriage.__file__).parent) + "/"
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: slow}
spec:
  detection: {window_steps: 40, stride_steps: 40, warmup_steps: 0}
  rules: [{name: slow, match: {label: suspect}, capture: {profiler: torch, steps: 2}}]
"""


class Reduced(Sink):
    """Waits for the cause of the first capture."""

    name = "reduced"

    def __init__(self) -> None:
        self.event = threading.Event()

    def take(self, seen: Event) -> None:
        if isinstance(seen, CauseFound):
            self.event.set()


def entered(folder: Path) -> set[str]:
    """The files of sftriage, relative to the package, that run in threads started here."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name != "<module>":
            files.add(code.co_filename.removeprefix(SOURCE))

    rings, policy = folder / "rings", folder / "policy.yaml"
    rings.mkdir()
    policy.write_text(POLICY)
    policies, reduced = PolicyFiles([policy]), Reduced()
    info = KEEP_ALL.info("run", "job", ("train",), policies, rings)
    directory = create(folder / "run", info, POLICY)
    exchange, over = threading.Barrier(2), threading.Event()

    def train(rank: int) -> None:
        about = {"rank": rank, "world_size": 2, "rings": rings, "spool": directory.spool, "device_time": False}
        with suppress(threading.BrokenBarrierError), Monitor(("data", "backward"), ("backward",), **about) as monitor:
            for step in range(MAX_STEPS):
                if over.is_set():
                    exchange.abort()
                with monitor.step():
                    with monitor.stage("data"):
                        time.sleep(0.006 if rank and step >= FAULT_STEP else 0.001)
                    with monitor.stage("backward"):
                        exchange.wait(DEADLINE_S)

    triage = Triage(directory, info, policies, ThisHost(directory, info), [reduced])
    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    threading.setprofile(note)
    triage.start()
    for rank in ranks:
        rank.start()
    found = reduced.event.wait(DEADLINE_S)
    threading.setprofile(None)
    over.set()
    for rank in ranks:
        rank.join(DEADLINE_S)
    triage.close()
    if not found:
        raise RuntimeError(f"no capture was reduced: {directory.decisions.read_text()[-2000:]}")
    return files


def main() -> int:
    found = set[str]()
    for run in range(RUNS):
        with TemporaryDirectory() as folder:
            now = entered(Path(folder))
        found = found & now if run else now
        if len(found) <= MOST:
            break
    files = sorted(found)
    packages: dict[str, list[str]] = defaultdict(list)
    for file in files:
        package, _, module = file.rpartition("/")
        packages[package].append(module.removesuffix(".py"))
    for package, modules in packages.items():
        sys.stdout.write(f"{package:16}{len(modules):3}  {' '.join(modules)}\n")
    sys.stdout.write(f"a window enters {len(files)} files; {MOST} are the most\n")
    return int(len(files) > MOST)


if __name__ == "__main__":
    sys.exit(main())
