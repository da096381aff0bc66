"""Why a stage took so long: from what filled it in the trace, and from the stacks that were sampled meanwhile. Pure.

A cause is looked for in what the stage took *longer* than beside the control. First what the system says: a thread that
waits for a core is held up by no line of its own. Then operators, where the trace has them; else the line of the
program at which the thread stood, and what it did there, told by whether it ran and by what it had called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import PurePath

from sftriage.reduce.samples import Frame, Spot, StackSamples, spots
from sftriage.traces.manifest import CauseCode, CauseInfo, Findings, PlaceInfo

LEAST_FRACTION = 0.04
"""Of a step: what is longer by less is not slow, and has no cause. It is what a policy's `min_gain` is by default."""

MAIN_FRACTION = 0.5
"""Of what the stage took longer, what a cause has to account for."""

WORKS_MORE_FRACTION = 0.25
"""Of what the stage took longer: a thread that ran for as much more did not only wait for a core."""

SURE_FRACTION = 0.7
SURE_SAMPLES = 10
SURE_STEPS = 4
"""What makes it sure: so much of it, and so many samples at that place, or some in so many steps: where the interpreter
is held, one sample stands for long."""

RUNS_FRACTION = 0.6
"""A thread that runs, or could if it had a core, for as much of the time works; any other waits for something."""

_CALLED: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("recompilation", re.compile(r"torch/_(dynamo|inductor)/")),
    ("dataloader_workers", re.compile(r" _MultiProcessingDataLoaderIter\.")),
    ("checkpoint", re.compile(r"torch/(serialization\.py (_?save|_legacy_save)|distributed/checkpoint/)")),
    ("collective", re.compile(r"torch/distributed/distributed_c10d\.py")),
    ("network", re.compile(r"/(socket|ssl)\.py |/(http|urllib|urllib3|requests|aiohttp|botocore|fsspec)/")),
    ("lock", re.compile(r"/(threading|queue)\.py |/multiprocessing/(synchronize|queues|connection)\.py ")),
)
"""By what the program had called, as ``FILE FUNCTION``: of several the first."""

_STANDS_AT: tuple[tuple[CauseCode, re.Pattern[str]], ...] = (
    ("sleep", re.compile(r"\bsleep\(")),
    ("garbage_collection", re.compile(r"\bgc\.collect\(")),
    ("network", re.compile(r"\b(recv\w*|sendall|urlopen|getresponse|connect)\(")),
    ("disk", re.compile(r"\b(open|read\w*|pread\w*|write\w*|fsync|fromfile|np\.load|torch\.load|memmap)\(")),
    ("lock", re.compile(r"\b(acquire|join)\(")),
    ("checkpoint", re.compile(r"\b(torch|dcp|checkpoint\w*)\.save\(")),
)
"""By the line at which the innermost function stood, which calls what has no Python of its own."""

_WORKS: frozenset[CauseCode] = frozenset({"garbage_collection", "recompilation", "checkpoint", "disk"})
"""What a thread may well run for; of a thread that runs the others are not the cause."""

_BY_SYSTEM: dict[CauseCode, Callable[[Spot], float | None]] = {
    "descheduled": lambda spot: spot.waited_fraction,
    "stopped": lambda spot: spot.stopped_fraction,
}

DOES: dict[CauseCode, str] = {
    "sleep": "which sleeps",
    "dataloader_workers": "which waits for the workers of its DataLoader",
    "lock": "which waits for another thread or process",
    "network": "which waits for the network",
    "disk": "which reads or writes files",
    "checkpoint": "which saves a checkpoint",
    "garbage_collection": "which collects garbage",
    "recompilation": "which compiles again",
    "collective": "which waits in a collective",
    "python": "which computes in Python",
    "operator": "",
    "blocked": "which waits there, for what is not known",
    "gil": "which waits for the interpreter (the GIL), for it is held by thread",
    "descheduled": "it was ready to run and waited for a core",
    "stopped": "the whole process stood still",
    "unknown": "",
}

NEXT_STEP: dict[CauseCode, str] = {
    "sleep": "Look at why that line sleeps, and on this rank alone.",
    "dataloader_workers": "Give the loader more workers, or look at what one does: py-spy dump --pid WORKER.",
    "lock": "Look at who holds what it waits for: the other threads are in the same file of stacks.",
    "network": "Look at the network of this rank's host, and at what it fetches at that line.",
    "disk": "Look at this host's disk (iostat -x 1), and at whether the file can be kept in memory.",
    "checkpoint": "Save in the background, or give such steps a kind of their own: monitor.step(kind=...).",
    "garbage_collection": "Collect at the same step on all ranks: gc.disable(), and gc.collect() every so many steps.",
    "recompilation": "Look at what changes from step to step: TORCH_LOGS=recompiles says why it compiles again.",
    "collective": "The others of this collective are who to look at: compare their stacks.",
    "python": "Look at that function; a capture with with_stack counts its calls.",
    "operator": "Compare its inputs with the other rank's: a capture with record_shapes has them.",
    "blocked": "Look at the stacks of the other threads, in the same file, and at what that line calls.",
    "descheduled": "Look at what else runs on its host (top -H), or pin the rank to cores of its own.",
    "gil": "Move what that thread does to a process of its own, or have it let go of the interpreter.",
    "stopped": "Look at who stops it (SIGSTOP, cpulimit), and at the CPU limit of its cgroup (cpu.stat: nr_throttled).",
    "unknown": "Look at the trace, beside that of another rank: sftriage capture --rank N.",
}


def cause_of(
    findings: Findings,
    suspect: StackSamples | None,
    control: StackSamples | None,
    fault_steps: Collection[int] = (),
    over_s: float | None = None,
) -> CauseInfo:
    """Why the stage of some findings took so long.

    Args:
        findings: what filled it.
        suspect: the stacks that were sampled on the suspect; None where none were.
        control: those of the control rank.
        fault_steps: the steps that have the fault; none where that is not known.
        over_s: by how much the recorded steps have the stage longer than on the suspect's peers, in seconds a step;
            None where they do not say. No place in it took these longer than their whole stage, so that it can be
            told from a capture of the suspect alone.
    """
    return _Search(findings, suspect, control, fault_steps, over_s).cause()


def cause_of_rank(rank: int, sampled: StackSamples | None, over_s: float, operator: str = "") -> CauseInfo:
    """Why a rank is slow in all its local stages alike: no line of its own can be why, what is done to it can.

    Args:
        rank: the rank.
        operator: what took the most of its longest stage, "" where that is no operator.
        sampled: the stacks that were sampled on it; None where none were.
        over_s: by how much it is over its peers, in seconds a step.
    """
    if over_s <= 0.0:
        said = f"Rank {rank} was no slower than its peers while it was captured."
        return CauseInfo(code="unknown", sure=False, sentence=said, next_step=NEXT_STEP["unknown"])
    found = [] if sampled is None else spots(sampled, None)
    # (a step may have no sample, where the sampler was kept from it)
    n_steps = 0 if sampled is None or not found else max(sampled.step_N) - min(sampled.step_N) + 1
    samples = sum(one.samples for one in found)
    subject = f"Rank {rank} is slow in all its local stages"
    by: dict[CauseCode, Callable[[Spot], float | None]] = {**_BY_SYSTEM, "gil": lambda one: one.gil_fraction}
    for code, fraction_of in by.items() if found else ():
        took_s = sum(one.weight_ns * (fraction_of(one) or 0.0) for one in found) * 1e-9 / max(1, n_steps)
        if took_s < MAIN_FRACTION * over_s:
            continue
        does = DOES[code]
        if code == "gil" and sampled is not None:
            does = f"it waited for the interpreter (the GIL), held by thread {_busiest(sampled)}"
        return CauseInfo(
            code=code,
            # What the system has counted stands on no number of samples.
            sure=samples >= SURE_STEPS and took_s >= SURE_FRACTION * over_s,
            sentence=f"{subject}, {_ms(over_s)} a step over its peers: for {_ms(took_s)} {does}.",
            next_step=NEXT_STEP[code],
            took_s=took_s,
        )
    ran_s = sum(one.weight_ns * (one.run_fraction or 0.0) for one in found) * 1e-9 / max(1, n_steps)
    if operator and found and ran_s >= SURE_FRACTION * over_s:
        return CauseInfo(
            code="operator",
            sure=False,
            sentence=f"{subject}, {_ms(over_s)} a step over its peers: it computes for {_ms(ran_s)}, first of all "
            f"{operator}; it has more work than they have, or a slower processor.",
            next_step=NEXT_STEP["operator"],
            took_s=ran_s,
        )
    return CauseInfo(
        code="unknown",
        sure=False,
        sentence=f"{subject}, {_ms(over_s)} a step over its peers, and it is not known why.",
        next_step="Look at its host: clocks and temperature (nvidia-smi -q -d CLOCK,TEMPERATURE; turbostat).",
    )


class _Search:
    def __init__(
        self,
        findings: Findings,
        suspect: StackSamples | None,
        control: StackSamples | None,
        fault_steps: Collection[int],
        over_s: float | None,
    ) -> None:
        self.findings, self.sampled = findings, suspect
        stage, beside = findings.stage, findings.control
        steps = frozenset(fault_steps) or None
        self.stage_s = findings.suspect.stage_s
        # What the whole stage took those that it is compared with.
        peers_s = None if over_s is None else min(self.stage_s, max(0.0, self.stage_s - over_s))
        self.others_s = peers_s if beside is None else beside.stage_s
        self.longer_s = self.stage_s - (self.others_s or 0.0)
        self.spots = [] if suspect is None else spots(suspect, stage, steps)
        if findings.beside == "steps":
            its = set(() if suspect is None else suspect.step_N) - set(fault_steps)
            self.others = [] if suspect is None or not its else spots(suspect, stage, its)
        else:
            self.others = [] if control is None else spots(control, stage, steps) or spots(control, stage)
        self.samples = sum(one.samples for one in self.spots)
        self.weight_ns = sum(one.weight_ns for one in self.spots)

    def cause(self) -> CauseInfo:
        """The first that accounts for enough."""
        if self.others_s is None:
            return self._unknown(self._nobody_to_compare_with())
        if self.longer_s <= LEAST_FRACTION * self.findings.suspect.step_s:
            return self._unknown(f"{self.findings.stage} took hardly longer than what it is compared with")
        line = self._line()
        # (what is known by its name says more than the operators in it)
        named = line if line is not None and line.code in _WORKS else None
        return self._system() or named or self._operator() or line or self._unknown(self._nothing_stands_out())

    def _seconds(self, spot: Spot) -> float:
        """What a place took of the stage, a step."""
        return self.stage_s * spot.weight_ns / self.weight_ns if self.weight_ns else 0.0

    def _control_s(self, spot: Spot) -> float | None:
        """What the same function took the control."""
        beside, weight_ns = self.findings.control, sum(one.weight_ns for one in self.others)
        if beside is None or not weight_ns:
            return None
        same = (spot.frame.function, spot.frame.file)
        its_ns = sum(one.weight_ns for one in self.others if (one.frame.function, one.frame.file) == same)
        return beside.stage_s * its_ns / weight_ns

    def _system(self) -> CauseInfo | None:
        """What the system did to the rank: it waited for a core, or stood still as a whole."""
        for code, fraction_of in _BY_SYSTEM.items():
            took_s = sum(self._seconds(one) * (fraction_of(one) or 0.0) for one in self.spots)
            beside, weight_ns = self.findings.control, sum(one.weight_ns for one in self.others)
            control_s = None
            if beside is not None and weight_ns:
                control_s = sum(one.weight_ns * (fraction_of(one) or 0.0) for one in self.others)
                control_s *= beside.stage_s / weight_ns
            enough = took_s - (control_s or 0.0) >= MAIN_FRACTION * self.longer_s
            if enough and not (code == "descheduled" and self._works_more()):
                said = f"{self._subject()}: for {_of(took_s, self.stage_s)} {DOES[code]}"
                return self._made(code, said, took_s, control_s, None, "does so for")
        return None

    def _works_more(self) -> bool:
        """It runs for longer than the others take in all: on a crowded host it then waits for longer, too."""
        ran_s = sum(self._seconds(one) * (one.run_fraction or 0.0) for one in self.spots)
        return ran_s - (self.others_s or 0.0) >= WORKS_MORE_FRACTION * self.longer_s

    def _operator(self) -> CauseInfo | None:
        """Operators, where the trace has them for most of what the stage took longer."""
        operators = [one for one in self.findings.shares if one.kind in ("operator", "call") and not one.waits]
        more_s = sum(one.self_s - (one.control_self_s or 0.0) for one in operators)
        more_s -= (self.others_s or 0.0) * (self.findings.control is None)
        if more_s < MAIN_FRACTION * self.longer_s:
            return None
        first = operators[0]
        its_s = first.self_s - (first.control_self_s or 0.0)
        spot = self._most()
        called = "" if spot is None else f", called from {_place(spot.frame)}"
        if its_s < MAIN_FRACTION * self.longer_s:
            said = f"{self._subject()}: {_ms(more_s)} more in operators, first of all {first.name}{called}"
        else:
            said = f"{self._subject()}: {_of(first.self_s, self.stage_s)} in {first.name}{called}"
        return self._made("operator", said, first.self_s, first.control_self_s, spot, "spends", its_s)

    def _most(self) -> Spot | None:
        """The place that took the most more than on the control."""
        return max(self.spots, key=lambda one: self._seconds(one) - (self._control_s(one) or 0.0), default=None)

    def _line(self) -> CauseInfo | None:
        spot = self._most()
        if spot is None:
            return None
        took_s, control_s = self._seconds(spot), self._control_s(spot)
        if took_s - (control_s or 0.0) < MAIN_FRACTION * self.longer_s:
            return None
        code = code_of(spot)
        said = f"{self._subject()}: {_of(took_s, self.stage_s)} in {_place(spot.frame)}, {DOES[code]}"
        if code == "gil":
            assert self.sampled is not None, "a place was sampled"
            said += f" {_busiest(self.sampled)}"
        return self._made(code, said, took_s, control_s, spot, "spends")

    def _made(
        self,
        code: CauseCode,
        said: str,
        took_s: float,
        control_s: float | None,
        spot: Spot | None,
        verb: str,
        more_s: float | None = None,
    ) -> CauseInfo:
        """A cause with what is known of the control, and whether it is sure."""
        beside = self.findings.control if control_s is not None else None
        stage = self.findings.stage
        if beside is not None and control_s is not None:
            where = " there" if spot is not None else ""
            whose = "in its other steps it" if self.findings.beside == "steps" else f"rank {beside.rank}"
            said += f"; {whose} {verb} {_ms(control_s)}{where}"
        elif self.others_s is not None:
            said += f"; the other ranks spend {_ms(self.others_s)} in all of {stage}"
        samples, steps = (self.samples, 0) if spot is None else (spot.samples, spot.steps)
        known_s = control_s if control_s is not None else self.others_s
        more_s = took_s - (known_s or 0.0) if more_s is None else more_s - (self.others_s or 0.0) * (beside is None)
        enough = samples >= SURE_SAMPLES or steps >= SURE_STEPS
        sure = known_s is not None and enough and more_s >= SURE_FRACTION * self.longer_s
        return CauseInfo(
            code=code,
            sure=sure and code != "blocked",
            sentence=f"{said}.",
            next_step=NEXT_STEP[code],
            place=None if spot is None else _place_info(spot),
            compared_with=None if beside is None or self.findings.beside == "steps" else beside.rank,
            took_s=took_s,
            control_s=control_s,
        )

    def _subject(self) -> str:
        rank = self.findings.suspect.rank
        return f"{'The rank' if rank is None else f'Rank {rank}'} is slow in {self.findings.stage}"

    def _nobody_to_compare_with(self) -> str:
        """A rank that somebody has captured need not be slow: what it did is said, and no more."""
        spot, stage = self._most(), self.findings.stage
        did = "" if spot is None else f"; most of {stage} is in {_place(spot.frame)}, "
        took = "" if spot is None else _of(self._seconds(spot), self.stage_s)
        return f"whether {stage} took too long is not known, for there is no other rank to compare with{did}{took}"

    def _nothing_stands_out(self) -> str:
        spot = self._most()
        if spot is None:
            return f"why {self.findings.stage} took so long is not known: no stacks were sampled"
        return (
            f"why {self.findings.stage} took so long is not known: no place accounts for half of it; "
            f"most is in {_place(spot.frame)}, {_of(self._seconds(spot), self.stage_s)}"
        )

    def _unknown(self, why: str) -> CauseInfo:
        return CauseInfo(
            code="unknown", sure=False, sentence=f"{why[:1].upper()}{why[1:]}.", next_step=NEXT_STEP["unknown"]
        )


def _busiest(sampled: StackSamples) -> str:
    """The other thread that ran the most, and where it was met the most."""
    other = max(sampled.others, key=lambda one: max(one.run_ns_N) - min(one.run_ns_N))
    met = Counter(sampled.own_frame(stack) for stack in other.stacks_N if stack)
    return f"{other.name!r}" + (f", which is in {_place(met.most_common(1)[0][0])}" if met else "")


def code_of(spot: Spot) -> CauseCode:
    """What is done at a place, by what had been called there and by whether the thread ran."""
    runs = spot.run_fraction is not None and spot.run_fraction + (spot.waited_fraction or 0.0) >= RUNS_FRACTION
    innermost = spot.within[-1] if spot.within else spot.frame
    called = [f"{one.file} {one.function}" for one in spot.within]
    fits: Sequence[CauseCode] = (
        *(code for code, pattern in _CALLED if any(pattern.search(one) for one in called)),
        *(code for code, pattern in _STANDS_AT if pattern.search(innermost.source)),
    )
    found = next((code for code in fits if not runs or code in _WORKS), None)
    if found is not None or runs or spot.run_fraction is None:
        return found or "python"
    return "blocked" if spot.beside is None else "gil"


def _place(frame: Frame) -> str:
    # (what a comment behind it says is no part of what is done there)
    line = frame.source.partition("  # ")[0]
    source = f": {line}" if line else ""
    return f"{frame.function} ({PurePath(frame.file).name}:{frame.line}{source})"


def _place_info(spot: Spot) -> PlaceInfo:
    frame = spot.frame
    return PlaceInfo(function=frame.function[:100], file=frame.file, line=max(0, frame.line), source=frame.source)


def _of(seconds: float, stage_s: float) -> str:
    return f"{seconds * 1e3:.1f} of {stage_s * 1e3:.1f} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
