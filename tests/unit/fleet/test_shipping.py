"""A host's end of a fleet: captures begin only once noted, and their ends are reported until the controller knows."""

from dataclasses import replace

import pytest

from sftriage.fleet import shipping
from sftriage.fleet.hub import LogLeader, Subjects
from sftriage.fleet.shipping import HostEnd
from sftriage.fleet.transfers import HostCaptures
from sftriage.fleet.wire import Orders, encode
from sftriage.mitigate.switching import Setting
from sftriage.model.captures import CaptureResult, Report
from sftriage.model.windows import ReadCounts
from tests.disks import small_disk
from tests.unit.fleet.shipments import group
from tests.unit.fleet.test_orders import WANTED, Nowhere


class Agent:
    """Has no ranks, and returns the reports in `due`."""

    infos = ()

    def telemetry(self):
        return ReadCounts()

    def __init__(self):
        self.wanted, self.due, self.in_force = [], [], []

    def want(self, wanted):
        self.wanted = [one.request.capture_id for one in wanted]

    def reports(self):
        due, self.due = self.due, []
        return due

    def rows(self):
        return []

    def statuses(self):
        return None

    def switches(self):
        return [group((0, 1))]

    def switch(self, wanted):
        self.in_force.append(wanted)


class Ended(HostEnd):
    """The end of node-b, of which capture c-1 is wanted."""

    def __init__(self, directory):
        self.agent = Agent()
        about = Subjects("job"), "node-b", "boot", "1", HostCaptures(directory)
        super().__init__(self.agent, Nowhere(), *about, LogLeader(directory / "speaker"))
        self._outbox.append(b"not sent yet")
        self._has_read = True
        self.orders((WANTED,))

    def orders(self, captures, switches=(), epoch=1):
        self._take(encode(Orders(epoch, captures, switches=dict(switches))))

    def turns(self, number=1):
        """Take some turns; return their reports."""
        for _ in range(number):
            self.turn()
        reported = [(one.result.state, one.result.detail) for one in self._reports]
        self._reports.clear()
        return reported


@pytest.fixture
def now_s(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(shipping.time, "monotonic", lambda: now[0])
    return now


def test_a_capture_is_noted_before_it_begins_and_resumed_by_the_next_agent(tmp_path):
    assert Ended(tmp_path).turns() == []
    # GIVEN an agent that was killed when it had noted it
    after = Ended(tmp_path)
    after.turn()
    (wanted,) = [after._resolved(one) for one in after._orders.captures]
    # THEN the next one begins no other
    assert wanted.resumed
    assert (tmp_path / "begun").read_text().split() == ["c-1"]


def test_a_capture_that_cannot_be_noted_is_refused_and_not_begun_when_it_could_be(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        end = Ended(disk.path)
        disk.fill()
        # WHEN it is wanted while the disk is full
        reported = end.turns(3)
        # THEN that is reported once, and it does not begin
        assert reported == [("refused", "cannot record on node-b that it begins: No space left on device")]
        assert end.agent.wanted == []
        # AND not later, either: its order was answered
        disk.empty()
        assert (end.turns(3), end.agent.wanted) == ([], [])


def test_the_end_of_a_capture_is_reported_until_its_order_is_withdrawn(tmp_path, now_s):
    end = Ended(tmp_path)
    end.agent.due = [Report(CaptureResult("c-1", 3, "failed", "busy"))]
    assert end.turns() == [("failed", "busy")]
    # GIVEN that it is wanted still: whoever wants it has not heard
    assert end.turns(3) == []
    now_s[0] += shipping.REPORT_AGAIN_S + 0.1
    assert end.turns(3) == [("failed", "busy")]
    # WHEN the controller knows THEN it is not reported again, unless it was lost after all
    end.orders((replace(WANTED, heard=True),))
    now_s[0] += shipping.REPORT_AGAIN_S + 0.1
    assert end.turns(3) == []
    end.orders((WANTED,))
    assert end.turns(3) == [("failed", "busy")]
    # WHEN it is wanted no more
    end.orders(())
    now_s[0] += shipping.REPORT_AGAIN_S + 0.1
    assert end.turns(3) == []


def test_what_is_to_be_in_force_is_passed_on_as_long_as_it_stands(tmp_path):
    # GIVEN a host that tells how the groups stand that have ranks on it
    end, setting = Ended(tmp_path), {"ranks-0.abcd": Setting(3)}
    end._outbox.clear()
    end.turn()
    assert end._outbox.pop().switches == (group((0, 1)),)
    # WHEN one gets a setting THEN its ranks get a request, but not from an earlier controller
    end.orders((), setting, epoch=2)
    end.orders((), {"ranks-0.abcd": Setting(1)}, epoch=1)
    end.turn()
    assert end.agent.in_force == [setting]
    # AND no longer once no request is needed
    end.orders((), epoch=2)
    end.turn()
    assert end.agent.in_force == [setting]


def test_nothing_is_begun_before_it_is_known_which_ranks_are_there(tmp_path):
    # GIVEN an agent that has just been started, and has read no ring
    end = Ended(tmp_path)
    end._has_read = False
    end.turns()
    assert end.agent.wanted == []
    # WHEN it has THEN what is wanted is begun
    end._has_read = True
    end.turns()
    assert end.agent.wanted == ["c-1"]
