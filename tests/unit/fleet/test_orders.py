"""A capture that is ordered from a host ends once, with any reports of that host or none."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sftriage.fleet.hub import Subjects
from sftriage.fleet.incoming import AgentMessage, Refusals
from sftriage.fleet.over_nats import BEGIN_GRACE_S, END_GRACE_S, REFRESH_S, UNHEARD_S, CaptureOrders
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import decode_orders
from sftriage.mitigate.switching import Setting
from sftriage.model.captures import CaptureRequest, CaptureResult, Report, Trigger, WantedCapture
from sftriage.traces.store import LocalStore

REQUEST = CaptureRequest("c-1", 3, "torch", 2, 1, 20.0, 1 << 20)
TRIGGER = Trigger(5, 24, "suspect", "rank", (3,), "data", 0.1, 0.2, 1.0, "p", "0" * 64, "slow")
WANTED = WantedCapture(REQUEST, TRIGGER, 0, 60.0)
HOSTS = {"node-a": False, "node-b": False}


class Nowhere:
    connected_s = 0.0

    def start(self, what):
        what.close()

    def soon(self, what):
        pass


class Lease:
    epoch, lost, hub, places = 7, "", Nowhere(), Subjects("job")


class NodeOrders(CaptureOrders):
    """Captures ordered from node-b, which has rank 3; `now_s` is the time."""

    def __init__(self, tmp_path):
        self.now_s, self.held, self.gone = 100.0, False, set()
        self.refusals = Refusals()
        fleet = SimpleNamespace(
            place=lambda wanted: ("node-b" if wanted.request.rank == 3 else "", None),
            holds=lambda message: self.held,
            gone=lambda agent, one: agent in self.gone,
        )
        fetching = Fetching(LocalStore(tmp_path), tmp_path)
        super().__init__(fleet, Lease(), fetching, lambda: self.now_s, self.refusals)

    def ordered(self, agent):
        return [one.request.capture_id for one in decode_orders(self._to_write[agent][1]).captures]

    def says(self, state, detail="", agent="node-b", capture_id="c-1", rank=3):
        message = AgentMessage(agent, 1, "")
        self.heard(Report(CaptureResult(capture_id, rank, state, detail)), message)
        return message

    def turn(self, wanted=(WANTED,), over=HOSTS):
        """A turn of the controller: the states that are reported to it."""
        self.want(wanted, over)
        return [f"{one.result.state}: {one.result.detail}".removesuffix(": ") for one in self.reports()]


@pytest.fixture
def orders(tmp_path):
    return NodeOrders(tmp_path)


OTHER = replace(WANTED, request=replace(REQUEST, rank=9))
CAPTURES = {"other": OTHER, "resumed": replace(WANTED, expires_s=None, resumed=True)}
CAPTURES |= {"unheard": replace(OTHER, expires_s=None, resumed=True)}
PASSES_S = {"begin": 60.0 + BEGIN_GRACE_S, "end": 60.0 + REQUEST.max_seconds + END_GRACE_S, "unheard": UNHEARD_S}
# For each turn: its events | the order for node-b after it (the capture, or nothing) | the reports.
STORIES = """
it is ordered from the host that has its rank, and withdrawn once it has ended:
                           | c-1 |
  says accepted            | c-1 | accepted
  says refused: busy       | c-1 | refused: busy
  says refused             |     |
  says failed              |     |
a capture of a rank without a host fails at once:
  of other                 |     | failed: no host of the job has rank 9
  of other                 |     |
it never begins:
                           | c-1 |
  after begin              | c-1 |
  a moment later           |     | expired: its host did not begin it in time
  says accepted            |     |
it begins and never ends:
                           | c-1 |
  says accepted            | c-1 | accepted
  after end                | c-1 |
  a moment later           |     | expired: no answer from its host long after its time-box
  says accepted            |     |
it was in progress before, on a silent host:
  of unheard               |     |
  of unheard, after unheard |    |
  of unheard, a moment later |   | failed: the host that was to make it no longer answers
it was in progress before, and its host reported before that was known:
  of resumed, reported accepted | c-1 | accepted
its transfer takes longer than its host may take to report that it is stored:
                           | c-1 |
  says stored              | c-1 |
  after end                | c-1 |
  a moment later           | c-1 |
the job ends on its host, whose report waits for the steps before it:
                           | c-1 |
  says failed: it ended, held, over | c-1 |
  over                     | c-1 | failed: it ended
the job ends on its host without a report:
                           | c-1 |
  over                     |     | failed: the job ended on its host before the capture did
the job restarts without its host:
                           | c-1 |
  says accepted            | c-1 | accepted
  gone                     |     | failed: its host is gone, and the job restarted without it
  gone, says failed        |     |
"""


@pytest.mark.parametrize(("story", "turns"), re.findall(r"^(\S.*):\n((?: .*\n)+)", STORIES, re.MULTILINE))
def test_a_capture_ends_once_for_any_reports_of_its_host(orders, story, turns):
    for turn in turns.splitlines():
        now, ordered, reported = (part.strip() for part in turn.split("|"))
        events = dict(event.partition(" ")[::2] for event in now.split(", "))
        orders.now_s += PASSES_S.get(events.get("after"), 0.1 if "a" in events else 0.0)
        orders.held, orders.gone = "held" in events, {"node-b"} if "gone" in events else set()
        wanted = CAPTURES.get(events.get("of"), WANTED)
        for state, _, detail in (events[name].partition(": ") for name in ("reported", "says") if name in events):
            orders.says(state, detail, rank=wanted.request.rank)
        if "reported" in events:
            assert orders.reports() == []
        assert orders.turn([wanted], {**HOSTS, "node-b": "over" in events}) == ([reported] if reported else []), story
        assert (orders.ordered("node-a"), orders.ordered("node-b")) == ([], [ordered] if ordered else []), story


def test_settings_of_groups_are_written_with_the_orders_and_refreshed(orders):
    # GIVEN a host of whose ranks a group is to have something in force, and a capture is wanted of another one
    setting = {"node-a": {"ranks-0.abcd": Setting(3)}}
    orders.want([WANTED], HOSTS, setting)
    documents = {agent: decode_orders(data) for agent, (_, data) in orders._to_write.items()}
    assert (documents["node-a"].switches, documents["node-b"].switches) == (setting["node-a"], {})
    assert (len(documents["node-a"].captures), len(documents["node-b"].captures)) == (0, 1)
    # WHEN that is written THEN it is no news, until it would go by itself
    orders._written = {agent: (same, orders.now_s) for agent, (same, _) in orders._to_write.items()}
    orders._to_write.clear()
    orders.want([], HOSTS, setting)
    assert orders._to_write.keys() == {"node-b"}
    orders.now_s += REFRESH_S + 0.1
    orders.want([], HOSTS, setting)
    assert orders._to_write.keys() == {"node-a", "node-b"}
    # AND once all hosts have heard, it stands no longer
    orders.want([], HOSTS)
    assert decode_orders(orders._to_write["node-a"][1]).switches == {}


def test_a_message_is_settled_two_turns_after_its_report(orders):
    orders.turn()
    message = orders.says("accepted")
    orders.turn()
    # (the report is recorded in the rest of that turn)
    assert message.reports == 1
    orders.turn()
    assert message.reports == 1
    orders.turn()
    assert message.reports == 0


def test_a_host_learns_that_its_stored_capture_was_reported_unless_the_hub_lost_it(orders):
    def heard():
        orders.turn()
        return [one.heard for one in decode_orders(orders._to_write["node-b"][1]).captures]

    assert heard() == [False]
    orders.says("stored")
    orders.turn()
    # GIVEN a capture in transfer THEN it need not be reported again
    assert heard() == [True]
    # WHEN the hub turns out to have nothing of it THEN it is to be, until it has been
    orders._missing.add("c-1")
    assert heard() == [False]
    orders.says("stored")
    orders.turn()
    assert heard() == [True]


def test_orders_are_written_when_they_change_but_not_for_their_age(orders):
    orders.turn()
    orders._written = {agent: (same, orders.now_s) for agent, (same, _) in orders._to_write.items()}
    orders._to_write.clear()
    orders.now_s += REFRESH_S
    orders.turn([replace(WANTED, expires_s=40.0)])
    assert orders._to_write == {}
    # (but it is written again now and then, since it expires without a controller)
    orders.now_s += 0.1
    orders.turn([replace(WANTED, expires_s=39.9)])
    assert list(orders._to_write) == ["node-b"]
    orders.turn([])
    assert orders.ordered("node-b") == []


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"agent": "node-a"}, "it reports on a capture that was ordered from host node-b"),
        ({"rank": 4}, "it reports on a capture of rank 3 as one of rank 4"),
        ({"capture_id": "c-2"}, "it reports on capture c-2, which was not ordered"),
    ],
)
def test_a_report_on_a_capture_ordered_elsewhere_is_refused(orders, caplog, about, why):
    # GIVEN a capture that was ordered from a host
    orders.turn()
    # WHEN another host, or that one of something else, says a hundred times that it has failed
    messages = [orders.says("failed", **about) for _ in range(100)]
    # THEN they are refused, counted and logged once, and none of them stays unsettled
    assert [orders.turn() for _ in range(3)] == [[], [], []]
    assert {message.reports for message in messages} == {0}
    agent = about.get("agent", "node-b")
    assert orders.refusals.problems == {f"messages of {agent}": "100 refused"}
    assert caplog.messages == [f"refused a message of host {agent}: {why}"]
    # AND what its own host says counts
    orders.says("accepted")
    assert orders.turn() == ["accepted"]


def test_what_was_reported_to_an_earlier_controller_is_no_news_and_no_offence(orders, caplog):
    message = orders.says("stored", capture_id="c-0")
    assert [orders.turn() for _ in range(2)] == [[], []]
    orders.turn()
    assert message.reports == 0
    assert caplog.messages == []
