"""Finds why a stage was slow, from its contents in the trace and the sampled stacks. Pure.

A cause explains how much *longer* the stage took than on the control. The order is: what the system did to the rank,
by the kernel's counters and the samples; then operators, if the trace has them; else the line of the program at which
the thread was, and what it did there. A rank that is slow in all its local stages alike has no such line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sftriage.model.captures import LeftOpen
from sftriage.model.hangs import HangKind
from sftriage.model.windows import MAJOR_FAULTS, Account, accounting, runs_for_faults
from sftriage.reduce.samples import (
    WORKS,
    Frame,
    Spot,
    StackSamples,
    ThreadSamples,
    code_of,
    how,
    meanwhile,
    place,
    spots,
)
from sftriage.traces.manifest import CauseCode, CauseInfo, Findings, PlaceInfo, StageProfile
from sftriage.words.decisions import COUNTED, COUNTED_STEP, DOES, HOST_STEP, NEXT_STEP
from sftriage.words.verdicts import milliseconds

LEAST_FRACTION = 0.04
"""A stage that is longer by less than this fraction of a step has no cause; the default `min_gain` of a policy."""

MAIN_FRACTION = 0.5
"""The fraction of the stage's extra time that a cause has to explain."""

WORKS_MORE_FRACTION = 0.25
"""A thread that ran for this fraction of the extra time longer did not only wait for a core."""

LEAST_WORK_FRACTION = 0.02
"""Extra work below this fraction of the extra time does not explain a wait for a core."""

SECOND_FRACTION = 0.2
"""The fraction of the extra time that a second place has to explain, to be named beside the first."""

SURE_FRACTION = 0.7
SURE_SAMPLES = 10
SURE_STEPS = 4
"""A cause is sure with this fraction of the extra time, and this many samples at its place, or samples in this many
steps: while the interpreter is held, one sample stands for a long time."""

NEEDS_COUNTERS: frozenset[CauseCode] = frozenset({"python", "descheduled", "page_faults"})
"""Causes that the kernel's counters may refute: they are not sure without these counters."""

INTERRUPTIONS: dict[CauseCode, str] = {
    "descheduled": "waited",
    "stopped": "stopped",
    "garbage_collection": "collected",
}
"""What keeps a thread from its work, and the state in `Spot.fraction` that measures it."""


def cause_of(
    findings: Findings,
    suspect: StackSamples | None,
    control: StackSamples | None,
    fault_steps: Collection[int] = (),
    over_s: float | None = None,
    *,
    on_device: bool = False,
) -> CauseInfo:
    """Why the stage of some findings was slow.

    Args:
        findings: the contents of the stage.
        suspect: the suspect's sampled stacks, if any.
        control: those of the control rank, if any.
        fault_steps: the steps that have the fault; empty if unknown.
        over_s: how much longer the stage is than on the suspect's peers, in seconds per step; None if unknown. No
            place in the stage took the peers longer than their whole stage.
        on_device: ``over_s`` is on the devices' clock; the host need not wait for all of it.
    """
    return _Search(findings, suspect, control, fault_steps, over_s, on_device).cause()


def unsure(
    text: str, code: CauseCode = "unknown", next_step: str | None = None, took_s: float | None = None
) -> CauseInfo:
    """A cause that is not sure, or unknown."""
    return CauseInfo(code=code, sure=False, sentence=text, next_step=next_step or NEXT_STEP[code], took_s=took_s)


def by_account(text: str, account: Account, longer_s: float, rest: str = "") -> CauseInfo:
    """A cause from the kernel's counters, without samples."""
    return CauseInfo(
        code=account.code,
        sure=account.counted and account.took_s >= SURE_FRACTION * longer_s,
        sentence=f"{text} {COUNTED[account.code]}{rest}.",
        next_step=COUNTED_STEP.get(account.code, NEXT_STEP[account.code]),
        took_s=account.took_s,
    )


class _Search:
    def __init__(
        self,
        findings: Findings,
        suspect: StackSamples | None,
        control: StackSamples | None,
        fault_steps: Collection[int],
        over_s: float | None,
        on_device: bool,
    ) -> None:
        self.findings, self.sampled, self.beside = findings, suspect, control
        stage, beside = findings.stage, findings.control
        self.steps = steps = frozenset(fault_steps) or None
        self.stage_s = findings.suspect.stage_s
        # The time of the whole stage on the ranks that it is compared with.
        peers_s = None if over_s is None else min(self.stage_s, max(0.0, self.stage_s - over_s))
        self.others_s = peers_s if beside is None else beside.stage_s
        self.longer_s = self.stage_s - (self.others_s or 0.0)
        self.device_s = _own_s(findings.suspect)
        # The device's time on the others, if the window was judged by its clock.
        self.others_device_s: float | None = None
        if on_device and beside is not None:
            self.others_device_s = _own_s(beside)
            self.longer_s = max(self.longer_s, self.device_s - self.others_device_s)
        elif on_device and over_s is not None:
            # (time of waiting for the host is not extra work)
            idle_s = findings.suspect.device_idle_s
            self.others_device_s = None if idle_s is None else max(0.0, self.device_s - max(0.0, over_s - idle_s))
            self.longer_s = over_s
        self.beside_rank = None if beside is None or findings.beside == "steps" else beside.rank
        self.counted = findings.counted or {}
        self.account = accounting(self.counted, self.longer_s)
        self.spots = [] if suspect is None else spots(suspect, stage, steps)
        if findings.beside == "steps":
            places = set(() if suspect is None else suspect.step_N) - set(fault_steps)
            self.others = [] if suspect is None or not places else spots(suspect, stage, places)
        else:
            self.others = (self.beside and (spots(self.beside, stage, steps) or spots(self.beside, stage))) or []
        self.samples = sum(spot.samples for spot in self.spots)
        self.weight_ns = sum(spot.weight_ns for spot in self.spots)

    def cause(self) -> CauseInfo:
        if self.others_s is None:
            return self._unknown(self._no_comparison())
        if self.longer_s <= LEAST_FRACTION * self.findings.suspect.step_s:
            return self._unknown(f"{self.findings.stage} took hardly longer than in the comparison")
        line = self._line()
        # (a named activity says more than the operators in it)
        named = line if line is not None and line.code in WORKS else None
        account = self.account
        by_system = (
            account is not None and account.of_rank and not (account.code == "descheduled" and self._works_more())
        )
        return (
            (self._accounted() if by_system else None)
            or self._kernels()
            or self._interrupted()
            or named
            or self._operator()
            or line
            or self._accounted()
            or self._unknown(self._no_main_place())
        )

    def _accounted(self) -> CauseInfo | None:
        if self.account is None:
            return None
        text = f"{self._subject()}: for {_of(min(self.account.took_s, self.stage_s), self.stage_s)}"
        rest = f"; the other ranks spend {milliseconds(self.others_s or 0.0)} in all of {self.findings.stage}"
        return by_account(text, self.account, self.longer_s, rest)

    def _seconds(self, spot: Spot) -> float:
        return self.stage_s * spot.weight_ns / self.weight_ns if self.weight_ns else 0.0

    def _spent_s(self, state: str) -> float:
        return sum(self._seconds(spot) * spot.fraction(state) for spot in self.spots)

    def _control_s(self, spot: Spot) -> float | None:
        return self._beside_s([other for other in self.others if other.place == spot.place])

    def _beside_s(self, found: Sequence[Spot], state: str = "") -> float | None:
        """The time of some places, or of one state there, on the ranks that it is compared with."""
        beside, weight_ns = self.findings.control, sum(spot.weight_ns for spot in self.others)
        if beside is None or not weight_ns:
            return None
        spent_ns = sum(spot.weight_ns * (spot.fraction(state) if state else 1) for spot in found)
        return beside.stage_s * spent_ns / weight_ns

    def _interrupted(self) -> CauseInfo | None:
        for code, state in INTERRUPTIONS.items():
            took_s, control_s = self._spent_s(state), self._beside_s(self.others, state)
            if took_s - (control_s or 0.0) < MAIN_FRACTION * self.longer_s:
                continue
            # (a rank that queues no longer than its peers is on a busy host)
            busy_host = self.counted.get("queued_s", self.longer_s) < MAIN_FRACTION * self.longer_s
            if code == "descheduled" and (self._works_more() or busy_host):
                continue
            if code != "garbage_collection":
                text = f"{self._subject()}: for {_of(took_s, self.stage_s)} {DOES[code]}"
                return self._made(code, text, took_s, control_s, None, "does so for")
            spot = max(self.spots, key=lambda candidate: candidate.weight_ns * candidate.fraction(state))
            text = f"{self._subject()}: {_of(took_s, self.stage_s)} in garbage collection, most in {place(spot.frame)}"
            made = self._made(code, text, took_s, control_s, None, "collects for")
            # (this was measured, with few samples: none can be taken during a collection)
            known_s = control_s if control_s is not None else self.others_s
            sure = known_s is not None and took_s - known_s >= SURE_FRACTION * self.longer_s
            return made.model_copy(update={"place": _place_info(spot), "sure": sure})
        return None

    def _works_more(self) -> bool:
        """Whether it runs for longer than the others' whole stage; on a crowded host it then waits for longer, too."""
        ran_s = self._spent_s("run")
        more_s = ran_s - (self.others_s or 0.0)
        # If most of its running time is work that the others do not have, its waiting for a core follows from that.
        own_work = more_s >= MAIN_FRACTION * ran_s and more_s >= LEAST_WORK_FRACTION * self.longer_s
        return own_work or more_s >= WORKS_MORE_FRACTION * self.longer_s

    def _operator(self) -> CauseInfo | None:
        operators = [share for share in self.findings.shares if share.kind in ("operator", "call") and not share.waits]
        more_s = sum(share.self_s - (share.control_self_s or 0.0) for share in operators)
        more_s -= (self.others_s or 0.0) * (self.findings.control is None)
        if more_s < MAIN_FRACTION * self.longer_s:
            return None
        first = operators[0]
        extra_s = first.self_s - (first.control_self_s or 0.0)
        spot = self._most()
        called = "" if spot is None else f", called from {place(spot.frame)}"
        if extra_s < MAIN_FRACTION * self.longer_s:
            text = f"{self._subject()}: {milliseconds(more_s)} more in operators, above all {first.name}{called}"
        else:
            text = f"{self._subject()}: {_of(first.self_s, self.stage_s)} in {first.name}{called}"
        return self._made("operator", text, first.self_s, first.control_self_s, spot, "spends", extra_s)

    def _kernels(self) -> CauseInfo | None:
        others_s, kernels = self.others_device_s, self.findings.kernels
        if others_s is None or not kernels or self.device_s - others_s < MAIN_FRACTION * self.longer_s:
            return None
        first, beside = kernels[0], self.findings.control
        # (without a control, the others' whole time may be this kernel)
        more_s = first.more_s if beside is not None else first.device_s - others_s
        if first.more_s >= MAIN_FRACTION * self.longer_s:
            text = f"{self._subject()}: its GPU spends {_of(first.device_s, self.device_s)} in {first.words}"
        else:
            more = milliseconds(self.device_s - others_s)
            text = f"{self._subject()}: its GPU works {more} longer, above all in {first.words}"
        if beside is None:
            text += f"; on the other ranks the stage takes {milliseconds(self.longer_s)} less"
        elif self.findings.beside == "steps":
            text += f"; in its other steps it works {milliseconds(others_s)} in all of {self.findings.stage}"
        else:
            text += f"; rank {beside.rank}'s GPU works {milliseconds(others_s)} in all of {self.findings.stage}"
        return CauseInfo(
            code="kernel",
            sure=more_s >= SURE_FRACTION * self.longer_s and self.findings.suspect.steps >= SURE_STEPS,
            sentence=f"{text}.",
            next_step=NEXT_STEP["kernel"],
            compared_with=None if beside is None else self.beside_rank,
            took_s=first.device_s,
            control_s=first.control_device_s,
        )

    def _most(self) -> Spot | None:
        return max(self.spots, key=self._more_s, default=None)

    def _line(self) -> CauseInfo | None:
        ranked = sorted(self.spots, key=self._more_s, reverse=True)[:2]
        if not ranked:
            return None
        (spot, *_), more_s = ranked, [*map(self._more_s, ranked)]
        # (if two things are wrong at once, each may be less than half of the extra time)
        alone = more_s[0] >= MAIN_FRACTION * self.longer_s
        if not alone and sum(more_s) < SURE_FRACTION * self.longer_s:
            return None
        took_s, control_s = self._seconds(spot), self._control_s(spot)
        text = f"{self._subject()}: {_of(took_s, self.stage_s)} in {self._described(spot)}"
        code = self._code_at(spot)
        workers = None
        if code == "dataloader_workers" and self.sampled is not None:
            beside = None if self.findings.beside == "steps" else self.beside
            workers = in_workers(self.sampled, beside, self.findings.stage, self.steps)
        text += "" if workers is None else self._in_workers(*workers)
        # (a wait is counted at its end, and may have begun before the stage)
        waited = min(spot.fraction("waited"), 1.0 - spot.fraction("run"))
        if waited >= MAIN_FRACTION:
            text += f", and spends {milliseconds(took_s * waited)} of that waiting for a core"
        made = self._made(code, text, took_s, control_s, spot, "spends")
        if workers is not None:
            advice = "Check what the workers do at that line, or give the loader more workers (num_workers)."
            made = made.model_copy(update={"place": _place_info(workers[0]), "next_step": advice})
        # (without a control, the others' whole time may be at this place)
        theirs_s = (self.others_s or 0.0) if self.findings.control is None else 0.0
        if len(ranked) < 2 or more_s[1] - theirs_s < SECOND_FRACTION * self.longer_s:
            return made if alone else None
        second = f"Another {milliseconds(self._seconds(ranked[1]))} are in {self._described(ranked[1])}."
        return made.model_copy(update={"sentence": f"{made.sentence} {second}"})

    def _more_s(self, spot: Spot) -> float:
        return self._seconds(spot) - (self._control_s(spot) or 0.0)

    def _described(self, spot: Spot) -> str:
        code = self._code_at(spot)
        text = f"{place(spot.frame)}, {DOES[code]}{how(code, spot)}"
        if code == "gil":
            assert self.sampled is not None, "a place has samples"
            text += f" {busiest(self.sampled)}"
        return text

    def _code_at(self, spot: Spot) -> CauseCode:
        code = code_of(spot)
        faults = runs_for_faults(self.counted) if self.findings.counted is not None else _for_faults(spot)
        if code == "python" and faults:
            return "page_faults"
        return self.account.code if code == "blocked" and self.account is not None else code

    def _in_workers(self, spot: Spot, step_s: float, control_s: float | None) -> str:
        control, others = self.findings.control, ""
        if control is not None and control_s is not None:
            others = f"; those of rank {control.rank}: {milliseconds(control_s)}"
        code, has_core = code_of(spot), spot.fraction("waited") < MAIN_FRACTION
        does = f"{DOES[code]}{how(code, spot)}" if has_core else "ready to run and waiting for a core"
        return f", which are in {place(spot.frame)}, {does} ({milliseconds(step_s)} a step{others})"

    def _made(
        self,
        code: CauseCode,
        text: str,
        took_s: float,
        control_s: float | None,
        spot: Spot | None,
        verb: str,
        more_s: float | None = None,
    ) -> CauseInfo:
        beside = self.findings.control if control_s is not None else None
        stage = self.findings.stage
        if beside is not None and control_s is not None:
            where = " there" if spot is not None else ""
            subject = "in its other steps it" if self.findings.beside == "steps" else f"rank {beside.rank}"
            text += f"; {subject} {verb} {milliseconds(control_s)}{where}"
        elif self.others_s is not None:
            text += f"; the other ranks spend {milliseconds(self.others_s)} in all of {stage}"
        samples, steps = (self.samples, 0) if spot is None else (spot.samples, len(spot.steps))
        known_s = control_s if control_s is not None else self.others_s
        more_s = took_s - (known_s or 0.0) if more_s is None else more_s - (self.others_s or 0.0) * (beside is None)
        enough = samples >= SURE_SAMPLES or steps >= SURE_STEPS
        sure = known_s is not None and enough and more_s >= SURE_FRACTION * self.longer_s
        # (a running thread may run because of page faults; one that waits for a core may come from waiting for a disk)
        sure = sure and not (self.findings.counted is None and code in NEEDS_COUNTERS)
        return CauseInfo(
            code=code,
            sure=sure and code not in ("blocked", "unknown"),
            sentence=f"{text}.",
            next_step=NEXT_STEP[code],
            place=None if spot is None else _place_info(spot),
            compared_with=None if beside is None else self.beside_rank,
            took_s=took_s,
            control_s=control_s,
        )

    def _subject(self) -> str:
        rank = self.findings.suspect.rank
        return f"{'The rank' if rank is None else f'Rank {rank}'} is slow in {self.findings.stage}"

    def _no_comparison(self) -> str:
        """The sentence on a rank that was captured on request, and need not be slow: it only says what it did."""
        spot, stage = self._most(), self.findings.stage
        did = "" if spot is None else f"; most of {stage} is in {place(spot.frame)}, "
        took = "" if spot is None else _of(self._seconds(spot), self.stage_s)
        return f"it is not known whether {stage} took too long: there is no other rank to compare with{did}{took}"

    def _no_main_place(self) -> str:
        spot = self._most()
        if spot is None:
            return f"it is not known why {self.findings.stage} was slow: no stacks were sampled"
        return (
            f"it is not known why {self.findings.stage} was slow: no place accounts for half of it; "
            f"most is in {place(spot.frame)}, {_of(self._seconds(spot), self.stage_s)}"
        )

    def _unknown(self, why: str) -> CauseInfo:
        return unsure(f"{why[:1].upper()}{why[1:]}.")


def _own_s(profile: StageProfile) -> float:
    """The device's own time: a collective lasts until the last rank has arrived."""
    return profile.device_own_s or 0.0


def _for_faults(spot: Spot) -> bool:
    """Whether a thread that runs or is ready to run does so because of page faults, by its process's counters."""
    ran_s = spot.fraction("run") * spot.weight_ns * 1e-9
    major, minor = (spot.used.get(name, 0) for name in ("major_faults", "minor_faults"))
    # (after each fault it waits for a core again)
    reads = major >= MAJOR_FAULTS * max(1, len(spot.steps)) and spot.fraction("run") < MAIN_FRACTION
    return reads or runs_for_faults(
        {"minor_faults": minor, "system_s": spot.used.get("system_ns", -1) * 1e-9, "run_s": ran_s}
    )


def busiest(sampled: StackSamples) -> str:
    """The other thread that ran the most, and its most frequent place."""
    other = max(sampled.others, key=lambda thread: max(thread.run_ns_N) - min(thread.run_ns_N))
    ran: Counter[Frame] = Counter()
    for stack, before_ns, by_then_ns in zip(other.stacks_N[1:], other.run_ns_N, other.run_ns_N[1:], strict=False):
        if stack:
            ran[sampled.own_frame(stack)] += max(0, by_then_ns - before_ns)
    return f"{other.name!r}" + (f", which is in {place(ran.most_common(1)[0][0])}" if ran else "")


def _place_info(spot: Spot) -> PlaceInfo:
    frame = spot.frame
    return PlaceInfo(function=frame.function[:100], file=frame.file, line=max(0, frame.line), source=frame.source)


def _of(seconds: float, stage_s: float) -> str:
    return f"{seconds * 1e3:.1f} of {stage_s * 1e3:.1f} ms"


def cause_of_rank(
    rank: int,
    sampled: StackSamples | None,
    over_s: float,
    operator: str = "",
    counted: Mapping[str, float] | None = None,
) -> CauseInfo:
    """Why a rank is slow in all its local stages alike, by ``over_s`` seconds per step over its peers.

    ``operator`` took the most of its longest stage ("": not an operator). ``counted`` has the rank's kernel counters
    above its peers', per step, as far as known.
    """
    if over_s <= 0.0:
        return unsure(f"Rank {rank} was no slower than its peers while it was captured.")
    found = [] if sampled is None else spots(sampled, None)
    # (a step has no sample if the sampler was held up)
    n_steps = 0 if sampled is None or not found else max(sampled.step_N) - min(sampled.step_N) + 1

    def seconds(state: str) -> float:
        return sum(spot.weight_ns * spot.fraction(state) for spot in found) * 1e-9 / max(1, n_steps)

    subject = f"Rank {rank} is slow in all its local stages, {milliseconds(over_s)} a step over its peers"
    account = accounting(counted or {}, over_s)
    if account is not None and account.of_rank:
        return by_account(f"{subject}: for {milliseconds(account.took_s)}", account, over_s)
    gil_s = seconds("gil")
    # What kept it from running, in seconds per step. A busy thread is no proof that it held the interpreter; and on a
    # busy host every rank waits for a core, which its peers' counters show.
    spent_s: dict[CauseCode, float] = {code: seconds(state) for code, state in INTERRUPTIONS.items()}
    spent_s["gil"] = max(gil_s, seconds("beside"))
    if counted is not None and "queued_s" in counted:
        del spent_s["descheduled"]
    for code, took_s in spent_s.items():
        if took_s < MAIN_FRACTION * over_s:
            continue
        does = COUNTED["garbage_collection"] if code == "garbage_collection" else DOES[code]
        if code == "gil" and sampled is not None:
            does = f"it waited for the interpreter lock (GIL), held by thread {busiest(sampled)}"
        return CauseInfo(
            code=code,
            # (the system's counters do not depend on the number of samples)
            sure=sum(spot.samples for spot in found) >= SURE_STEPS
            and (gil_s if code == "gil" else took_s) >= SURE_FRACTION * over_s
            and not (counted is None and code in NEEDS_COUNTERS),
            sentence=f"{subject}: for {milliseconds(took_s)} {does}.",
            next_step=NEXT_STEP[code],
            took_s=took_s,
        )
    ran_s = seconds("run")
    if operator and found and ran_s >= SURE_FRACTION * over_s:
        more = "it has more work than its peers, or a slower processor"
        text = f"{subject}: it computes for {milliseconds(ran_s)}, above all {operator}; {more}."
        return unsure(text, "operator", took_s=ran_s)
    if account is not None:
        return by_account(f"{subject}: for {milliseconds(account.took_s)}", account, over_s)
    return unsure(f"{subject}, and it is not known why.", next_step=HOST_STEP)


_IN_TORCH = re.compile(r"/torch/")
_CALLS_TORCH = re.compile(r"\b(torch|nn|F)\.\w")
"""A file of torch, and a line that calls torch: a call without Python code leaves no frame."""


def in_torch(samples: StackSamples, stage: str | None) -> bool:
    """Whether the place that took most of a stage is a call of torch, which operators would explain better."""
    for first in spots(samples, stage)[:1]:
        return bool(_CALLS_TORCH.search(first.frame.source) or any(_IN_TORCH.search(at.file) for at in first.within))
    return False


def left_open(code: CauseCode | HangKind, *, operators: bool, stacks: bool, torch_call: bool = False) -> LeftOpen:
    """What a capture does not show about its rank's slowness, but a capture with another profiler would.

    ``operators`` and ``stacks`` say what was recorded; ``torch_call``: most of the stage is one call of torch.
    """
    if code == "python" and torch_call and not operators:
        return "operators"
    if code not in ("unknown", "blocked"):
        return ""
    return "operators" if not operators else "system" if stacks else "stacks"


_WAITS = re.compile(r"torch/utils/data/dataloader\.py (\w+\.)?_(try_)?get_data$")
_NO_TASK = re.compile(r"/multiprocessing/queues\.py (\w+\.)?get$")
"""Where the training thread waits for its workers, and where an idle worker waits."""

_WORKERS_FRACTION = 0.5
"""The least fraction, of the time in which workers are busy while the trainer waits, for a place to be named."""

_AWAITED = "awaited"


def in_workers(
    sampled: StackSamples, control: StackSamples | None, stage: str, steps: Collection[int] | None = None
) -> tuple[Spot, float, float | None] | None:
    """Where the workers are while a stage waits for them, in some steps or all; None if no place stands out.

    Also returns the seconds that all workers spend there per step, whether the stage waits or not, and the control's.
    """
    theirs = _joined(sampled, stage)
    found = [] if theirs is None else spots(theirs, _AWAITED, steps)
    if theirs is None or not found or found[0].weight_ns < _WORKERS_FRACTION * sum(spot.weight_ns for spot in found):
        return None
    beside = None if control is None else _joined(control, stage)
    control_s = None if beside is None else _step_s(beside, found[0], None)
    return found[0], _step_s(theirs, found[0], steps), control_s


def _step_s(theirs: StackSamples, spot: Spot, steps: Collection[int] | None) -> float:
    found = (other for other in spots(theirs, None, steps) if other.place == spot.place)
    n_steps = len({step for step in theirs.step_N if steps is None or step in steps})
    return sum(other.weight_ns for other in found) * 1e-9 / max(1, n_steps)


def _joined(samples: StackSamples, stage: str) -> StackSamples | None:
    """The samples of all workers as of one thread, in the steps of the training thread; None without workers.

    A sample stands for the time before it, so it belongs to the training thread's next sample.
    """
    frames, places = samples.frames, zip(samples.stage_N, samples.training.stacks_N, strict=True)
    waits = tuple(_AWAITED if at == stage and _any(frames, stack, _WAITS) else "" for at, stack in places)
    rows: list[tuple[Any, ...]] = []
    for worker in samples.workers:
        if worker.time_ns_W:
            mine = meanwhile(replace(samples, stage_N=waits), worker)
            # (the outermost frame is the worker's loop, which takes tasks from a queue)
            stacks = (() if _any(frames, stack[1:2], _NO_TASK) else stack for stack in mine.training.stacks_N)
            # (a sample without a stack separates the workers)
            rows.append((worker.time_ns_W[0] - worker.period_ns, samples.step_N[0], "", 0, (), -1, -1, -1, -1))
            ran = (column for of in (mine.training, mine.sampler) for column in (of.run_ns_N, of.waited_ns_N))
            rows += zip(mine.time_ns_N, mine.step_N, mine.stage_N, mine.since_ns_N, stacks, *ran, strict=True)
    if not rows:
        return None
    time_ns_N, step_N, stage_N, since_ns_N, stacks_N, *times = zip(*rows, strict=True)
    main, sampler = ThreadSamples("", stacks_N, *times[:2]), ThreadSamples("", (), *times[2:])
    return StackSamples(frames, samples.period_ns, time_ns_N, step_N, stage_N, since_ns_N, main, (), sampler)


def _any(frames: Sequence[Frame], stack: Sequence[int], pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(f"{frames[number].file} {frames[number].function}") for number in stack)
