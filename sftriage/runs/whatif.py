"""What-if replays: their results as JSON, sentences and timelines.

`sftriage whatif`, the page and assistants use it. `runs.operations` reads recordings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sftriage.stragglers.graph import AnyFloat, Operations, timeline
from sftriage.stragglers.kinds import Attribution, OperationKind, attributed
from sftriage.stragglers.questions import Estimate, Question, answered, within
from sftriage.stragglers.slowdown import Slowdown, histogram_of, replayed_as_measured, slowdown_of
from sftriage.words.verdicts import milliseconds, some_ranks

SHOWN_WORKERS = 4


def step(seconds: float) -> str:
    """The time of a step: in seconds for large models."""
    return f"{seconds:.2f} s" if seconds >= 1.0 else milliseconds(seconds)


def worker(dp: int, pp: int, rank: int | None) -> str:
    """The name of a worker."""
    place = f"data-parallel rank {dp}, stage {pp}"
    return f"worker of {place}" if rank is None else f"rank {rank} ({place})"


KINDS: Mapping[str, str] = {
    "slow_worker": "{who_it_is}: {named}, {slow}. With the durations of {peers}, replacing {them} {wins}.",
    "slow_dp_rank": "A slow data-parallel rank: all stages of {named}, {slow}. With the durations of "
    "the others, replacing it {wins}.",
    "last_stage": "Last stage: it computes {times:.2f} times as long as the others. Moving layers to them until all "
    "compute as long {wins}.",
    "slow_stage": "Stage {stage}: it computes {times:.2f} times as long as the others. Moving layers to them until "
    "all compute as long {wins}.",
    "sequence_lengths": "Sequence lengths: microbatches of one worker differ, forward and backward alike (correlation "
    "{forward_backward_correlation:.2f}); a tenth take {longest_tenth:.1f} times the median or longer. Packing the "
    "same sequences evenly over microbatches and ranks {wins}.",
    "garbage_collection": "Stalls in forward alone, now on one worker, now on another ({of_workers:.0%} of the "
    "workers, in {of_steps:.0%} of the steps), as garbage collection causes. Pausing at the end of the same "
    "steps on all ranks {wins}.",
    "stalls": "Stalls in {part} {where}, in {of_steps:.0%} of the steps. A job without them {wins}.",
    "communication": "Communication, mostly {part}: slow transfers. A link that takes its median for them {wins}.",
    "in_sync": "Inside the sync stage, {part}: taking its median {wins}. Time that ranks compute, wait for a CPU or "
    "exchange data looks the same there.",
}
"""What a kind of straggler is, and what its remedy wins in a replay."""

REMEDIES: Mapping[str, str] = {
    "slow_worker": "Capture it to see why it is slow there: sftriage capture --rank. If everything it computes is "
    "slow alike, check its host and GPU (clocks, temperature, errors): sftriage evidence; replace it if it stays slow.",
    "slow_dp_rank": "Check what its workers share: hosts, switches, storage (sftriage evidence). If its data takes "
    "longer to compute, balance it; otherwise replace the hosts.",
    "last_stage": "Give the last stage fewer layers, or give the loss and output layer their own stage: it "
    "now computes them on top of its layers.",
    "slow_stage": "Give that stage fewer layers. If its layers are like the others', check what its workers share.",
    "sequence_lengths": "Pack microbatches by the cost of their sequences (the sum of squared lengths where attention "
    "dominates), and balance that cost across the data-parallel ranks.",
    "garbage_collection": "Turn off automatic collection (gc.disable()) and collect on all ranks in the same step, "
    "every N steps; gc.freeze() after the first collection.",
    "stalls": "Capture a rank with them (sftriage capture --rank): memory that is allocated again, other processes on "
    "its CPUs, and lazy initialization show in the trace.",
    "communication": "Check the network of the workers with slow transfers (links, congestion, other jobs): "
    "sftriage capture on both ends.",
    "in_sync": "Check which ranks waited for a CPU (sftriage explain). If the last gradient of each step is not known, "
    "monitor.watch(model) records it under DDP. Otherwise capture some ranks (sftriage capture) and compare.",
}

NAMES: Mapping[str, str] = {
    "slow_worker": "slow workers",
    "slow_dp_rank": "a slow data-parallel rank",
    "last_stage": "the last stage",
    "slow_stage": "a slow stage",
    "sequence_lengths": "sequence lengths",
    "garbage_collection": "garbage collection",
    "stalls": "stalls",
    "communication": "communication",
    "in_sync": "inside the sync stage",
}

OF_PLACES = frozenset({"slow_worker", "last_stage"})
ONE_RANK = "With one data-parallel rank, a slow worker and a stage with more to compute look alike."

NO_KIND = "No single kind accounts for it: look at the workers and operations below."


MAX_ROWS, MAX_COLUMNS = 16, 8
"""Maximum rows and columns of a heat map: a stage may take several rows; of more workers it has the slowest."""
MAX_OFF = 0.05
"""A step is not replayed as it ran if its length, or the place of a computation in it, is off by more than this."""
MAX_STEPS_OFF = 0.1
"""If more than this fraction of the steps is off, no figure is given."""
DIFFERS = 0.1
"""What a remedy wins after the others is given if it differs by this fraction from what it wins alone."""
HOTTEST = 1.5
"""The slowdown of the reddest color, as in the paper's maps."""


@dataclass(frozen=True, slots=True)
class WorkerHeat:
    """The slowdown S_w by stage and data-parallel rank, row by row: of ``workers`` all, or the slowest."""

    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    workers: int

    @property
    def shown(self) -> int:
        return sum(map(len, self.rows.values()))


@dataclass(frozen=True, slots=True)
class TimelineBox:
    """An operation of a step, or the waiting before it: the index of its part, and its times in seconds."""

    part: int
    start_s: float
    end_s: float
    waits: bool = False


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A worker's step as measured, and without stragglers."""

    name: str
    measured: tuple[TimelineBox, ...]
    ideal: tuple[TimelineBox, ...]


@dataclass(frozen=True, slots=True)
class StepTimelines:
    """One ``step``, replayed as measured and without stragglers; ``parts`` names what its operations are."""

    step: int
    measured_s: float
    ideal_s: float
    parts: tuple[str, ...]
    rows: tuple[TimelineRow, ...]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The replayed operations, the figures, and the kinds of stragglers; or why they cannot be trusted (`distrust`)."""

    operations: Operations
    found: Slowdown
    attribution: Attribution
    distrust: str = ""
    answer: Estimate | None = None

    @property
    def kinds(self) -> tuple[OperationKind, ...]:
        return self.attribution.kinds

    def values(self) -> dict[str, Any]:
        """All figures as JSON values; None for those not attributed because S is too small."""
        found, operations = self.found, self.operations
        by_worker, trusted = found.by_worker(), not self.distrust
        return {
            "trusted": trusted,
            "why_not": self.distrust or None,
            "S": found.s if trusted else None,
            "M_W": None if found.m_w is None else found.m_w.share,
            "M_S": None if found.m_s is None else found.m_s.share,
            "step_s": found.step_s,
            "ideal_step_s": found.ideal_s if trusted else None,
            "measured_step_s": float(found.measured_N.mean()),
            "unexplained": found.unexplained,
            "steps": [
                {
                    "step": number,
                    "measured_s": float(found.measured_N[n]),
                    "replayed_s": float(found.replayed_N[n]),
                    "slowdown": float(found.slowdown_N[n]) if trusted else None,
                    "by_dp": {str(dp): float(each_N[n]) for dp, each_N in found.by_dp_N.items()},
                    "by_stage": {str(pp): float(each_N[n]) for pp, each_N in found.by_pp_N.items()},
                    "by_operation": {part: float(each_N[n]) for part, each_N in found.by_part_N.items()},
                }
                for n, number in enumerate(found.steps)
            ],
            "workers": [
                {"dp": dp, "pp": pp, "rank": operations.ranks.get((dp, pp)), "slowdown": by_worker.get((dp, pp))}
                for pp in operations.pp_ranks
                for dp in operations.dp_ranks
            ],
            "worst_workers": [{"dp": dp, "pp": pp} for dp, pp in found.worst],
            "step_slowdowns": histogram_of(found.slowdown_N) if trusted else None,
            "dp_ranks": [{"dp": dp, "slowdown": slowdown} for dp, slowdown in found.by_dp.items()],
            "stages": [{"pp": pp, "slowdown": slowdown} for pp, slowdown in found.by_pp.items()],
            "operations": [{"type": part, "slowdown": slowdown} for part, slowdown in found.by_part.items()],
            "kinds": [
                {
                    "kind": kind.code,
                    "share": kind.share,
                    "saves_s": self._saves_s(kind),
                    "numbers": dict(kind.numbers),
                    "workers": [{"dp": dp, "pp": pp} for dp, pp in kind.workers],
                    "saves_last_s": kind.wins_last_s,
                    "since": kind.since,
                    "without_replacement": [less._asdict() for less in kind.instead],
                    "lengths": kind.lengths,
                    "operation": kind.part or None,
                    "says": self._sentence(kind),
                    "remedy": REMEDIES[kind.code],
                }
                for kind in self.kinds
            ],
            "remaining_jitter": self.attribution.jitter if self.kinds else None,
            "remedied_step_s": self.attribution.step_s if trusted else None,
            "answer": None if self.answer is None else asdict(self.answer),
            "notes": list(operations.notes),
        }

    def lines(self) -> Iterator[str]:
        if self.distrust:
            yield self.distrust
            return
        if (answer := self.answer) is not None:
            now_s = answer.step_s + answer.wins_s
            yield (
                f"A step {answer.question} would take {step(answer.step_s)} instead of {step(now_s)}: that "
                f"{'wins' if answer.wins_s >= 0.0 else 'costs'} {step(abs(answer.wins_s))} "
                f"({abs(answer.wins_s) / now_s:.0%} of the step)."
            )
            return
        found, operations = self.found, self.operations
        shared_out, named = found.m_w is not None, operations.named
        if named is not None:
            ranks = some_ranks([operations.ranks[worker] for worker in named.workers])
            saved = f"{step(named.saves_s)} of the {step(named.step_s)} of a slow step"
            yield (
                f"The verdict on these steps: fixing {ranks} in {named.part or 'all its local stages'} would save "
                f"{saved}, leaving {step(max(0.0, named.step_s - named.saves_s))}."
            )
        step_now, ideal = step(found.step_s), step(found.ideal_s)
        if not shared_out:
            yield f"Stragglers cost next to nothing: {step_now} a step, {ideal} without (S = {found.s:.3f})."
        elif named is not None:
            every = "If every rank took its peers' median time, a step would take"
            yield f"{every} {ideal} instead of {step_now} (S = {found.s:.3f})."
        else:
            yield (
                f"Without stragglers a step would take {ideal} instead of {step_now}: they cost "
                f"{1.0 - 1.0 / found.s:.0%} of the time (S = {found.s:.3f})."
            )
        for kind in self.kinds:
            yield self._sentence(kind)
            yield f"  {REMEDIES[kind.code]}"
        if shared_out:
            half, tenth, slowest = np.quantile(found.slowdown_N, (0.5, 0.9, 1.0))
            yield f"Slowdown of the steps: median {half:.2f}, a tenth over {tenth:.2f}, the slowest {slowest:.2f}."
        if shared_out and not self.kinds:
            yield NO_KIND
        elif self.kinds:
            shares = ", ".join(f"{NAMES[kind.code]} {kind.share:.0%}" for kind in self.kinds)
            jitter, left = max(0.0, self.attribution.jitter), step(self.attribution.step_s)
            shares = f"{shares}, remaining jitter {jitter:.0%}"
            yield f"Shares of the lost time: {shares}. All remedies leave a step of {left}."

    def _sentence(self, kind: OperationKind) -> str:
        operations, n_workers = self.operations, len(kind.workers)
        named = [worker(dp, pp, operations.ranks.get((dp, pp))) for dp, pp in kind.workers[:SHOWN_WORKERS]]
        if kind.code == "slow_dp_rank":
            named = [f"data-parallel rank {dp}" for dp in dict.fromkeys(dp for dp, _ in kind.workers)][:SHOWN_WORKERS]
            n_workers = len({dp for dp, _ in kind.workers})
        more = f" and {n_workers - SHOWN_WORKERS} more" if n_workers > SHOWN_WORKERS else ""
        sentence = KINDS[kind.code].format(
            part=kind.part,
            who_it_is="One slow worker" if n_workers == 1 else "A few slow workers",
            named=", ".join(named) + more,
            peers="its peers" if n_workers == 1 else "their peers",
            them="it" if n_workers == 1 else "them",
            slow=self._slow(kind),
            stage=kind.workers[0][1] if kind.workers else None,
            where=f"of {named[0]}" if named else "of many workers",
            wins=self._wins(kind),
            **kind.numbers,
        )
        if kind.instead:
            sentence = f"{sentence} {self._instead(kind)}"
        if kind.code in OF_PLACES and len(operations.dp_ranks) == 1 and len(operations.pp_ranks) > 1:
            sentence = f"{sentence} {ONE_RANK}"
        return sentence

    def _slow(self, kind: OperationKind) -> str:
        """How slow workers are, and when."""
        if "times" not in kind.numbers:
            return f"mostly in {kind.part}" if kind.part else "in all operations"
        times, of_steps = kind.numbers["times"], kind.numbers["of_steps"]
        when = f" since step {kind.since}" if kind.since is not None else ""
        if not when and of_steps < 1.0:
            when = f" in {of_steps:.0%} of the steps"
        return f"{times:.2f} times its peers{when}" + (f", mostly in {kind.part}" if kind.part else "")

    def _wins(self, kind: OperationKind) -> str:
        """What the remedy wins alone, and after the others if that is something else."""
        saves_s, step_s, lost_s = self._saves_s(kind), self.found.step_s, self.found.lost_s
        won = f"wins {step(saves_s)} a step ({min(1.0, saves_s / lost_s):.0%} of the lost time)"
        won = f"{won}, leaving {step(max(0.0, step_s - saves_s))}"
        if len(self.kinds) > 1 and abs(kind.wins_last_s - kind.wins_s) > DIFFERS * kind.wins_last_s:
            won = f"{won}; after the other remedies, {step(kind.wins_last_s)}"
        return won

    def _instead(self, kind: OperationKind) -> str:
        """The best without a replacement."""
        best, several = kind.instead[0], len({dp for dp, _ in kind.workers}) > 1
        less = f"giving {best.work:.0%} of the others' work to" if best.work else "dropping"
        ranks = "those data-parallel ranks" if several else "that data-parallel rank"
        won = f"wins {step(best.wins_s)}, leaving {step(self.found.step_s - best.wins_s)}"
        return f"Without a replacement, {less} {ranks} {won}."

    def _saves_s(self, kind: OperationKind) -> float:
        named = self.operations.named if kind.code == "slow_worker" else None
        return max(0.0, kind.wins_s) if named is None else named.saves_s

    def heat(self) -> WorkerHeat | None:
        """The heat map; None if there is no slowdown to attribute."""
        found = self.found
        if found.m_w is None:
            return None
        by_worker, dps, pps = found.by_worker(), [*found.by_dp], [*found.by_pp]
        firsts = range(0, len(dps), MAX_COLUMNS)
        if len(firsts) == 1 or len(firsts) * len(pps) > MAX_ROWS:
            dps, pps = _slowest(found.by_dp, MAX_COLUMNS), _slowest(found.by_pp, MAX_ROWS)
            rows = {f"pp {pp}": tuple(by_worker[dp, pp] for dp in dps) for pp in pps}
            return WorkerHeat(tuple(f"dp {dp}" for dp in dps), rows, len(by_worker))
        rows = {
            f"pp {pp}, dp {dps[k]}": tuple(by_worker[dp, pp] for dp in dps[k : k + MAX_COLUMNS])
            for pp in pps
            for k in firsts
        }
        return WorkerHeat(tuple(f"+{k}" for k in range(MAX_COLUMNS)), rows, len(by_worker))

    def timelines(self, most_workers: int | None = None) -> StepTimelines:
        """The step whose slowdown is nearest to the mean one, worker by worker; of many workers the slowest."""
        found, operations = self.found, self.operations
        n = int(np.abs(found.replayed_N - found.replayed_N.mean()).argmin())
        work_TW = operations.work_TNW[:, n]
        parts = tuple(dict.fromkeys(operation.part for operation in operations.types))
        both = [
            _boxes(operations, parts, work_T1W)
            for work_T1W in (work_TW, np.broadcast_to(operations.ideal_T[:, None], work_TW.shape))
        ]
        workers = [(dp, pp) for pp in operations.pp_ranks for dp in operations.dp_ranks]
        slowdowns = found.by_worker() if found.m_w is not None else {}
        shown = sorted(workers, key=lambda place: -slowdowns.get(place, 0.0))[:most_workers]
        rows = tuple(
            TimelineRow(worker(*place, operations.ranks.get(place)), *(tuple(boxes[place]) for boxes in both))
            for place in workers
            if place in shown
        )
        return StepTimelines(operations.steps[n], float(found.replayed_N[n]), found.ideal_s, parts, rows)


def _slowest(slowdowns: dict[int, float], most: int) -> list[int]:
    return sorted(sorted(slowdowns, key=lambda number: -slowdowns[number])[:most])


def _boxes(operations: Operations, parts: Sequence[str], work_TW: AnyFloat) -> dict[tuple[int, int], list[TimelineBox]]:
    start_TW, end_TW = (times_T1W[:, 0] for times_T1W in timeline(operations.graph, work_TW[:, None]))
    dp_TW, pp_TW = (np.broadcast_to(of_TW, work_TW.shape) for of_TW in (operations.dp_TW, operations.pp_TW))
    part_T = [parts.index(operations.types[index].part) for index in operations.type_T]
    boxes: dict[tuple[int, int], list[TimelineBox]] = {}
    for (t, w), start_s in np.ndenumerate(start_TW):
        own = boxes.setdefault((int(dp_TW[t, w]), int(pp_TW[t, w])), [])
        end_s = float(end_TW[t, w])
        begins_s = max(float(start_s), end_s - float(work_TW[t, w]))
        if begins_s - start_s > 1e-9:
            own.append(TimelineBox(part_T[t], float(start_s), begins_s, waits=True))
        if end_s > begins_s:
            own.append(TimelineBox(part_T[t], begins_s, end_s))
    return {place: sorted(found, key=lambda box: box.start_s) for place, found in boxes.items()}


def trace_events(shown: StepTimelines) -> dict[str, Any]:
    """Both timelines as Chrome trace events for Perfetto: one process as measured, one without stragglers."""
    events: list[dict[str, Any]] = []
    for pid, name in enumerate((f"step {shown.step} as measured", "without stragglers"), start=1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for tid, row in enumerate(shown.rows):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row.name}})
            for box in row.measured if pid == 1 else row.ideal:
                label = f"waits: {shown.parts[box.part]}" if box.waits else shown.parts[box.part]
                times = {"ts": 1e6 * box.start_s, "dur": 1e6 * (box.end_s - box.start_s)}
                events.append({"ph": "X", "pid": pid, "tid": tid, "name": label, **times})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def whatif_of(operations: Operations, question: Question | None = None) -> WhatIf:
    """Replay some operations; steps that are not replayed as they ran are left out. Answer the question, if any.

    Raises:
        InputError: they take no time.
        UsageError: the question has an unknown name.
    """
    if question is not None and question.steps is not None:
        operations = within(operations, question.steps)
    if operations.off_N is not None and (off_N := operations.off_N > MAX_OFF).any():
        n_off, n_steps = int(off_N.sum()), len(off_N)
        off = f"{n_off} of {n_steps} steps do not replay as they ran (off by up to {operations.off_N.max():.0%})"
        if n_off > MAX_STEPS_OFF * n_steps:
            found = replayed_as_measured(operations)
            nothing = Attribution((), found.step_s)
            return WhatIf(
                operations, found, nothing, f"No figure of this recording can be trusted: {off}. {CHECK_TIMES}"
            )
        operations = operations.of_steps(~off_N, f"{off}: left out")
    found = slowdown_of(operations)
    answer = answered(operations, question) if question is not None and str(question) else None
    return WhatIf(operations, found, attributed(operations, found), answer=answer)


CHECK_TIMES = (
    "Check that the workers' clocks agree within 10 ms, that start_ts and duration are in seconds and precise to "
    "0.1 ms, and that no time passes outside the recorded operations."
)
