"""The seam `exchange`: where a rank waits for others in a collective of torch.distributed, whoever calls it and where.

Blocking functions, and the waits for what was begun with ``async_op=True``. Their time is the stage ``exchange``, which
may lie inside any other: that one's own time is without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from sftriage.seams.parallel import C10D
from sftriage.seams.steps import EXCHANGE

if TYPE_CHECKING:
    from sftriage.seams.patches import Seams

_NAMES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "_all_gather_base"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "_broadcast_coalesced", "gather", "recv", "reduce", "scatter", "send"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"),
)
"""Of torch.distributed, as far as this torch has them; those of objects call these, and all that wait call Work.wait.
(On a device one that blocks may have done its work before that.)"""

REMAPS = "torch.distributed._functional_collectives"
"""Where the compiler looks up what it makes of a collective, by the function that is called."""


class Exchanges:
    """The collectives of this process.

    Attributes:
        seen: how often each was called, by its name and the stage that was open.
        within: stages that wait for other ranks as a whole: what is inside them is not timed by itself.
        in_backward: some were called in backward, in a thread of autograd's, where no time can be noted.
    """

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.seen: dict[tuple[str, str], int] = {}
        self.within: frozenset[str] = frozenset()
        self.in_backward = False
        self._wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}

    def put_in(self) -> None:
        """Put the seam in."""
        for name, owners in collectives():
            original = getattr(owners[0], name)
            self._wrapped[original] = self._waiting(original, name)
            for owner in owners:
                self._seams.replaced.put(owner, name, self._wrapped[original])
        if C10D in sys.modules:
            for owner in (sys.modules[C10D].Work, sys.modules["torch"]._C.Future):
                self._seams.replaced.wrap(owner, "wait", lambda original: self._waiting(original, "wait"))
        if REMAPS in sys.modules:
            self.remaps()

    def remaps(self) -> None:
        """What the compiler makes of collectives has been imported, and with it what waits for those that it makes."""
        with self._seams.guarded(EXCHANGE):
            compiled_alike(self._wrapped)
            self._seams.replaced.wrap(sys.modules[REMAPS], "wait_tensor", lambda one: self._waiting(one, "wait"))

    def _waiting(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        steps, seen, begun = self._seams.steps, self.seen, f"{name} (async)"
        at = _place(original, "async_op")

        def begins(*args: Any, **kwargs: Any) -> bool:
            stage = steps.opened[-1] if steps.opened else "other"
            if stage == EXCHANGE:
                return False
            later = kwargs.get("async_op") or (len(args) > at and args[at])
            key = begun if later else name, stage
            seen[key] = seen.get(key, 0) + 1
            if later or stage in self.within:
                return False
            entered = steps.enter(EXCHANGE)
            self.in_backward |= stage == "backward" and not entered
            return entered

        return self._seams.replaced.around(original, EXCHANGE, begins, steps.leaving(EXCHANGE))


def collectives() -> Iterator[tuple[str, list[Any]]]:
    """Their names, and the modules in which each is found, as far as this torch has them."""
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available():
        for name in _NAMES:
            owners = [owner for owner in (sys.modules[C10D], distributed) if hasattr(owner, name)]
            if owners:
                yield name, [owner for owner in owners if getattr(owner, name) is getattr(owners[0], name)]


def compiled_alike(wrapped: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Have the compiler make the same of collectives (keys) and of what wraps them, whichever of the two it knows."""
    remaps = getattr(sys.modules.get(REMAPS), "traceable_collective_remaps", {})
    for original, wrapper in wrapped.items():
        found = remaps.get(original, remaps.get(wrapper))
        if found is not None:
            remaps[original] = remaps[wrapper] = found


def _place(function: Callable[..., Any], parameter: str) -> int:
    """Where among its arguments a function takes one; past all of them where it does not."""
    try:
        return list(signature(function).parameters).index(parameter)
    except ValueError:  # (or it is none of Python's, and says nothing of itself)
        return sys.maxsize
