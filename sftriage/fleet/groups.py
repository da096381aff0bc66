"""The groups of ranks that a remedy can be switched on, as agents tell of them, and what is wanted of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from sftriage.fleet.messages import MAX_SECONDS
from sftriage.mitigate.switch_state import (
    MAX_STAGES,
    UNLIKE,
    Request,
    Setting,
    StageTimes,
    SwitchStatus,
    as_range,
    numbers_of,
    whole_groups,
)
from sftriage.recorder.layout import MAX_COUNT

MAX_VALUE, MAX_MOST = 1 << 16, 1 << 8

_Short = tuple[tuple[int, ...], bool]
"""Numbers as `as_range` makes them."""


class SwitchMessage(msgspec.Struct, frozen=True, array_like=True):
    """A `SwitchStatus` as it crosses."""

    name: str
    ranks: _Short
    here: _Short
    round: int
    all_begun: int
    value: int | None
    since_step: int
    request: Request
    exchange_s: float
    exchanged_bytes: int
    stages: tuple[StageTimes, ...]
    microbatches: int


_SAME = [name for name in SwitchMessage.__struct_fields__ if name not in ("ranks", "here")]


def plain(status: SwitchStatus) -> SwitchMessage:
    """A status as it crosses."""
    same = {name: getattr(status, name) for name in _SAME}
    return SwitchMessage(ranks=as_range(status.ranks), here=as_range(status.here), **same)


def checked(told: SwitchMessage) -> SwitchStatus:
    """What has come.

    Raises:
        ValueError: it is none that there can be.
    """
    ranks = numbers_of(*told.ranks, MAX_COUNT)
    here = numbers_of(*told.here, len(ranks))
    counts = [told.round, told.all_begun, told.exchanged_bytes, told.microbatches, told.since_step + 1, *told.request]
    times_s = [told.exchange_s, *(took_s for stage in told.stages for took_s in stage[:-1])]
    if not all(0 <= one < MAX_COUNT for one in counts) or not all(0 <= one < MAX_SECONDS for one in times_s):
        raise ValueError("a group with numbers that cannot be")
    if not all(0 <= one < MAX_VALUE for one in (told.value or 0, told.request.value)):
        raise ValueError("a group with a value that cannot be")
    if not ranks or not told.name.isprintable() or len(told.name) > 100:
        raise ValueError("a group that cannot be")
    room = [stage.most for stage in told.stages]
    if len(room) != (len(ranks) if told.microbatches else 0) or not all(0 <= one < MAX_MOST for one in room):
        raise ValueError("a pipeline that cannot be")
    return SwitchStatus(ranks=ranks, here=here, **{name: getattr(told, name) for name in _SAME})


def may_be(setting: Setting) -> bool:
    """Whether there can be such a setting."""
    value, ahead_S = setting
    return 0 <= value < MAX_VALUE and len(ahead_S) <= MAX_STAGES and all(0 < one < MAX_MOST for one in ahead_S)


class Groups:
    """The groups of a job as their agents report them, and the settings wanted of each agent (``wanted``).

    Args:
        takes_part: whether an agent's host has ranks in the job's newest start, as far as is known.
        is_silent: whether an agent reports nothing.
    """

    def __init__(self, takes_part: Callable[[str], bool], is_silent: Callable[[str], bool]) -> None:
        self._takes_part, self._is_silent = takes_part, is_silent
        self._told: dict[str, tuple[SwitchStatus, ...]] = {}
        self.wanted: Mapping[str, Mapping[str, Setting]] = {}

    def heard(self, agent: str, told: Collection[SwitchStatus], has: Collection[int]) -> None:
        """An agent has told of groups; of what it tells of ranks that it has not, nothing is believed."""
        mine = frozenset(has) if told else frozenset()
        self._told[agent] = tuple(one for one in told if mine.issuperset(one.ranks_here))

    def statuses(self) -> list[SwitchStatus]:
        """How the groups stand of which all ranks are told of: with a host that is silent, as they did last."""
        of_now = self._of_now()
        unheard = {one.name for agent, told in of_now.items() if self._is_silent(agent) for one in told}
        found = whole_groups(one for told in of_now.values() for one in told)
        return [replace(one, request=UNLIKE) if one.name in unheard else one for one in found]

    def want(self, wanted: Mapping[str, Setting]) -> None:
        """What is to be in force in each group. It stays written down for all of its agents until all have asked."""
        to_ask = {
            one.name: setting
            for one in self.statuses()
            if (setting := wanted.get(one.name)) is not None and one.next_request(setting.value) is not None
        }
        names = {agent: {one.name for one in told} & to_ask.keys() for agent, told in self._of_now().items()}
        self.wanted = {agent: {name: to_ask[name] for name in some} for agent, some in names.items() if some}

    def _of_now(self) -> Mapping[str, Sequence[SwitchStatus]]:
        """Groups by agents that take part: a host that is gone may have had one of the same name."""
        return {agent: told for agent, told in self._told.items() if told and self._takes_part(agent)}
