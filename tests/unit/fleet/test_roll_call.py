"""Which hosts are there is said once for all that come or go together, and not while it still changes."""

from sftriage.fleet.hosts import AWAY_S, SETTLE_S, Host, RollCall
from tests.unit.fleet.shipments import block

HERE, SILENT, OVER = (Host(newest=block(), **how) for how in ({}, {"silent": True}, {"over": True}))
AWAY = "the hub cannot be reached: is its host up?"


class Said:
    """A roll call, and the time."""

    def __init__(self) -> None:
        self._call, self.now_s = RollCall(), 100.0

    def of(self, away: str = "", later_s: float = SETTLE_S, **hosts: Host) -> list[str]:
        """What is said of some hosts that are as they are for a while."""
        said = self._call.look(hosts, away, self.now_s)
        self.now_s += later_s
        return said + self._call.look(hosts, away, self.now_s)


def test_hosts_that_come_one_after_another_are_said_in_one_line():
    said = Said()
    assert said.of(later_s=0.5, b=HERE) == []
    assert said.of(b=HERE, a=HERE) == ["4 ranks on 2 hosts: a and b"]
    assert said.of(b=HERE, a=HERE) == []


def test_of_many_hosts_some_are_named():
    hosts = {f"n{number}": HERE for number in range(64)}
    assert Said().of(**hosts) == ["128 ranks on 64 hosts: n0, n1, n10, n11 and 60 more"]


def test_hosts_of_which_nothing_is_heard_are_said_together_and_so_is_their_return():
    said = Said()
    said.of(a=HERE, b=HERE, c=HERE)
    silent = ["nothing is heard of b and c: windows go out without their ranks"]
    assert said.of(a=HERE, b=SILENT, c=SILENT) == silent
    assert said.of(a=HERE, b=SILENT, c=SILENT) == []
    assert said.of(a=HERE, b=HERE, c=SILENT) == ["b is back"]


def test_a_host_that_has_left_is_no_news():
    said = Said()
    said.of(a=HERE, b=HERE)
    assert said.of(a=HERE, b=OVER) == []


def test_a_hub_that_is_away_for_a_moment_is_no_news_and_one_that_stays_away_is():
    said = Said()
    said.of(a=HERE)
    assert said.of(AWAY, later_s=1.0, a=HERE) == []
    assert said.of(a=HERE) == []
    assert said.of(AWAY, later_s=AWAY_S, a=HERE) == [f"{AWAY} The job goes on, and nobody is judged meanwhile"]
    # WHEN it is back THEN that is said once, and hosts that could not be heard of meanwhile are none of the news
    assert said.of(a=HERE) == [f"the hub is back after {AWAY_S:.0f} s; what was recorded meanwhile is judged now"]
