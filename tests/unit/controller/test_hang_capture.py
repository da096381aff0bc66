"""What becomes of a capture of a whole job that hangs: gathered in time or not, with a cause or without one."""

import msgspec
import pytest

from sftriage.controller import hang_capture
from sftriage.controller.controller import Controller
from sftriage.controller.hang_capture import HangCaptures, HangFound, cause_of
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest, CaptureResult, Trigger
from sftriage.model.hangs import HANG_NAME, Blocked, Call, GroupCalls, Hang, HangEvidence, RankEvidence, SourceLine
from sftriage.model.windows import JobStatus, RankStatus, StageSchema
from sftriage.runs.journal import Journal
from sftriage.traces.store import LocalStore
from sftriage.windows.rings import status_of
from tests.unit.controller.test_controller import S, Since, looks
from tests.unit.policy.making import make_policy

REQUEST = CaptureRequest("w9-9-r1-hang-1", 1, "stacks", 1, 0, 10.0, 2**20, {"whole_job": True, "detail": [0, 1, 2]})
WHY = Trigger(9, 9, "stalled", "rank", (1,), "data", 60.0, 1.0, 1.0, "default", "ab" * 32, "hang")
LINE = SourceLine("lookup", "/job/train.py", 78, "with second: pass", own=True)
CALLED = SourceLine("validate", "/job/train.py", 52, "dist.all_gather(outs, mine)", own=True)


def rank(number: int, **about) -> RankEvidence:
    return RankEvidence(number, f"node-{number}", 100 + number, step=9, **{"answered": True, **about})


def job(*steps: int, attempt: int = 0) -> JobStatus:
    ranks = [RankStatus(at, "h", "data", 0, step, 0, step, False, True) for at, step in enumerate(steps)]
    return status_of(StageSchema(("data",)), 4, tuple(ranks), attempt)


class Agents:
    """The agents of a job: the state of its ranks, and their answers, of which each poll takes one."""

    def __init__(self, *answers: tuple[RankEvidence, ...] | None, job: JobStatus | None = None) -> None:
        self._answers, self._job = iter(answers), job
        self.polls: list[tuple[str, tuple[int, ...]]] = []

    def statuses(self) -> JobStatus | None:
        return self._job

    def hang_evidence(self, token: str, detail: tuple[int, ...]) -> tuple[RankEvidence, ...] | None:
        self.polls.append((token, detail))
        return next(self._answers, None)


def polled(agents, *times_s, resumed=False):
    captures = HangCaptures()
    captures.add(REQUEST, 0, 9, 100.0, None if resumed else job(9, 9, 9), resumed=resumed)
    return captures, [found for now_s in times_s for found in captures.poll(agents, now_s, 5000.0 + now_s)]


def test_a_capture_is_polled_until_all_hosts_have_answered():
    # GIVEN agents that need three turns
    ranks = tuple(rank(at) for at in range(3))
    agents = Agents(None, None, ranks[::-1], job=job(9, 9, 9))
    captures, (found,) = polled(agents, 100.0, 100.25, 102.0, 102.25)
    # THEN what they say is there once, with the job's own number of ranks, and it is polled no longer
    assert isinstance(found, HangFound)
    about = found.evidence
    assert (about.ranks, about.world_size, about.step, about.time_s, found.took_s) == (ranks, 4, 9, 5102.0, 2.0)
    assert agents.polls == [(REQUEST.capture_id, (0, 1, 2))] * 3
    # AND it is under way until it is stored
    assert captures.unended == (REQUEST,)
    assert (captures.ended("another"), captures.ended(REQUEST.capture_id), captures.unended) == (None, 0, ())


@pytest.mark.parametrize(
    ("agents", "resumed", "why"),
    [
        (Agents(job=job(9, 9)), False, "its hosts did not report within 10 s"),
        (Agents((), job=None), False, "no host of the job has a rank of it any more"),
        (Agents((rank(0),), job=job(0, 0, attempt=1)), False, "the job started again before its ranks had answered"),
        # A controller that takes over captures what still hangs
        (Agents((rank(0),), job=job(10, 11)), True, "sftriage ended during the capture, and the job no longer hangs"),
        (
            Agents((rank(0),), job=job(9, 9, attempt=1)),
            True,
            "sftriage ended during the capture, and the job no longer",
        ),
        (Agents((rank(0),), job=None), True, "its hosts did not report within 10 s"),
        (Agents((rank(0),), job=job(10, 9)), True, ""),
    ],
)
def test_a_capture_fails_with_its_reason(agents, resumed, why):
    _, found = polled(agents, 100.0, 105.0, 110.0, 115.0, resumed=resumed)
    if not why:
        assert [type(one) for one in found] == [HangFound]
        return
    (result,) = found
    assert isinstance(result, CaptureResult)
    assert (result.state, result.rank, result.detail[: len(why)]) == ("failed", 1, why)


@pytest.mark.parametrize(
    ("hang", "line"),
    [
        (Hang("absent", ranks=(1,), blocked=(Blocked(1, "n", "lock", LINE),)), 78),
        (Hang("absent", ranks=(1,), blocked=(Blocked(1, "n", "lock"),)), None),
        (Hang("different_collective", ranks=(1,), call=Call("all_gather", frames=(CALLED,))), 52),
        (Hang("skipped", ranks=(1,), blocked=(Blocked(1, "n", "recv", LINE),)), 78),
        (Hang("unknown", call=Call("all_gather", frames=(CALLED,)), reason="no rank answers"), None),
    ],
)
def test_a_hang_is_the_cause_of_its_capture(hang, line):
    cause = cause_of(hang)
    assert (cause.code, cause.sure) == (hang.kind, hang.kind != "unknown")
    assert (None if cause.place is None else cause.place.line) == line
    assert cause.sentence


def test_no_text_of_a_job_breaks_a_manifest():
    wild = SourceLine("f" * 300, "/job/\x1b[2J\udcff.py", 7, "x" * 5000)
    cause = cause_of(Hang("absent", ranks=(1,), blocked=(Blocked(1, "n", "sleep", wild),)))
    assert cause.place is not None
    assert (len(cause.place.function), len(cause.place.source), cause.place.file) == (100, 2000, "/job/?[2J?.py")


def test_evidence_that_shows_nothing_has_an_unknown_cause(monkeypatch):
    # GIVEN evidence that cannot be read THEN it is kept
    def raises(evidence):
        raise KeyError(evidence.step)

    monkeypatch.setattr(hang_capture, "hang_of", raises)
    found = HangFound.of(REQUEST, HangEvidence(5000.0, 0, 9, 2, (rank(0), rank(1))), 1.0)
    assert (found.cause.code, found.cause.sure, len(found.evidence.ranks)) == ("unknown", False, 2)
    assert (found.event(1.0).rank, found.event(1.0).place) == (1, None)


@pytest.mark.parametrize(("alive", "kind"), [((0, 1, 2), "unknown"), ((0, 1), "dead"), ((), "dead")])
def test_a_rank_that_ends_after_the_stall_is_not_its_cause(alive, kind):
    # GIVEN a rank that has died, and was alive when the job stalled, or was not, or that is not known
    ranks = (rank(0), rank(1), rank(2, answered=False, alive=False, exit_status=-9, state="Z"))
    found = HangFound.of(REQUEST, HangEvidence(5000.0, 0, 9, 3, ranks), 1.0, alive)
    assert found.evidence.hang.kind == found.cause.code == kind
    assert kind == "dead" or found.evidence.hang.reason == "rank 2 ended only after it had stalled"


@pytest.fixture
def found():
    """A lock that rank 2 waits for, in a capture that is named by rank 1."""
    hang = Hang("absent", ranks=(2,), blocked=(Blocked(2, "node-2", "lock", LINE),))
    evidence = HangEvidence(5000.0, 0, 9, 3, tuple(rank(at, answered=at != 2) for at in range(3)), hang)
    return HangFound(REQUEST, evidence, cause_of(hang), 2.5)


def test_a_cause_is_of_the_rank_at_fault(found):
    event = found.event(7.0)
    assert (event.time_s, event.capture_id, event.rank, event.code) == (7.0, REQUEST.capture_id, 2, "absent")
    assert (event.sure, event.place.line, event.sentence) == (True, 78, found.cause.sentence)


def test_the_evidence_is_stored_as_a_capture_with_its_cause(found, tmp_path):
    store, spool = LocalStore(tmp_path), tmp_path / "spool"
    spool.mkdir()
    report = found.put(store, spool, WHY, "resnet", "run-1")
    manifest = store.manifest(REQUEST.capture_id)
    assert (manifest.cause, manifest.trigger.label, manifest.job, manifest.run) == (
        found.cause,
        "stalled",
        "resnet",
        "run-1",
    )
    about = manifest.capture
    assert (about.rank, about.host, about.world_size, about.first_step, about.steps) == (1, "node-1", 3, 9, 1)
    assert about.detail == "2 of 3 ranks answered"
    # AND the file is the whole evidence, and nothing is left in the spool
    content = store.path(REQUEST.capture_id, HANG_NAME).read_bytes()
    assert msgspec.json.decode(content, type=HangEvidence) == found.evidence
    assert list(spool.iterdir()) == []
    # AND the report says so, also when an earlier process has stored it
    assert (report.result.state, report.result.first_step, report.stored_bytes) == ("stored", 9, len(content))
    assert found.put(store, spool, WHY, "resnet", "run-1") == report == manifest.report


def test_evidence_that_is_too_large_is_not_stored(found, tmp_path):
    (tmp_path / "spool").mkdir()
    small = HangFound(
        CaptureRequest("c", 1, "stacks", 1, 0, 10.0, 100, REQUEST.options), found.evidence, found.cause, 2.5
    )
    with pytest.raises(CaptureError, match=r"the evidence has \d+ bytes, more than 100"):
        small.put(LocalStore(tmp_path), tmp_path / "spool", WHY, "resnet", "run-1")
    assert LocalStore(tmp_path).ids() == frozenset()


HUNG = {"name": "hung", "match": {"label": "stalled"}, "capture": {"profiler": "stacks"}}


@pytest.fixture
def stepping(tmp_path):
    """A controller that captures stalls, and knows the job's pace: a step each 0.1 s, the 9th from 0.9 s on."""
    policy = make_policy(HUNG, detection={"stalled_after": "2s"})
    made = Controller(policy, Journal(tmp_path / "decisions.jsonl"), tmp_path / "state.json")
    for step in range(10):
        now_ns = int((0.1 * step + 0.01) * S)
        assert made.look(Since(("backward",) * 3, step, 0.1 * step).at(now_ns), now_ns, 100.0) is None
    return made


def test_a_stall_is_captured_on_all_ranks_also_when_nobody_is_missing(stepping):
    # WHEN all ranks stay in backward
    (judged,) = looks(stepping, Since(("backward",) * 3, 10, 1.0), 1.1, 5.0)
    # THEN the lowest rank names the one capture of all
    (request,) = judged.decision.requests
    assert (judged.verdict.reasons, request.rank, request.detail_ranks) == (("in_sync",), 0, (0, 1, 2))
    assert stepping.trigger_of(request.capture_id).ranks == (0, 1, 2)
    # AND it keeps no rank from stalling, but a change waits until it has ended
    (judged,) = looks(stepping, Since(("backward", "data", "backward"), 10, 5.0), 5.1, 9.0, now_s=104.0)
    assert (judged.decision.outcome, judged.decision.reason) == ("throttle", "rank_busy")


def test_the_stages_of_one_stall_may_change_without_another_capture(stepping):
    (judged,) = looks(stepping, Since(("backward", "data", "backward"), 10, 1.0), 1.1, 5.0)
    (request,) = judged.decision.requests
    stepping.changed(CaptureResult(request.capture_id, 1, "stored"), 103.0)
    # WHEN the same rank stays somewhere else THEN its cooldown holds, and another one is captured
    (judged,) = looks(stepping, Since(("backward", "save", "backward"), 10, 5.0), 5.1, 20.0, now_s=110.0)
    assert judged.decision.reason == "cooldown"
    (judged,) = looks(stepping, Since(("data", "backward", "backward"), 10, 20.0), 20.1, 30.0, now_s=120.0)
    assert [one.rank for one in judged.decision.requests] == [0]


def between_steps(group: str, *ops: str) -> tuple[RankEvidence, ...]:
    """Ranks that have called these in an evaluation; none: it is busy with something else."""
    found = []
    for at, op in enumerate(ops):
        calls = (Call(op, ((3,),), ("Float",), (CALLED,)),) if op else ()
        of_group = GroupCalls(group, "default_pg", ((0, 2, 1),), 1, (0,) * len(calls), (1,) * len(calls))
        found.append(rank(at, calls=calls, groups=(of_group,)))
    return tuple(found)


MISMATCH, EVALUATION = (
    between_steps("0", *["all_reduce"] * 2, "all_gather"),
    between_steps("0", "", *["all_reduce"] * 2),
)


def paused(tmp_path, evidence, seconds, stalled_after=""):
    """What is decided of ranks that wait in the next step for the first, and when evidence was gathered."""
    detection = {"stalled_after": stalled_after} if stalled_after else {}
    made = Controller(
        make_policy(HUNG, detection=detection), Journal(tmp_path / "decisions.jsonl"), tmp_path / "state.json"
    )
    for step in range(10):
        now_ns = int((0.1 * step + 0.01) * S)
        made.look(Since(("backward",) * 3, step, 0.1 * step).at(now_ns), now_ns, 100.0)
    hangs, agents, at_s = HangCaptures(), Agents(*[evidence] * 99), list[int]()
    for second in range(1, seconds):
        job, now_ns = Since((None, "backward", "backward"), 10, 1.0).at(second * S + S // 2), second * S + S // 2
        if (judged := made.look(job, now_ns, 100.0 + second)) is not None:
            return judged, second, at_s
        if (checked := hangs.check(agents, job, made.evidence_due, now_ns)) is not None:
            at_s.append(second)
            made.consider(*checked, now_ns + S // 2)
    return None, seconds, at_s


def test_a_hang_between_steps_is_reported_as_soon_as_evidence_proves_it(tmp_path):
    # GIVEN a job that is still in the way of an evaluation, while its ranks disagree on a call
    judged, second, at_s = paused(tmp_path, MISMATCH, 60)
    # THEN evidence is gathered twice, and it is a stall as soon as the second proves it
    assert (at_s, second) == ([11, 13], 14)
    assert (judged.verdict.numbers["floor_s"], judged.verdict.suspects[0].stage) == (10.0, "other")
    assert [each.of_whole_job for each in judged.decision.requests] == [True]


def test_of_a_healthy_evaluation_nothing_is_recorded(tmp_path):
    judged, _, at_s = paused(tmp_path, EVALUATION, 200)
    assert (judged, at_s) == (None, [11, 21, 41, 81, 141])
    assert not (tmp_path / "decisions.jsonl").read_text()


def test_the_time_of_a_policy_needs_no_proof(tmp_path):
    assert paused(tmp_path, MISMATCH, 60, "45s")[1] == 46


def test_no_evidence_is_gathered_beside_a_capture_or_where_none_is_due():
    # GIVEN a capture that is under way
    captures, _ = polled(agents := Agents(None, EVALUATION, job=job(9, 9, 9)), 100.0)
    assert captures.check(agents, job(9, 9, 9), True, S) is None
    assert len(agents.polls) == 1
    # WHEN it has its evidence THEN that of a pause may be gathered, anew each time
    list(captures.poll(agents, 101.0, 5101.0))
    assert captures.check(agents, job(9, 9, 9), False, 2 * S) is None
    assert captures.check(agents, None, True, 3 * S) is None
    for due, now_ns in ((True, 4 * S), (True, 5 * S), (False, 6 * S), (True, 7 * S)):
        assert captures.check(agents, job(9, 9, 9), due, now_ns) is None
    first, again, anew = agents.polls[2:]
    assert first == again
    assert first[0] != anew[0]
