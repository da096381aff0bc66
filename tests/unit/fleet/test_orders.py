"""A capture that is asked of a host ends once, whatever its host says or does not say."""

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


class Asked(CaptureOrders):
    """Captures that are asked of node-b, which has rank 3; `now_s` is the time."""

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
        """A turn of the controller: the states that it is told of."""
        self.want(wanted, over)
        return [f"{one.result.state}: {one.result.detail}".removesuffix(": ") for one in self.reports()]


@pytest.fixture
def asked(tmp_path):
    return Asked(tmp_path)


OTHER = replace(WANTED, request=replace(REQUEST, rank=9))
CAPTURES = {"other": OTHER, "resumed": replace(WANTED, expires_s=None, resumed=True)}
CAPTURES |= {"unheard": replace(OTHER, expires_s=None, resumed=True)}
PASSES_S = {"begin": 60.0 + BEGIN_GRACE_S, "end": 60.0 + REQUEST.max_seconds + END_GRACE_S, "unheard": UNHEARD_S}
# Of each turn what is so in it, what is asked of node-b after it (the capture, or nothing), and what is told.
STORIES = """
it is asked of the host that has its rank, and once it has ended of none:
                           | c-1 |
  says accepted            | c-1 | accepted
  says refused: busy       | c-1 | refused: busy
  says refused             |     |
  says failed              |     |
a rank that no host has fails at once:
  of other                 |     | failed: no host of the job has rank 9
  of other                 |     |
it is never begun:
                           | c-1 |
  after begin              | c-1 |
  a moment later           |     | expired: its host did not begin it in time
  says accepted            |     |
it is begun and never ended:
                           | c-1 |
  says accepted            | c-1 | accepted
  after end                | c-1 |
  a moment later           |     | expired: no answer from its host long after its time-box
  says accepted            |     |
it was under way before, on a host that is not heard of:
  of unheard               |     |
  of unheard, after unheard |    |
  of unheard, a moment later |   | failed: the host that was to make it no longer answers
it was under way before, and its host has reported before that was known:
  of resumed, said accepted | c-1 | accepted
it is on its way here for longer than its host might take to say that it is stored:
                           | c-1 |
  says stored              | c-1 |
  after end                | c-1 |
  a moment later           | c-1 |
the job ends on its host, whose report waits for the steps before it:
                           | c-1 |
  says failed: it ended, held, over | c-1 |
  over                     | c-1 | failed: it ended
the job ends on its host without a word of it:
                           | c-1 |
  over                     |     | failed: the job ended on its host before the capture did
the job starts again without its host:
                           | c-1 |
  says accepted            | c-1 | accepted
  gone                     |     | failed: its host is gone, and the job restarted without it
  gone, says failed        |     |
"""


@pytest.mark.parametrize(("story", "turns"), re.findall(r"^(\S.*):\n((?: .*\n)+)", STORIES, re.MULTILINE))
def test_a_capture_ends_once_whatever_its_host_says(asked, story, turns):
    for turn in turns.splitlines():
        now, ordered, told = (part.strip() for part in turn.split("|"))
        events = dict(event.partition(" ")[::2] for event in now.split(", "))
        asked.now_s += PASSES_S.get(events.get("after"), 0.1 if "a" in events else 0.0)
        asked.held, asked.gone = "held" in events, {"node-b"} if "gone" in events else set()
        wanted = CAPTURES.get(events.get("of"), WANTED)
        for state, _, detail in (events[name].partition(": ") for name in ("said", "says") if name in events):
            asked.says(state, detail, rank=wanted.request.rank)
        if "said" in events:
            assert asked.reports() == []
        assert asked.turn([wanted], {**HOSTS, "node-b": "over" in events}) == ([told] if told else []), story
        assert (asked.ordered("node-a"), asked.ordered("node-b")) == ([], [ordered] if ordered else []), story


def test_what_groups_are_to_have_in_force_is_written_with_it_and_again_while_it_stands(asked):
    # GIVEN a host of whose ranks a group is to have something in force, and a capture is wanted of another one
    setting = {"node-a": {"ranks-0.abcd": Setting(3)}}
    asked.want([WANTED], HOSTS, setting)
    orders = {agent: decode_orders(data) for agent, (_, data) in asked._to_write.items()}
    assert (orders["node-a"].switches, orders["node-b"].switches) == (setting["node-a"], {})
    assert (len(orders["node-a"].captures), len(orders["node-b"].captures)) == (0, 1)
    # WHEN that is written THEN it is no news, until it would go by itself
    asked._written = {agent: (same, asked.now_s) for agent, (same, _) in asked._to_write.items()}
    asked._to_write.clear()
    asked.want([], HOSTS, setting)
    assert asked._to_write.keys() == {"node-b"}
    asked.now_s += REFRESH_S + 0.1
    asked.want([], HOSTS, setting)
    assert asked._to_write.keys() == {"node-a", "node-b"}
    # AND once all hosts have heard, it stands no longer
    asked.want([], HOSTS)
    assert decode_orders(asked._to_write["node-a"][1]).switches == {}


def test_a_message_is_settled_two_turns_after_it_was_told(asked):
    asked.turn()
    message = asked.says("accepted")
    asked.turn()
    # (what was told is put on record in the rest of that turn)
    assert message.reports == 1
    asked.turn()
    assert message.reports == 1
    asked.turn()
    assert message.reports == 0


def test_a_host_is_told_that_what_it_stored_was_heard_of_unless_the_hub_has_lost_it(asked):
    def heard():
        asked.turn()
        return [one.heard for one in decode_orders(asked._to_write["node-b"][1]).captures]

    assert heard() == [False]
    asked.says("stored")
    asked.turn()
    # GIVEN a capture that is on its way here THEN it need not be told again
    assert heard() == [True]
    # WHEN the hub turns out to have nothing of it THEN it is to be, until it has been
    asked._missing.add("c-1")
    assert heard() == [False]
    asked.says("stored")
    asked.turn()
    assert heard() == [True]


def test_what_is_written_changes_with_what_is_wanted_and_not_with_its_age(asked):
    asked.turn()
    asked._written = {agent: (same, asked.now_s) for agent, (same, _) in asked._to_write.items()}
    asked._to_write.clear()
    asked.now_s += REFRESH_S
    asked.turn([replace(WANTED, expires_s=40.0)])
    assert asked._to_write == {}
    # (but now and then it is written again: it goes by itself once nobody leads the job)
    asked.now_s += 0.1
    asked.turn([replace(WANTED, expires_s=39.9)])
    assert list(asked._to_write) == ["node-b"]
    asked.turn([])
    assert asked.ordered("node-b") == []


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"agent": "node-a"}, "it reports on a capture that was ordered from host node-b"),
        ({"rank": 4}, "it reports on a capture of rank 3 as one of rank 4"),
        ({"capture_id": "c-2"}, "it reports on capture c-2, which was not ordered"),
    ],
)
def test_what_a_host_says_of_a_capture_that_it_was_not_asked_for_is_refused(asked, caplog, about, why):
    # GIVEN a capture that was asked of a host
    asked.turn()
    # WHEN another host, or that one of something else, says a hundred times that it has failed
    messages = [asked.says("failed", **about) for _ in range(100)]
    # THEN that is not so, it is counted, and said once; and nothing of it is waited for
    assert [asked.turn() for _ in range(3)] == [[], [], []]
    assert {message.reports for message in messages} == {0}
    agent = about.get("agent", "node-b")
    assert asked.refusals.problems == {f"messages of {agent}": "100 refused"}
    assert caplog.messages == [f"refused a message of host {agent}: {why}"]
    # AND what its own host says counts
    asked.says("accepted")
    assert asked.turn() == ["accepted"]


def test_what_was_reported_to_an_earlier_controller_is_no_news_and_no_offence(asked, caplog):
    message = asked.says("stored", capture_id="c-0")
    assert [asked.turn() for _ in range(2)] == [[], []]
    asked.turn()
    assert message.reports == 0
    assert caplog.messages == []
