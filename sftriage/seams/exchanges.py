"""The seam `exchange`: collectives that a script calls by itself, and waits of a pipeline. All ranks wait there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from sftriage.seams import parallel
from sftriage.seams.steps import EXCHANGE

if TYPE_CHECKING:
    from sftriage.seams.patches import Seams

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "barrier",
    "broadcast",
    "reduce",
)
"""Of torch.distributed; those of objects call these."""


REMAPS = "torch.distributed._functional_collectives"
"""Where the compiler looks up what it makes of a collective, by the function that is called."""


class Exchanges:
    """The collectives of all ranks, and the waits of a pipeline.

    Attributes:
        pipelined: the job is a pipeline.
    """

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.pipelined = False
        self._wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}

    def put_in(self) -> None:
        """Put the seam in."""
        for name, owners in collectives():
            original = getattr(owners[0], name)
            self._wrapped[original] = self._wrapping(original)
            for owner in owners:
                self._seams.replaced.put(owner, name, self._wrapped[original])
        compiled_alike(self._wrapped)

    def pipelines(self) -> None:
        """torch.distributed.pipelining has been imported."""
        if EXCHANGE in self._seams.on:
            with self._seams.guarded(EXCHANGE):
                schedules = sys.modules[parallel.PIPELINING]
                self._seams.replaced.wrap(schedules, parallel.PIPELINE_WAIT, self._waiting)
                self.pipelined = True

    def remaps(self) -> None:
        """What the compiler makes of collectives has been imported."""
        with self._seams.guarded(EXCHANGE):
            compiled_alike(self._wrapped)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps = self._seams.steps

        def begins(*_: object, **__: object) -> bool:
            return not steps.opened and steps.enter(EXCHANGE)

        return self._seams.replaced.around(original, EXCHANGE, begins, steps.leaving(EXCHANGE))

    def _wrapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        of_all, steps = of_all_ranks(original), self._seams.steps

        def begins(*args: Any, **kwargs: Any) -> bool:
            # (those of backward, and of the optimizer, are part of that)
            inside = steps.opened[-1:]
            return inside not in (["backward"], ["optimizer"]) and of_all(args, kwargs) and steps.enter(EXCHANGE)

        return self._seams.replaced.around(original, EXCHANGE, begins, steps.leaving(EXCHANGE))


def collectives() -> Iterator[tuple[str, list[Any]]]:
    """Their names, and the modules in which each is found, as far as this torch has them."""
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available():
        for name in _NAMES:
            owners = [sys.modules["torch.distributed.distributed_c10d"], distributed]
            if original := getattr(owners[0], name, None):
                yield name, [owner for owner in owners if getattr(owner, name, None) is original]


def compiled_alike(wrapped: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Have the compiler make the same of collectives (keys) and of what wraps them, whichever of the two it knows."""
    remaps = getattr(sys.modules.get(REMAPS), "traceable_collective_remaps", {})
    for original, wrapper in wrapped.items():
        found = remaps.get(original, remaps.get(wrapper))
        if found is not None:
            remaps[original] = remaps[wrapper] = found


def of_all_ranks(collective: Callable[..., Any]) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
    """What says of a call's arguments whether all ranks wait there: not some of them, and not later."""
    names, group = list(signature(collective).parameters), sys.modules["torch.distributed"].group

    def waits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return not given.get("async_op") and given.get("group") in (None, group.WORLD)

    return waits


def placed(stages: Sequence[str], order: Sequence[str]) -> tuple[str, ...]:
    """The stages, with the exchange where it is in this order (`steps.Steps.order`)."""
    after = order[order.index(EXCHANGE) :]
    at = next((place for place, stage in enumerate(stages) if stage in after), len(stages))
    return (*stages[:at], EXCHANGE, *stages[at:])
