"""What the demo does to its own job: causes that real jobs have, and bare delays of one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sftriage.errors import UsageError

FAULT_STAGES = ("data", "forward", "backward", "optimizer", "other")
STAGE_NAMES = ", ".join(FAULT_STAGES)


@dataclass(frozen=True, slots=True)
class Cause:
    """A way to make one rank slow, and what it is in words.

    ``stage`` is slow, or all of them if "". ``codes`` are the right causes (`sftriage.traces.manifest.CauseCode`), and
    ``function`` is at fault, without its class; "" where no line of the thread that trains is.
    """

    stage: str
    codes: tuple[str, ...]
    function: str
    says: str


CAUSES: Mapping[str, Cause] = {
    "slow-dataset": Cause("data", ("sleep",), "__getitem__", "its dataset waits for a storage that is slow"),
    "python-decoding": Cause("data", ("python",), "decode", "its samples are decoded byte by byte, in Python"),
    "slow-disk": Cause("data", ("disk",), "copy_shard", "its samples come from a disk that is slow"),
    "held-lock": Cause("data", ("lock",), "from_cache", "another of its threads holds the lock of a cache"),
    "subprocess": Cause("data", ("subprocess",), "tokenize", "it starts a program for each of its batches"),
    "extra-operator": Cause("forward", ("operator",), "regularized", "its model computes what the others' do not"),
    "recompilation": Cause("forward", ("recompilation",), "regularized_anew", "it compiles a function in every step"),
    "checkpoint": Cause("optimizer", ("checkpoint",), "save_checkpoint", "it saves a checkpoint in every step"),
    "slow-logging": Cause("other", ("disk",), "log_metrics", "it writes its metrics to a disk, and waits for that"),
    "garbage": Cause("other", ("garbage_collection",), "log_memory", "it collects garbage in every step"),
    "gil-thread": Cause("", ("gil",), "", "another of its threads computes in Python, and has the interpreter"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A cause on one rank; or a bare delay of ``delay_s`` seconds in the stage ``name`` of every step."""

    name: str
    rank: int
    delay_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}" + (f":{self.delay_s * 1e3:g}" if self.delay_s else "")

    @property
    def option(self) -> str:
        """The option that causes it."""
        return "--fault" if self.delay_s else "--cause"

    @property
    def cause(self) -> Cause:
        """What it is."""
        if not self.delay_s:
            return CAUSES[self.name]
        function = "_pause" if self.name == "backward" else "pause_for"
        return Cause(self.name, ("sleep",), function, f"it sleeps {self.delay_s * 1e3:g} ms in {self.name}")


def parse_fault(text: str) -> Fault:
    """A fault from ``STAGE:RANK:MS``; raises UsageError where it is not of that form."""
    try:
        stage, rank, delay_ms = text.split(":")
        fault = Fault(stage, int(rank), float(delay_ms) / 1e3)
        if stage in FAULT_STAGES and fault.rank >= 0 and 0 < fault.delay_s <= 60:
            return fault
    except ValueError:
        pass
    raise UsageError(
        f"fault {text!r} is not STAGE:RANK:MS with a stage of {STAGE_NAMES}, "
        "a rank from 0 and 0 to 60000 ms; for example data:2:40"
    )


def parse_cause(text: str, drawn: Iterable[int] = ()) -> Fault:
    """A cause from ``NAME``, on the next rank that was ``drawn``, or from ``NAME:RANK``; raises UsageError else."""
    name, colon, rank = text.partition(":")
    if name not in CAUSES:
        raise UsageError(f"there is no cause {name!r}; there are: {', '.join(CAUSES)}")
    if colon and not (rank.isascii() and rank.isdigit()):
        raise UsageError(f"cause {text!r} is not NAME or NAME:RANK with a rank from 0; for example {name}:2")
    return Fault(name, int(rank) if colon else next(iter(drawn)))
