"""What some steps of a job did not show (`sftriage doctor -- COMMAND`), and the lines by which it would be seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sftriage.recorder import RingInfo
from sftriage.records import StepRecord
from sftriage.runtime.unrecorded import Reason
from sftriage.seams.steps import STAGES
from sftriage.words.amounts import counted

_MUCH = 0.2
"""The part of the steps from which on it matters that no stage has it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that was not seen, and the lines by which it would be."""

    what: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a job's rings and processes have shown.

    ``fired`` counts what each seam saw, ``failed`` says why one was switched off. ``trainers`` is how many processes
    look like ranks, ``training`` how many of them were seen to train. ``shares`` has the part of the steps that each
    stage takes, ``steps`` those of each rank. ``misuse`` counts calls that the recorder could make no sense of.
    ``status`` is the exit status of a job that ended by itself, None of one that was ended. ``nothing`` is why no step
    is recorded; None where one is.
    """

    fired: Mapping[str, int]
    failed: Mapping[str, str]
    trainers: int
    training: int
    by_hand: bool
    infos: Sequence[RingInfo]
    steps: Sequence[Sequence[StepRecord]]
    shares: Mapping[str, float]
    misuse: int
    status: int | None
    nothing: Reason | None


def missing_of(seen: Observed) -> tuple[Missing, ...]:
    """What was not seen, with what to write for it; what keeps all else from being seen comes first."""
    if seen.nothing is not None:
        ended = seen.nothing.code in ("failed", "stopped")
        said = seen.nothing.what if ended else f"{seen.nothing.what}: no step is recorded"
        return (Missing(said, _LINES.get(seen.nothing.code, ())),)
    return (*_ended(seen), *_unranked(seen), *(_in_monitor(seen) if seen.by_hand else _under_seams(seen)))


def _ended(seen: Observed) -> Iterator[Missing]:
    if seen.status:
        after = f"{counted(min(map(len, seen.steps)), 'recorded step')} of a rank"
        what = f"the job ended by itself with exit status {seen.status}, after {after}"
        yield Missing(f"{what}: its own output, above, says why", ())


def _unranked(seen: Observed) -> Iterator[Missing]:
    """Processes that do not know of one another: each records as rank 0 of 1."""
    if seen.training > 1 and seen.infos and all(one.world_size == 1 for one in seen.infos):
        what = f"{seen.training} processes train, and each says that it is rank 0 of 1"
        yield Missing(f"{what}: neither RANK and WORLD_SIZE nor torch.distributed say more", _RANKS)


def _under_seams(seen: Observed) -> Iterator[Missing]:
    for name, why in seen.failed.items():
        yield Missing(f"the seam {name} was switched off: {why}", ())
    unseen = [name for name in STAGES[:3] if not seen.fired[name] and name not in seen.failed]
    for name in unseen:
        yield Missing(_UNSEEN[name], ("import sftriage", *_around("sftriage", name)))
    if not unseen:
        yield from _elsewhere(seen, ("import sftriage", *_around("sftriage", "NAME")))
    schema = seen.infos[0].schema
    if seen.infos[0].world_size > 1 and not any(seen.shares.get(name) for name in schema.sync):
        what = "neither DDP nor FSDP is used, and nothing has waited in a collective of torch.distributed"
        yield Missing(f"nothing is known to wait for the other ranks: {what}", _EXCHANGE)
    if "forward" in schema.sync:
        yield Missing("no moment of the last gradient: under FSDP it is accumulated after the exchange", ())


def _in_monitor(seen: Observed) -> Iterator[Missing]:
    """What a Monitor of the script's own leaves open."""
    records = [record for steps in seen.steps for record in steps]
    # (a rank's last one may be so because it was ended)
    if incomplete := sum(not one.complete for steps in seen.steps for one in steps[:-1]):
        what = f"{incomplete} of {counted(len(records), 'step')} were left by an exception, or never"
        yield Missing(f"{what}: one turn of the loop is one step", ("with monitor.step():", "    ...  # one turn"))
    if seen.misuse:
        what = f"{counted(seen.misuse, 'call')} made no sense to the recorder"
        yield Missing(f"{what}: its warnings, above, say which (each sort once)", ())
    schema = seen.infos[0].schema
    for name in schema.stages[:-1]:
        if not seen.shares.get(name):
            yield Missing(f"the stage {name} was declared, and never entered", _around("monitor", name))
    yield from _elsewhere(seen, _around("monitor", "NAME"))
    if seen.infos[0].world_size > 1 and not schema.sync:
        yield Missing("no stage is said to wait for the other ranks", _SYNC)
    elif schema.sync and all(one.ready_ns is None for one in records):
        what = f"no moment of the last gradient, by which {schema.sync[0]} would be told from waiting in it"
        yield Missing(f"{what} (under FSDP there is none)", ("monitor.watch(model)  # once, before the first step",))


def _elsewhere(seen: Observed, lines: tuple[str, ...]) -> Iterator[Missing]:
    share = seen.shares.get("other", 0.0)
    if share >= _MUCH:
        yield Missing(
            f"{share:.0%} of the steps is in no stage (other): what is done between those that are seen", lines
        )


_UNSEEN = {
    "data": "no batch came from a torch DataLoader in the training thread: its time is in other",
    "forward": "no call of the model that is trained was seen (`model.forward(...)` is none, `model(...)` is): its "
    "time is in other",
    "backward": "no call of backward() was seen (`torch.autograd.grad` is none): its time is in other",
}
_INNER = {
    "data": "batch = next(batches)",
    "forward": "loss = loss_of(model(batch))",
    "backward": "loss.backward()",
    "optimizer": "optimizer.step()",
}


def _around(whose: str, stage: str) -> tuple[str, ...]:
    return (f'with {whose}.stage("{stage}"):', f"    {_INNER.get(stage, '...')}")


_MONITOR = (
    "import sftriage",
    "monitor = sftriage.Monitor()  # once, where the ranks know of each other (init_process_group)",
    "while training:",
    "    with monitor.step():",
    *(f"        {line}" for stage in STAGES for line in _around("monitor", stage)),
)
_RANKS = (
    "import sftriage",
    "monitor = sftriage.Monitor(rank=RANK, world_size=WORLD_SIZE)  # as whoever started the processes counts them",
)
_SYNC = ('monitor = sftriage.Monitor(sync=("backward",))  # the stage in which gradients are exchanged',)
_EXCHANGE = (
    "import sftriage",
    'with sftriage.stage("exchange", sync=True):',
    "    ...  # where ranks wait for one another: gradients that are averaged",
)
_LINES = {
    **dict.fromkeys(("no_optimizer", "no_step", "-I", "-E", "-S", "PYTHONPATH"), _MONITOR),
    **dict.fromkeys(("monitor_unused", "monitor_elsewhere"), _MONITOR[2:]),
}
"""What helps against each of the reasons why nothing is recorded, where lines in the script do."""
