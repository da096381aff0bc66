"""Windows from what agents send."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent.reading import RankRings
from sftriage.controller.agents import WindowAssembly, peers_of
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import StageSchema, Window
from sftriage.trainer.monitor import Monitor
from sftriage.verdict.accounting import known_medians
from sftriage.windows.gather import Shape
from sftriage.windows.logs import StepLogs, kept_steps
from sftriage.windows.rings import RankLocation
from tests.unit.agent.test_agent import train
from tests.unit.fleet.shipments import rows

SHAPE = Shape(window_steps=4, stride_steps=4, warmup_steps=0)
of_two = partial(rows, (0, 1), world_size=2)


def test_windows_come_out_once():
    gathering = WindowAssembly(SHAPE)
    assert gathering.add([of_two(count=0)]) == []
    assert [window.first_step for window in gathering.add([of_two(count=6)])] == [0]
    assert gathering.add([]) == []
    (window,) = gathering.add([of_two(6, 2)])
    assert window.first_step == 4
    assert sorted(gathering.spans(window)) == [4, 5, 6, 7]


def test_ranks_of_two_hosts_are_in_the_same_windows_however_much_comes_at_once():
    # WHEN the rows of a rank on each of two hosts come at once, for many windows
    sent = [
        replace(rows((rank,), 0, 40, world_size=2), ranks={rank: RankLocation("ab"[rank], f"pp{rank}")})
        for rank in (0, 1)
    ]
    windows = WindowAssembly(SHAPE).add(sent)
    # THEN no window goes out without one of them
    assert [window.first_step for window in windows] == list(range(0, 40, 4))
    assert all(np.isfinite(window.durations_NRS).all() for window in windows)
    assert (windows[-1].hosts, windows[-1].cohorts) == (("a", "b"), ("pp0", "pp1"))


def test_a_generation_that_another_one_has_followed_is_over():
    gathering = WindowAssembly(SHAPE)
    assert gathering.add([of_two(count=3)]) == []
    # GIVEN the job was started again, and a rank of the generation before still takes steps
    assert gathering.add([of_two(count=3, generation=1)]) == []
    # THEN those make no windows
    assert gathering.add([of_two(3, 8)]) == []
    assert [(w.attempt, w.first_step) for w in gathering.add([of_two(3, 1, generation=1)])] == [(1, 0)]


def test_steps_that_are_held_no_longer_come_from_the_logs(tmp_path):
    # GIVEN a job whose rings were read for many windows after some steps
    for part in ("rings", "steps"):
        (tmp_path / part).mkdir()
    logs = StepLogs(tmp_path / "steps")
    gathering = WindowAssembly(SHAPE, lambda *where: kept_steps(logs, *where))
    with ExitStack() as stack:
        ranks = [Monitor(("data",), rank=rank, world_size=2, rings=tmp_path / "rings") for rank in (0, 1)]
        read = RankRings(tmp_path / "rings", tmp_path / "steps")
        for one in (*ranks, read):
            stack.callback(one.close)
        for _ in range(30):
            train(*ranks, steps=4)
            gathering.add(read.rows())
        # WHEN these are asked for
        window = gathering.steps(0, 10, 21)
        # THEN they are there, of all ranks, and just these
        assert (window.first_step, window.last_step, window.durations_NRS.shape[:2]) == (10, 21, (12, 2))
        assert np.isfinite(window.durations_NRS).all()
        # AND steps that nobody took, or of a generation that is not there, are not
        assert gathering.steps(0, 500, 510) is None
        assert gathering.steps(3, 10, 21) is None


def test_while_a_capture_goes_on_windows_are_held_that_have_gone_out(monkeypatch):
    # GIVEN a job of which nothing is on disk, and a capture that goes on
    gathering = WindowAssembly(SHAPE)

    def go_on(first_step, hold):
        for first in range(first_step, first_step + 40, 4):
            gathering.add([of_two(first, 4)], hold=hold)

    go_on(0, hold=True)
    # WHEN steps of it are asked for that are in no window to come THEN they are there, of all ranks, and just these
    window = gathering.steps(0, 9, 10)
    assert (window.first_step, window.last_step, window.durations_NRS.shape[:2]) == (9, 10, (2, 2))
    assert np.isfinite(window.durations_NRS).all()
    assert gathering.steps(3, 9, 10) is None
    # WHEN there is no room for all of them THEN the newest are held
    monkeypatch.setattr("sftriage.controller.agents.HELD_BYTES", 3 * window.durations_NRS.nbytes * 2)
    go_on(40, hold=True)
    assert gathering.steps(0, 9, 10) is None
    assert gathering.steps(0, 73, 74) is not None
    # WHEN no capture goes on any longer THEN none are
    go_on(80, hold=False)
    assert gathering.steps(0, 113, 114) is None


@pytest.mark.parametrize("unlike", [{"world_size": 8}, {"schema": StageSchema.closed(("data",), ())}])
def test_a_host_whose_ranks_record_other_stages_counts_as_missing(unlike, caplog):
    # GIVEN two hosts that do not agree on what a step is WHEN their steps are put together
    gathering = WindowAssembly(SHAPE)
    sent = [rows((0,), 0, 4, world_size=2), replace(rows((1,), 0, 4, world_size=2), **unlike)]
    (window,) = [*gathering.add(sent), *gathering.add([], ended=True)]
    # THEN the job is judged without the second one's, and that is logged once
    assert np.isfinite(window.durations_NRS[:, 0]).all()
    assert np.isnan(window.durations_NRS[:, 1]).all()
    (logged,) = caplog.records
    assert logged.message == "ranks (1,) record other stages than the others; they count as missing"


def test_a_rank_that_nothing_is_heard_of_is_waited_for_no_longer_until_something_is():
    # GIVEN ranks of two hosts, one of which is not heard of after step 1
    gathering = WindowAssembly(SHAPE)
    assert gathering.add([rows((0, 1), 0, 5, agent="a"), rows((2, 3), 0, 2, agent="b")]) == []
    # WHEN it is given up
    (window,) = gathering.add([rows((0, 1), 5, 1, agent="a"), rows((2, 3), 0, 0, agent="b", away=(2, 3))])
    # THEN the window goes out without what it has not told of
    assert np.isfinite(window.durations_NRS[:, :2]).all()
    assert np.isfinite(window.durations_NRS[:2, 2:]).all()
    assert np.isnan(window.durations_NRS[2:, 2:]).all()
    # AND once it tells of steps again, it is waited for again
    assert gathering.add([rows((2, 3), 2, 5, agent="b"), rows((0, 1), 6, 3, agent="a")]) == []
    (window,) = gathering.add([rows((2, 3), 7, 1, agent="b")])
    assert (window.first_step, np.isfinite(window.durations_NRS).all()) == (4, True)


SCHEMA = StageSchema(("data", "backward", "other"), ("backward",))


def window(local_R, **refined):
    """Ten steps in which each rank takes so long by itself, and waits for the others in backward."""
    local_R = np.array(local_R)
    durations_NRS = np.zeros((10, len(local_R), 3))
    durations_NRS[:, :, 0] = local_R
    durations_NRS[:, :, 1] = 1.0 - local_R
    return Window(SCHEMA, 0, durations_NRS, **refined)


def suspecting(*ranks):
    suspects = tuple(Suspect("rank", (rank,), "data", 0.1, 0.1, 1.0, rank=rank) for rank in ranks)
    return Verdict(0, 9, "suspect", (), suspects, 1.0, {}, {}, {})


@pytest.mark.parametrize(
    ("suspects", "local_R", "refined", "peers"),
    [
        # The most typical comes first, the first suspect never, and others last.
        ((0, 5), [0.5, 0.10, 0.14, 0.09, 0.11, 0.3, 0.101], {}, (6, 1, 4, 3, 2, 5)),
        # Whether it is healthy enough is for the policy to say: see tests/unit/policy.
        ((0, 1), [0.5, 0.1], {}, (1,)),
        # Only ranks of the suspect's cohort do the same work.
        ((0,), [0.5, 0.10, 0.9, 0.9], {"cohorts": ("a", "a", "b", "b")}, (1,)),
        # A rank without steps is no peer.
        ((0,), [0.5, np.nan, 0.1], {}, (2,)),
        # What backward took by itself counts where it is known.
        ((0,), [0.5, 0.1, 0.1, 0.1], {"ready_NR": np.tile([0.0, 0.0, 0.4, 0.1], (10, 1))}, (3, 1, 2)),
        # Without a suspect there is nothing to compare.
        ((), [0.1, 0.1], {}, ()),
    ],
)
def test_peers_are_those_that_do_the_same_work(suspects, local_R, refined, peers):
    assert peers_of(suspecting(*suspects), window(local_R, **refined)) == peers


def test_without_a_window_the_others_are_taken_in_their_order():
    assert peers_of(suspecting(1), None, [3, 1, 0]) == (0, 3)


VALUES = st.floats(0, 1e3) | st.just(float("nan"))


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_the_median_of_what_is_known_is_numpys(rows):
    values = np.array(rows)
    known = ~np.isnan(values).all(axis=1)
    found = known_medians(values)
    np.testing.assert_allclose(found[known], np.nanmedian(values[known], axis=1))
    assert np.isnan(found[~known]).all()


@pytest.mark.parametrize("warmup_steps", [0, 2, 3])
def test_rows_that_are_in_no_window_to_come_are_settled(warmup_steps):
    # GIVEN windows of four steps that follow on one another, and rows of two steps each
    gathering, windows = WindowAssembly(Shape(4, 4, warmup_steps)), []
    for position in range(1, 8):
        windows += gathering.add([rows((0, 1, 2, 3), 2 * (position - 1), 2, agent="a", position=position)])
    # THEN what another controller would pass over as the job's warm-up is not settled
    assert [gathering.settled(window)["a"] for window in windows[:2]] == [2, 4]
