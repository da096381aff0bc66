"""What befalls a job by a seed, and what has to be so of its run afterwards, by its journal, steps and store alone."""

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sftriage.controller.agents import EXPIRES_S
from sftriage.fleet.over_nats import END_GRACE_S
from sftriage.model.captures import ENDED, CaptureRequest
from sftriage.model.events import CaptureChanged, Event, TakenOver, WindowJudged
from sftriage.model.verdicts import Verdict
from sftriage.runs.journal import read_journal
from sftriage.runs.recordings import load_recording
from sftriage.traces.store import LocalStore
from sftriage.windows.gather import Shape
from sftriage.windows.log_files import LogFiles, find_logs
from sftriage.windows.logs import LogReader

WORLD_SIZE = 4
FIRST_FAULT_STEP, FAULT_STEPS, FAULT_EVERY_STEPS = 60, 160, 240
SLOW = [(rank, stage) for rank in range(WORLD_SIZE) for stage in ("data", "forward")]
MOST_FAULTS = 400

KILLS = (
    "kill agent",
    "kill agent in capture",
    "kill controller",
    "kill controller at request",
    "kill hub",
    "kill trainers",
)
"""What is killed is started again after a while, as a supervisor would."""
WHILES = (
    "stop agent",
    "stop controller",
    "stop hub",
    "cut link",
    "slow link",
    "drop link",
    "fill agent's disk",
    "fill run's disk",
)
"""What is so for a while, and mended then. What is stopped does not go on, as on a host that sleeps."""
ONCE = ("restart hub", "lose hub's store", "lose consumer")
KINDS = (*KILLS, *WHILES, *ONCE)


@dataclass(frozen=True, slots=True)
class Action:
    """Something that befalls a part of the job ``at_s`` seconds after its begin; of an agent, that of a ``host``."""

    at_s: float
    kind: str
    host: int
    for_s: float

    def __str__(self) -> str:
        whose = f" of host {self.host}" if "agent" in self.kind or self.kind in ("slow link", "drop link") else ""
        return f"{self.at_s:.1f} s: {self.kind}{whose}, for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Fault:
    first_step: int
    last_step: int
    rank: int
    stage: str

    def __str__(self) -> str:
        return f"{self.first_step}-{self.last_step}:{self.rank}:{self.stage}"


def actions(
    seed: int, kinds: Sequence[str] = KINDS, *, first_s: float = 4.0, last_s: float, every_s: float, longest_s: float
) -> tuple[Action, ...]:
    """Actions between two times, one every so many seconds or so; each kind comes before any comes again."""
    draw, found, left = random.Random(seed), [], list[str]()
    at_s = first_s
    while at_s < last_s:
        left = left or draw.sample(kinds, len(kinds))
        found.append(Action(at_s, left.pop(), draw.randrange(2), draw.uniform(0.2, longest_s)))
        at_s += draw.uniform(0.2, 2.0) * every_s
    return tuple(found)


def faults(seed: int, start: int) -> tuple[Fault, ...]:
    """Faults of one start of the job, one after the other, no two of them in the same steps."""
    draw, left, found = random.Random(f"{seed} {start}"), list[tuple[int, str]](), []
    for number in range(MOST_FAULTS):
        left = left or draw.sample(SLOW, len(SLOW))
        first_step = FIRST_FAULT_STEP + number * FAULT_EVERY_STEPS
        found.append(Fault(first_step, first_step + FAULT_STEPS - 1, *left.pop()))
    return tuple(found)


SLACK_S = 5.0  # what a controller takes to come to it, and to put it on record


@dataclass(frozen=True, slots=True)
class Found:
    """What a journal says: its windows, what was asked for in which of them, and what has become of that."""

    windows: tuple[WindowJudged, ...]
    asked: Mapping[str, list[tuple[CaptureRequest, WindowJudged]]]
    states: Mapping[str, list[CaptureChanged]]
    taken_over: int


@dataclass(slots=True)
class Outcome:
    """What has become of the faults that were injected: of each one word; and what is wrong."""

    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    windows: int = 0
    captures: Counter[str] = field(default_factory=Counter)
    taken_over: int = 0


def found_in(events: Sequence[Event]) -> Found:
    windows = tuple(one for one in events if isinstance(one, WindowJudged) and one.verdict.label != "stalled")
    asked, states = defaultdict(list), defaultdict(list)
    for one in events:
        if isinstance(one, WindowJudged):
            for request in one.decision.requests:
                asked[request.capture_id].append((request, one))
        elif isinstance(one, CaptureChanged):
            states[one.result.capture_id].append(one)
    return Found(windows, asked, states, sum(isinstance(one, TakenOver) for one in events))


Starts = Mapping[frozenset[int], Sequence[Fault]]
"""What was slow in each start of a job, by the processes of that start."""


def checked(run: Path, starts: Starts, shape: Shape, *, lossless: bool) -> Outcome:
    """All of it; where what befell the job can have lost no step, that none is."""
    damaged: list[bytes] = []
    events = list(read_journal(run / "decisions.jsonl", damaged))
    found, outcome = found_in(events), Outcome()
    outcome.windows, outcome.taken_over = len(found.windows), found.taken_over
    outcome.captures.update(one[-1].result.state for one in found.states.values())
    problems = outcome.problems
    if damaged:
        problems.append(f"{len(damaged)} lines of the journal hold no event")
    problems += [*of_captures(found), *of_store(run, found), *of_windows(run, found, shape, lossless=lossless)]
    problems += of_steps(run, found, lossless=lossless)
    problems += of_faults(found, _faults(run, starts), outcome.faults)
    return outcome


def of_captures(found: Found) -> Iterator[str]:
    """What was asked for has ended once, and nothing else was captured."""
    for capture_id, some in found.asked.items():
        states = [one.result.state for one in found.states.get(capture_id, ())]
        if len(some) != 1:
            yield f"capture {capture_id} was asked for {len(some)} times"
        if sum(one in ENDED for one in states) != 1 or states[-1] not in ENDED:
            yield f"capture {capture_id} has not ended once: {states}"
        for one in (one for one in found.states.get(capture_id, ()) if one.result.state in ENDED):
            request, why = some[0]
            took_s = one.time_s - why.decision.time_s
            if took_s > EXPIRES_S + request.max_seconds + END_GRACE_S + SLACK_S:
                yield f"capture {capture_id} ended {took_s:.0f} s after it was decided on"
    for capture_id in found.states.keys() - found.asked.keys():
        yield f"capture {capture_id} was never asked for"


def of_store(run: Path, found: Found) -> Iterator[str]:
    """The store has what was stored, whole, with the window that led to it."""
    store = LocalStore(run)
    stored = {capture_id for capture_id, some in found.states.items() if some[-1].result.state == "stored"}
    if store.ids() != stored:
        yield f"the store has {sorted(store.ids())}, where {sorted(stored)} were stored"
    for capture_id in store.ids() & stored:
        manifest = store.manifest(capture_id)
        for artefact in manifest.artefacts:
            data = store.path(capture_id, artefact.name).read_bytes()
            if (len(data), hashlib.sha256(data).hexdigest()) != (artefact.size_bytes, artefact.sha256):
                yield f"{artefact.name} of capture {capture_id} is damaged"
        for request, why in found.asked.get(capture_id, ()):
            window, capture = manifest.trigger.window, manifest.capture
            if (window.first_step, window.last_step) != (why.verdict.first_step, why.verdict.last_step):
                yield f"capture {capture_id} names another window than that which led to it"
            if capture.rank != request.rank or capture.first_step <= why.verdict.last_step:
                yield f"capture {capture_id} is not what was asked for"
    left = [path.name for path in (run / "spool").iterdir()] if (run / "spool").is_dir() else []
    left += [path.name for path in (run / "captures").glob(".*") if path.name != ".lock"]
    if left:
        yield f"left behind: {left}"


def of_windows(run: Path, found: Found, shape: Shape, *, lossless: bool) -> Iterator[str]:
    """Each window is judged once, on one grid, and none is left out of an attempt whose steps are all on record."""
    for attempt, verdicts in by_attempt(found).items():
        firsts = [one.first_step for one in verdicts]
        if again := [step for step, times in Counter(firsts).items() if times > 1]:
            yield f"attempt {attempt}: windows from {again} were judged more than once"
        grid = range(min(firsts), max(firsts) + 1, shape.stride_steps)
        if off := sorted(set(firsts) - set(grid)):
            yield f"attempt {attempt}: windows from {off} are not where windows begin"
        # (what a hub loses while there is no controller, nobody judges)
        if lossless and (out := sorted(set(grid) - set(firsts))):
            here = here_of(run, attempt, max(firsts) + shape.window_steps)
            if whole := [step for step in out if here[step : step + shape.window_steps].all()]:
                yield f"attempt {attempt}: windows from {whole} were left out, though all of their steps are there"
        if any(one.last_step - one.first_step + 1 != shape.window_steps for one in verdicts):
            yield f"attempt {attempt}: windows of other lengths"


def of_steps(run: Path, found: Found, *, lossless: bool) -> Iterator[str]:
    """What a window says that it covers is on record, once."""
    covered = {attempt: set[int]() for attempt in by_attempt(found)}
    for attempt, verdicts in by_attempt(found).items():
        for one in verdicts:
            if one.numbers["coverage"] == 1.0:
                covered[attempt] |= set(range(one.first_step, one.last_step + 1))
    for attempt, steps in covered.items():
        here_N = here_of(run, attempt, max(steps, default=0) + 1)
        if lacking := sorted(step for step in steps if not here_N[step]):
            yield f"attempt {attempt}: steps {lacking} were told as covered and are not on record"
        if lossless and steps and not here_N.all():
            yield f"attempt {attempt}: steps {np.flatnonzero(~here_N).tolist()} were lost"
    for log in find_logs(run / "steps"):
        if skipped := _skipped(log):
            yield f"rank {log.rank} of attempt {log.attempt}: {skipped} steps are there twice, or damaged"


def here_of(run: Path, attempt: int, n_steps: int) -> NDArray[np.bool_]:
    """Of the first so many steps of an attempt, which are on record for all of its ranks."""
    here_N = np.zeros(n_steps, dtype=np.bool_)
    # (they may begin at any step, and end at any)
    for window in load_recording(run).windows(Shape(1, 1, 0)):
        if window.attempt == attempt and window.first_step < n_steps:
            here_N[window.first_step] = np.isfinite(window.durations_NRS).all()
    return here_N


def _skipped(log: LogFiles) -> int:
    reader = LogReader(log)
    while len(reader.read()):
        pass
    return reader.skipped


def attempts(run: Path) -> dict[int, int]:
    """A process of each attempt, as its steps name it."""
    return {log.attempt: LogReader(log.newest).info.pid for log in find_logs(run / "steps")}


def _faults(run: Path, starts: Starts) -> dict[int, Sequence[Fault]]:
    return {
        attempt: next(some for pids, some in starts.items() if pid in pids) for attempt, pid in attempts(run).items()
    }


def of_faults(found: Found, faults: Mapping[int, Sequence[Fault]], outcomes: Counter[str]) -> Iterator[str]:
    """A fault that windows show was decided about, and captured once at most; ``outcomes`` counts what became of it."""
    for attempt, verdicts in by_attempt(found).items():
        reached = max(one.last_step for one in verdicts)
        for fault in (one for one in faults[attempt] if one.first_step <= reached):
            yield from _of_fault(found, attempt, fault, outcomes)


def _of_fault(found: Found, attempt: int, fault: Fault, outcomes: Counter[str]) -> Iterator[str]:
    within = [
        one
        for one in found.windows
        if one.verdict.attempt == attempt
        and fault.first_step <= one.verdict.first_step
        and one.verdict.last_step <= fault.last_step
    ]
    whole = [one for one in within if one.verdict.numbers["coverage"] == 1.0]
    near = [
        one
        for one in found.windows
        if one.verdict.attempt == attempt
        and one.verdict.first_step <= fault.last_step
        and fault.first_step <= one.verdict.last_step
        and (named := one.verdict.named) is not None
        and (named.rank, named.stage) == (fault.rank, fault.stage)
    ]
    asked = [request for one in near for request in one.decision.requests if request.rank == fault.rank]
    states = [found.states[one.capture_id][-1].result.state for one in asked if found.states.get(one.capture_id)]
    if len(asked) > 1:
        yield f"attempt {attempt}, fault {fault}: {len(asked)} captures, {states}"
    if asked:
        outcomes[states[0] if states else "lost"] += 1
    elif near:
        outcomes["held off"] += 1
        if any(not one.decision.reason for one in near):
            yield f"attempt {attempt}, fault {fault}: held off without a reason"
    elif len(whole) < 2:
        outcomes["not covered"] += 1
    else:
        outcomes["lost"] += 1
        labels = [(one.verdict.first_step, one.verdict.label, one.verdict.reasons) for one in whole]
        yield f"attempt {attempt}, fault {fault}: nobody was named, by {labels}"


def by_attempt(found: Found) -> dict[int, list[Verdict]]:
    verdicts = defaultdict(list)
    for one in found.windows:
        verdicts[one.verdict.attempt].append(one.verdict)
    return verdicts
