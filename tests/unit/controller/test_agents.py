"""Windows out of agents' rows, desired captures, and what an earlier controller left."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.agent.reading import RankRings
from sftriage.controller.agents import (
    EXPIRES_S,
    TRIES,
    Corroboration,
    DesiredCaptures,
    WindowAssembly,
    peers_of,
    resume_state,
)
from sftriage.controller.controller import Controller
from sftriage.model.captures import CaptureRequest, CaptureResult, ManualRequest, Reproduced
from sftriage.model.events import CauseFound
from sftriage.model.hangs import RankEvidence
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import LinkUse, StageSchema, Window
from sftriage.runs.journal import Journal, read_journal
from sftriage.trainer.monitor import Monitor
from sftriage.verdict.accounting import known_medians
from sftriage.windows.gather import Shape
from sftriage.windows.logs import StepLogs, kept_steps
from tests.scenario import request_of
from tests.unit.agent.test_agent import WHY, train
from tests.unit.controller.test_controller import window
from tests.unit.fleet.shipments import info, rows
from tests.unit.policy.making import job_at, make_policy

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


def test_ranks_of_two_hosts_share_windows_however_many_rows_arrive_at_once():
    # WHEN the rows of a rank on each of two hosts come at once, for many windows
    places = {rank: replace(info(rank), host=host, cohort=f"pp{rank}") for rank, host in enumerate("ab")}
    sent = [replace(rows((rank,), 0, 40, world_size=2), ranks={rank: ring}) for rank, ring in places.items()]
    windows = WindowAssembly(SHAPE).add(sent)
    # THEN no window goes out without one of them
    assert [window.first_step for window in windows] == list(range(0, 40, 4))
    assert all(np.isfinite(window.durations_NRS).all() for window in windows)
    assert (windows[-1].hosts, windows[-1].cohorts) == (("a", "b"), ("pp0", "pp1"))


def test_a_window_has_what_the_hosts_sent_each_other_in_its_steps_once():
    # GIVEN rows of two hosts with what they sent: to each other, to a host that is none of the job's, and by RDMA
    begin_ns, second_ns = int(of_two(count=1).steps.start_ns_B[0]), 10**9
    use = LinkUse("a", "10.0.0.1", "10.0.0.2", begin_ns, begin_ns + second_ns, 1000, 0.5)
    back = replace(use, host="b", address="10.0.0.2", peer="10.0.0.1")
    port, elsewhere = replace(use, address="mlx5_0/1", peer=""), replace(use, peer="10.9.9.9")
    late = replace(use, begin_ns=10**18, end_ns=10**18 + second_ns)
    sent = [replace(of_two(count=2), links=(use, port, elsewhere, late)), replace(of_two(2, 2), links=(use, back))]
    # WHEN they make a window THEN it has them once, by the names of the hosts, as far as they are of the job
    (window,) = WindowAssembly(SHAPE).add(sent)
    assert window.links == (replace(use, peer="b"), port, replace(back, peer="a"))


def test_a_generation_ends_when_the_next_begins():
    gathering = WindowAssembly(SHAPE)
    assert gathering.add([of_two(count=3)]) == []
    # GIVEN the job was started again, and a rank of the generation before still takes steps
    assert gathering.add([of_two(count=3, generation=1)]) == []
    # THEN those make no windows
    assert gathering.add([of_two(3, 8)]) == []
    assert [(w.attempt, w.first_step) for w in gathering.add([of_two(3, 1, generation=1)])] == [(1, 0)]


def test_steps_no_longer_in_memory_come_from_the_logs(tmp_path):
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
        # WHEN these steps are requested
        window = gathering.steps(0, 10, 21)
        # THEN they are there, of all ranks, and just these
        assert (window.first_step, window.last_step, window.durations_NRS.shape[:2]) == (10, 21, (12, 2))
        assert np.isfinite(window.durations_NRS).all()
        # AND steps not taken, or of an unknown generation, are not
        assert gathering.steps(0, 500, 510) is None
        assert gathering.steps(3, 10, 21) is None


def test_windows_stay_in_memory_during_a_capture(monkeypatch):
    # GIVEN a job of which nothing is on disk, and a capture that goes on
    gathering = WindowAssembly(SHAPE)

    def go_on(first_step, hold):
        for first in range(first_step, first_step + 40, 4):
            gathering.add([of_two(first, 4)], hold=hold)

    go_on(0, hold=True)
    # WHEN its steps are requested that no later window needs THEN they are there, of all ranks, and just these
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
    assert logged.message == "ranks (1,) record different stages than the others and count as missing"


def test_windows_do_not_wait_for_a_silent_rank_until_it_reports_again():
    # GIVEN ranks of two hosts, one of which is not heard of after step 1
    gathering = WindowAssembly(SHAPE)
    assert gathering.add([rows((0, 1), 0, 5, agent="a"), rows((2, 3), 0, 2, agent="b")]) == []
    # WHEN it is given up
    (window,) = gathering.add([rows((0, 1), 5, 1, agent="a"), rows((2, 3), 0, 0, agent="b", away=(2, 3))])
    # THEN the window is complete without its missing steps
    assert np.isfinite(window.durations_NRS[:, :2]).all()
    assert np.isfinite(window.durations_NRS[:2, 2:]).all()
    assert np.isnan(window.durations_NRS[2:, 2:]).all()
    # AND once it reports steps again, windows wait for it again
    assert gathering.add([rows((2, 3), 2, 5, agent="b"), rows((0, 1), 6, 3, agent="a")]) == []
    (window,) = gathering.add([rows((2, 3), 7, 1, agent="b")])
    assert (window.first_step, np.isfinite(window.durations_NRS).all()) == (4, True)


SCHEMA = StageSchema(("data", "backward", "other"), ("backward",))


def slow_window(local_R, **refined):
    """Ten steps in which each rank takes this long by itself, and waits for the others in backward."""
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
def test_peers_do_the_same_work(suspects, local_R, refined, peers):
    assert peers_of(suspecting(*suspects), slow_window(local_R, **refined)) == peers


def test_without_a_window_peers_are_in_rank_order():
    assert peers_of(suspecting(1), None, [3, 1, 0]) == (0, 3)


class Answering:
    """A fleet whose ranks report facts, each query after one more turn; `silent` ones do not."""

    def __init__(self, silent=()):
        self.queries, self.silent, self._ready = [], silent, False

    def hang_evidence(self, token, detail):
        self._ready = not self._ready
        if self._ready:
            self.queries.append((token, detail))
            return None
        facts = {rank: {"num_workers": 1 if rank == 0 else 4} for rank in detail if rank not in self.silent}
        return tuple(RankEvidence(rank, "node-a", 1, facts=facts.get(rank, {})) for rank in (*detail, 99))


def compared(fleet, corroboration, verdict, windows=4):
    """What is found while windows with this verdict follow each other, in each turn."""
    found = []
    for first in range(windows):
        corroboration.want(replace(verdict, first_step=first), slow_window([0.5, 0.1, 0.1, 0.1]), of_undecided=False)
        found += filter(None, [corroboration.compare(fleet, 1.0)])
    return found


def test_a_suspect_is_compared_once_in_an_attempt_and_a_newer_window_does_not_restart_that():
    fleet, corroboration = Answering(), Corroboration()
    (found,) = compared(fleet, corroboration, suspecting(0))
    assert fleet.queries == [("facts-0-0", (0, 1, 2, 3))]
    assert (found.ranks, found.peers, found.differences[0].name) == ((0,), (1, 2, 3), "num_workers")
    assert corroboration.remarks_on(0) == ("1 loader worker, the other ranks have 4",)
    # AND once more in the next attempt, and another suspect, which is like its peers but one
    assert len(compared(fleet, corroboration, replace(suspecting(0), attempt=1))) == 1
    assert compared(fleet, corroboration, suspecting(1)) == []
    assert len(fleet.queries) == 3


@pytest.mark.parametrize("pattern", ["one-off", "chronic"])
@pytest.mark.parametrize("label", ["suspect", "needs_evidence"])
def test_what_has_passed_or_is_not_named_is_not_compared(label, pattern):
    fleet, verdict = Answering(), suspecting(0)
    verdict = replace(verdict, label=label, suspects=(replace(verdict.suspects[0], pattern=pattern),))
    compared(fleet, Corroboration(), verdict)
    assert bool(fleet.queries) == (label == "suspect" and pattern == "chronic")


@pytest.mark.parametrize(("silent", "n_found", "queries"), [((3,), 1, 1), ((0,), 0, TRIES), ((1, 2, 3), 0, TRIES)])
def test_ranks_are_asked_again_a_few_times_if_too_few_answer(silent, n_found, queries):
    fleet = Answering(silent)
    assert len(compared(fleet, Corroboration(), suspecting(0), windows=20)) == n_found
    assert len(fleet.queries) == queries


VALUES = st.floats(0, 1e3) | st.just(float("nan"))


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_the_median_of_known_values_equals_numpys(rows):
    values = np.array(rows)
    known = ~np.isnan(values).all(axis=1)
    found = known_medians(values)
    np.testing.assert_allclose(found[known], np.nanmedian(values[known], axis=1))
    assert np.isnan(found[~known]).all()


@pytest.mark.parametrize("warmup_steps", [0, 2, 3])
def test_rows_that_no_later_window_needs_are_settled(warmup_steps):
    # GIVEN windows of four steps that follow on one another, and rows of two steps each
    gathering, windows = WindowAssembly(Shape(4, 4, warmup_steps)), []
    for position in range(1, 8):
        windows += gathering.add([rows((0, 1, 2, 3), 2 * (position - 1), 2, agent="a", position=position)])
    # THEN what another controller would pass over as the job's warm-up is not settled
    assert [gathering.settled(window)["a"] for window in windows[:2]] == [2, 4]


def result(capture_id: str, state: str, rank: int = 2, detail: str = "") -> CaptureResult:
    return CaptureResult(capture_id, rank, state, detail)


def wants(*requests: CaptureRequest) -> DesiredCaptures:
    made = DesiredCaptures()
    made.add(requests, {one.capture_id: WHY for one in requests}, 3, 1000.0)
    return made


TWO_PAIRS = request_of("s1", 1), request_of("s2", 2), *(request_of(f"c{n}", 4 + n, "control") for n in (1, 2))


def ids(of: DesiredCaptures) -> list[str]:
    return [one.request.capture_id for one in of.wanted(1000.0)]


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ([("s1", "refused")], ["s2", "c1", "c2"]),
        ([("s1", "refused"), ("s2", "refused")], []),
        ([("s1", "failed"), ("s2", "expired")], []),
        # One that was captured is enough, whichever ends first.
        ([("s1", "stored"), ("s2", "refused")], ["c1", "c2"]),
        ([("s1", "refused"), ("s2", "stored")], ["c1", "c2"]),
        # A control that has ended is left alone; what becomes of one says nothing of the others.
        ([("c1", "stored"), ("s1", "refused"), ("s2", "refused")], []),
        ([("c1", "refused"), ("s1", "stored")], ["s2", "c2"]),
        # Another decision's captures.
        ([("x", "refused")], ["s1", "s2", "c1", "c2"]),
    ],
)
def test_a_control_is_wanted_while_a_suspect_may_yield_a_trace(ends, wanted):
    made = wants(*TWO_PAIRS)
    for end in ends:
        made.ended(result(*end))
    assert ids(made) == wanted


def test_a_cancelled_capture_has_the_reason_and_others_keep_their_result():
    made = wants(request_of("s1", 2), request_of("c1", 4, "control"))
    refused = result("s1", "refused", detail="a profiler is already running in this process")
    assert made.ended(refused)[1] == refused
    wanted, ended = made.ended(result("c1", "failed", 4, "cancelled"))
    assert ended.detail == "cancelled: nothing to compare it with: the capture of rank 2 was refused"
    # AND what was wanted is known still, with why it exists and of which generation it was to be
    assert (wanted.request.capture_id, wanted.trigger, wanted.generation) == ("c1", WHY, 3)


def test_a_cancelled_capture_with_a_trace_keeps_its_result():
    made = wants(request_of("s1", 2), request_of("c1", 4, "control"))
    made.ended(result("s1", "failed"))
    stored = result("c1", "stored", 4)
    assert made.ended(stored)[1] == stored


def test_the_deadline_to_begin_is_sent_as_an_age():
    made = wants(request_of("s1", 2))
    assert [made.wanted(now_s)[0].expires_s for now_s in (1000.0, 1059.0, 1061.0)] == [EXPIRES_S, 1.0, -1.0]


def test_captures_of_an_earlier_process_are_marked_as_resumed():
    made = DesiredCaptures()
    made.resume(request_of("s1", 2), WHY, 1)
    (one,) = made.wanted(5000.0)
    assert (one.request, one.resumed, one.expires_s) == (request_of("s1", 2), True, None)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["s1", "s2", "c1", "c2"]), st.sampled_from(["stored", "failed", "refused"]))))
def test_wanted_captures_are_requested_and_unended(ends):
    made = wants(*TWO_PAIRS)
    for capture_id, state in ends:
        made.ended(result(capture_id, state))
        assert capture_id not in ids(made)
    assert set(ids(made)) <= {"s1", "s2", "c1", "c2"}


POLICY = make_policy(
    {"name": "slow", "match": {"gain": ">= 5%"}, "capture": {"steps": 3}, "cooldown": "0s"},
    detection={"window_steps": 20, "stride_steps": 20},
)


def controller(directory, left=None) -> Controller:
    directory.mkdir(exist_ok=True)
    return Controller(POLICY, Journal(directory / "decisions.jsonl"), directory / "state.json", left=left)


def test_a_new_controller_knows_decisions_and_running_captures(tmp_path):
    # GIVEN a killed controller that has requested a capture for a window, and another for a person
    first = controller(tmp_path)
    slow = window(0, late_s=0.02)
    (request,) = first.take(slow, 100.0).decision.requests
    manual = ManualRequest("a-1", (1,), "me", "why not")
    (wanted,) = first.decide_request(manual, job_at(30), 101.0).requests
    # WHEN the journal is read
    left = resume_state(read_journal(tmp_path / "decisions.jsonl"))
    assert (left.n_windows, left.n_stored) == (1, 0)
    # THEN both captures are known with their requests and why they exist
    assert [known for known, _ in left.unended.values()] == [request, wanted]
    assert left.unended[request.capture_id][1] == first.trigger_of(request.capture_id)
    assert (left.judged, left.request_ids) == ({0: (slow.first_step, slow.last_step)}, {"a-1"})
    # AND the next controller decides neither again, knows why a capture exists, and lets it end
    second = controller(tmp_path, left)
    assert second.decided(slow)
    assert not second.decided(window(20))
    assert second.answered(manual)
    assert second.trigger_of(request.capture_id).rule == "slow"
    second.changed(CaptureResult(request.capture_id, 2, "running"), 105.0)
    assert request.capture_id in resume_state(read_journal(tmp_path / "decisions.jsonl")).unended
    second.changed(CaptureResult(request.capture_id, 2, "stored", first_step=30, last_step=32), 110.0)
    left = resume_state(read_journal(tmp_path / "decisions.jsonl"))
    assert (set(left.unended), left.n_windows, left.n_stored) == ({wanted.capture_id}, 1, 1)


def test_the_next_controller_requests_a_follow_up_once(tmp_path):
    # GIVEN a capture with a known open question, whose controller was killed before it counted as ended
    first = controller(tmp_path)
    (request,) = first.take(window(0, late_s=0.02), 100.0).decision.requests
    assert (request.profiler, first.trigger_of(request.capture_id).chosen) == ("stacks", "host_stage")
    found = CauseFound(101.0, request.capture_id, 2, "blocked", False, "It waits.", left_open="operators")
    first.explained(found)
    journal = tmp_path / "decisions.jsonl"
    second = controller(tmp_path, resume_state(read_journal(journal)))
    # WHEN the next one hears of it again
    stored = CaptureResult(request.capture_id, 2, "stored", first_step=30, last_step=32)
    second.explained(found)
    second.changed(stored, 102.0, Reproduced("yes", 3, 3, 0.02, 0.02))
    # THEN it is followed up by the next window of the suspect
    (follow_up,) = (decision := second.take(window(40, late_s=0.02), 103.0).decision).requests
    assert (decision.reason, follow_up.profiler) == ("follow_up", "torch")
    assert second.trigger_of(follow_up.capture_id).follows == request.capture_id
    # AND neither by this one again, nor by the one after it
    third = controller(tmp_path, resume_state(read_journal(journal)))
    assert second.take(window(60, late_s=0.02), 104.0).decision.outcome == "throttle"
    third.changed(replace(stored, capture_id=follow_up.capture_id), 105.0, Reproduced("yes", 3, 3, 0.02, 0.02))
    assert third.take(window(60, late_s=0.02), 106.0).decision.reason == "already_captured"


def test_the_next_controller_continues_the_losses(tmp_path):
    # GIVEN one controller that judges all windows of a slow rank, and others that take over after each
    whole, journal = controller(tmp_path / "whole"), tmp_path / "taken" / "decisions.jsonl"
    for number in range(6):
        slow = window(20 * number, late_s=0.02)
        whole.take(slow, 100.0)
        taken = controller(tmp_path / "taken", resume_state(read_journal(journal)))
        for before in range(number):
            taken.learn(window(20 * before, late_s=0.02))
        taken.take(slow, 100.0)
    # THEN the sums are the same, and so is that of whoever reads the journal
    assert whole.losses.rank_s > 0.0
    assert taken.losses == whole.losses == resume_state(read_journal(journal)).losses


def test_learning_records_nothing_and_leads_to_the_same_next_verdict(tmp_path):
    # GIVEN one controller that saw a healthy job become slow on every rank, and one that took over between the two
    healthy = [window(20 * number) for number in range(4)]
    slower = replace(window(80), durations_NRS=window(80).durations_NRS * (3.0, 1.0, 1.0, 1.0))
    whole, before = controller(tmp_path / "whole"), controller(tmp_path / "taken")
    for one in healthy:
        whole.take(one, 100.0)
        before.take(one, 100.0)
    journal = tmp_path / "taken" / "decisions.jsonl"
    written = journal.read_bytes()
    after = controller(tmp_path / "taken", resume_state(read_journal(journal)))
    # WHEN it learns from what was decided, some of it twice
    for one in (*healthy, *healthy[2:]):
        after.learn(one)
    # THEN nothing goes on record by that
    assert journal.read_bytes() == written
    # AND it judges what comes next as the other one does
    verdict = after.take(slower, 101.0).verdict
    assert verdict == whole.take(slower, 101.0).verdict
    # (which needs the past: it is every rank that is slow)
    assert (verdict.label, verdict.suspects[0].scope) == ("suspect", "all")
