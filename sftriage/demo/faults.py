"""The faults that `sftriage demo` draws and `train` injects: causes from real jobs, hangs, and delays of one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sftriage.errors import UsageError

FAULT_STAGES = ("data", "forward", "backward", "optimizer", "other")
STAGE_NAMES = ", ".join(FAULT_STAGES)


@dataclass(frozen=True, slots=True)
class Cause:
    """A way to make one rank slow, or to make it hang, and a description of it.

    ``stage`` is slow; "": all stages. ``codes`` are the right causes (`sftriage.traces.manifest.CauseCode`), or where
    it ``hangs``, the right kinds (`sftriage.model.hangs.HangKind`). ``function``, without its class, is at fault; "":
    no line of the training thread is.
    """

    stage: str
    codes: tuple[str, ...]
    function: str
    says: str
    hangs: bool = False


CAUSES: Mapping[str, Cause] = {
    "slow-dataset": Cause("data", ("sleep",), "__getitem__", "its dataset waits for slow storage"),
    "python-decoding": Cause("data", ("python",), "decode", "its samples are decoded byte by byte in Python"),
    "slow-disk": Cause("data", ("disk",), "copy_shard", "its samples come from a slow disk"),
    "held-lock": Cause("data", ("lock",), "from_cache", "another thread holds the lock of a cache"),
    "subprocess": Cause("data", ("subprocess",), "tokenize", "it starts a program for every batch"),
    "extra-operator": Cause("forward", ("operator",), "regularized", "its model runs an extra operator"),
    "recompilation": Cause("forward", ("recompilation",), "regularized_anew", "it recompiles in every step"),
    "checkpoint": Cause("optimizer", ("checkpoint",), "save_checkpoint", "it saves a checkpoint in every step"),
    "slow-logging": Cause("other", ("disk",), "log_metrics", "it writes metrics to disk, and waits for it"),
    "garbage": Cause("other", ("garbage_collection",), "log_memory", "it collects garbage in every step"),
    "gil-thread": Cause("", ("gil",), "", "another thread computes in Python, and holds the GIL"),
    "hang-collective": Cause(
        "other", ("different_collective",), "validate", "in an evaluation it calls another collective", hangs=True
    ),
    "hang-lock": Cause("data", ("absent",), "look_up", "two of its threads wait for each other's lock", hangs=True),
    "hang-worker": Cause(
        "data", ("absent",), "read_shard", "a worker of its DataLoader waits for a file that never comes", hangs=True
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A cause on one rank; or a plain delay of ``delay_s`` seconds in the stage ``name`` of every step."""

    name: str
    rank: int
    delay_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}" + (f":{self.delay_s * 1e3:g}" if self.delay_s else "")

    @property
    def option(self) -> str:
        """The option of `sftriage demo` that injects this fault."""
        return "--fault" if self.delay_s else "--cause"

    @property
    def cause(self) -> Cause:
        """The kind of fault."""
        if not self.delay_s:
            return CAUSES[self.name]
        function = "_pause" if self.name == "backward" else "pause_for"
        return Cause(self.name, ("sleep",), function, f"it sleeps {self.delay_s * 1e3:g} ms in {self.name}")


def parse_fault(text: str) -> Fault:
    """A fault from ``STAGE:RANK:MS``; UsageError for any other form."""
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
    """A cause from ``NAME``, on the next rank that was ``drawn``, or from ``NAME:RANK``; UsageError for other forms."""
    name, colon, rank = text.partition(":")
    if name not in CAUSES:
        raise UsageError(f"unknown cause {name!r}; choose from {', '.join(CAUSES)}")
    if colon and not (rank.isascii() and rank.isdigit()):
        raise UsageError(f"cause {text!r} is not NAME or NAME:RANK with a rank from 0; for example {name}:2")
    return Fault(name, int(rank) if colon else next(iter(drawn)))
