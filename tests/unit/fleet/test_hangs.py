"""The evidence of all ranks of a job, put together from the answers of its hosts."""

from sftriage.fleet.hangs import UNANSWERED, HostAnswer, completed
from sftriage.model.hangs import RankEvidence
from tests.unit.fleet.shipments import status

JOB = status((0, 1, 2, 3), stage="data", stage_age_ns=3 * 10**9, alive=None)
OWNERS = {0: ("a", 10), 1: ("a", 11), 2: ("b", 12), 3: ("b", 13)}


def evidence(rank, **about):
    return RankEvidence(rank, "node-a", 10 + rank, answered=True, state="S", **about)


def test_every_rank_with_a_status_is_there_once_with_what_its_host_knows():
    # GIVEN a host that answers for one of its ranks, and one that does not answer
    answers = {"a": HostAnswer({0: evidence(0)}), "b": HostAnswer(problem=UNANSWERED)}
    found = completed(JOB, OWNERS, answers)
    # THEN the other ranks have their status, and the reason
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert found[0] == evidence(0)
    assert [one.problem for one in found[1:]] == ["its host has no evidence of it", UNANSWERED, UNANSWERED]
    for one in found[1:]:
        assert (one.pid, one.host, one.step, one.stage, one.in_stage_s) == (10 + one.rank, "node-a", 7, "data", 3.0)
        assert (one.answered, one.alive, one.closed) == (False, None, False)
    # AND a rank that came too late for the queries is there as well
    assert completed(JOB, {}, answers)[0].problem == "its host has no evidence of it"
    assert completed(None, OWNERS, answers) == ()


def test_a_host_speaks_for_its_own_ranks_alone():
    # GIVEN a host with evidence of another one's rank, and one that names another host and process
    answers = {
        "a": HostAnswer({2: evidence(2), 1: RankEvidence(1, "node-z", 1)}),
        "b": HostAnswer({2: evidence(2, problem="its own")}),
    }
    found = completed(JOB, OWNERS, answers)
    assert found[2].problem == "its own"
    assert (found[1].host, found[1].pid) == ("node-a", 11)
