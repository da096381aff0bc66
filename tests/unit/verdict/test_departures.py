"""Which rank went first: a table of how all ranks of a job ended."""

import signal
from dataclasses import replace

import pytest

from sftriage.model.ends import HostEnds, RankEnd
from sftriage.model.events import Place
from sftriage.trainer.evidence import Group, calls_of
from sftriage.verdict.departures import TIE_S, JobEnd, broken_by, broken_in, with_memory

AT_S = 1_700_000_000.0
SOON_S, LATER_S = AT_S + 0.02, AT_S + 1.0
LINE = Place("train", "/job/train.py", 91)
RESET = "[pair.cc:537] Read error [127.0.0.1]:21424: Connection reset by peer. This is typically caused by a remote"
CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:8580"
TIMEOUT = "[unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete"
KILLED_WORKER = "DataLoader worker (pid 4711) is killed by signal: Killed. "
GONE_WORKER = "DataLoader worker (pid(s) 4711) exited unexpectedly"
IN_WORKER = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 351, in _worker_loop
    data = fetcher.fetch(index)
  File "/job/data.py", line 57, in load
    return self.items[name]
KeyError: 'no-such-sample'
"""


def end(rank: int, time_s: float | None = AT_S, stage: str | None = "data", **about) -> RankEnd:
    return RankEnd(rank, 1000 + rank, "node-1", time_s, 60, stage, stage in ("backward", "exchange"), **about)


def failed(rank: int, message: str = RESET, error: str = "RuntimeError", **about) -> RankEnd:
    """A rank whose exchange has failed: its launcher ends it while it ends."""
    about = {"time_s": SOON_S, "stage": "backward", "status": -15, "sent": True, "place": LINE, **about}
    return end(rank, error=error, message=message, **about)


def ended(rank: int, **about) -> RankEnd:
    """A rank that its launcher has ended while it waited."""
    return end(rank, **{"time_s": LATER_S, "stage": "backward", "status": -15, "sent": True, **about})


FIRST = {
    # what happened: the ends of the ranks, who went first, and how
    "a rank exits": ((end(2, status=3), failed(0), failed(1), ended(3)), (2,), "exited"),
    "a rank exits, and is noticed after the others have failed": (
        (end(2, SOON_S + 0.1, status=3), failed(0), failed(1, CLOSED)),
        (2,),
        "exited",
    ),
    "a rank is killed": ((end(2, status=-9), failed(0), failed(1)), (2,), "killed"),
    "a rank crashes inside an exchange": ((end(2, stage="backward", status=-11), failed(0)), (2,), "killed"),
    "a rank is killed, and the others have no time to fail": ((end(2, status=-9), ended(0), ended(1)), (2,), "killed"),
    "a rank is ended by a person": ((end(2, status=-15), failed(0), failed(1), ended(3)), (2,), "killed"),
    "a rank raises": ((end(2, status=1, error="ValueError", message="nan"), failed(0), ended(1)), (2,), "raised"),
    "a rank raises inside an exchange": (
        (end(2, stage="backward", status=1, error="ValueError", message="nan"), failed(0), ended(1)),
        (2,),
        "raised",
    ),
    "a rank raises, by what it notes itself": (
        (end(2, error="ValueError", message="nan"), failed(0, status=None, sent=False), end(1, None)),
        (2,),
        "raised",
    ),
    "a rank raises, and others that hide why they fail exit inside the exchange": (
        (end(2, status=1, error="ValueError", message="nan"), end(0, stage="backward", status=1)),
        (2,),
        "raised",
    ),
    "a worker is killed": (
        (end(2, status=1, error="RuntimeError", message=KILLED_WORKER), failed(0, CLOSED), ended(1)),
        (2,),
        "worker",
    ),
    "a worker is gone": (
        (end(2, status=1, error="RuntimeError", message=GONE_WORKER, workers={4711: -9}), failed(0, CLOSED)),
        (2,),
        "worker",
    ),
    "a worker is killed while it hands over a batch": (
        (
            end(2, status=1, error="ConnectionResetError", message="Connection reset by peer", workers={4711: -9}),
            failed(0, CLOSED),
        ),
        (2,),
        "worker",
    ),
    "a rank ends in order before the others": ((end(2, status=0, stage=None), failed(0), ended(1)), (2,), "left"),
    "a rank dies, and no parent tells how": (
        (end(2, None), *(failed(rank, status=None, sent=False) for rank in (0, 1, 3))),
        (2,),
        "died",
    ),
    "a rank that its exchange failed for, before others ended of which no parent tells": (
        (failed(2, "gloo::EnforceNotMet", status=None, sent=False), end(0, LATER_S), end(1, LATER_S)),
        (2,),
        "raised",
    ),
    "the first to end of those of which no parent tells": (
        (end(1), failed(0, status=None, sent=False), end(3, AT_S + 0.001), failed(2, CLOSED, status=None, sent=False)),
        (1,),
        "died",
    ),
    "a rank that ends before others that a launcher ends, which reports no status": (
        (end(1), failed(0, status=None), ended(3, status=None)),
        (1,),
        "died",
    ),
    "a rank of a host that does not report": (
        (end(2, None, silent=True), failed(0), failed(1), ended(3)),
        (2,),
        "silent",
    ),
    "the only rank exits": ((end(0, status=3),), (0,), "exited"),
}


@pytest.mark.parametrize("happened", FIRST)
def test_the_rank_whose_end_is_no_consequence_went_first(happened):
    ends, ranks, how = FIRST[happened]
    broken = broken_by(ends, JobEnd(world_size=len(ends)), LATER_S)
    (first,) = broken.first
    assert (first.ranks, first.how) == (ranks, how)
    others = [rank for departure in broken.others for rank in departure.ranks]
    assert sorted(others) == sorted({each.rank for each in ends} - set(ranks))


NONE = {
    "several ended in the same turn, and no parent tells how": (
        (end(1), end(3), failed(0, status=None, sent=False)),
        1,
    ),
    "a rank aborts, and another host does not report": (
        (end(1, stage="backward", status=-6), failed(0), end(2, None, silent=True)),
        1,
    ),
    "all ranks give up waiting for one that hangs": (
        (failed(0, TIMEOUT), failed(1, TIMEOUT), ended(2, stage="data")),
        2,
    ),
    "a rank gives up, which closes the connections of others": ((failed(0, TIMEOUT), failed(1, CLOSED), ended(2)), 2),
    "NCCL aborts all ranks": ((*(end(rank, stage="backward", status=-6) for rank in (0, 1)), failed(2)), 1),
    "an exchange cannot begin": (tuple(failed(rank, "nccl", "DistBackendError") for rank in (0, 1)), 2),
    "several are gone, and no parent tells how": ((end(1, None), end(2, None), failed(0, status=None, sent=False)), 1),
    "a rank raises inside an exchange, and it is unknown how others ended": (
        (end(1, stage="backward", error="OSError", message="?"), end(0, None)),
        0,
    ),
}


@pytest.mark.parametrize("happened", NONE)
def test_no_rank_is_named_where_it_is_not_certain_that_one_went_first(happened):
    ends, gave_up = NONE[happened]
    broken = broken_by(ends, JobEnd(world_size=len(ends)), LATER_S)
    assert not broken.first
    assert sum(len(each.ranks) for each in broken.others if each.how == "gave_up") == gave_up
    assert sum(len(each.ranks) for each in broken.others) == len(ends)


WELL = {
    "all ranks end in order": ((end(0, status=0), end(1, status=0)), JobEnd(succeeded=True)),
    "a rank ends in order before the others, which do the same": (
        (end(0, status=0), end(1, LATER_S, status=0)),
        JobEnd(),
    ),
    "a rank fails in a job that succeeds": ((end(0, status=1), end(1, status=0)), JobEnd(succeeded=True)),
    "a scheduler ends all ranks": ((end(0, status=-15), end(1, status=-15)), JobEnd()),
    "a launcher that is ended ends its ranks": ((ended(0), ended(1)), JobEnd()),
    "a person ends the job": (
        (end(0, error="KeyboardInterrupt"), end(1, status=-2), failed(2)),
        JobEnd(signalled_s=AT_S - 0.1),
    ),
    "ranks fail as the job is ended": ((end(0, LATER_S, status=1), failed(1)), JobEnd(signalled_s=AT_S)),
    "nothing is known": ((end(0, None), end(1, None)), JobEnd()),
    "no rank was there": ((), JobEnd()),
}


@pytest.mark.parametrize("happened", WELL)
def test_a_job_that_ends_in_order_or_is_ended_is_not_broken(happened):
    assert broken_by(*WELL[happened], LATER_S) is None


def test_a_rank_that_went_before_the_job_was_ended_is_named():
    broken = broken_by((end(2, status=-9), ended(0), ended(1)), JobEnd(signalled_s=AT_S + 60.0), LATER_S)
    assert broken.first[0].ranks == (2,)


def test_ranks_that_end_at_once_in_different_ways_are_all_named_since_it_is_not_certain_which_was_first():
    ends = end(1, status=3), end(2, AT_S + TIE_S / 2, status=-11), failed(0)
    assert [departure.ranks for departure in broken_by(ends, JobEnd(), LATER_S).first] == [(1,), (2,)]
    # AND the earlier one alone where there is more time between them
    ends = end(1, status=3), end(2, AT_S + 2 * TIE_S, status=-11), failed(0)
    assert [departure.ranks for departure in broken_by(ends, JobEnd(), LATER_S).first] == [(1,)]


@pytest.mark.parametrize(("margin_s", "certain"), [(0.1, True), (2.0, False)])
def test_ends_on_two_hosts_have_an_order_only_where_their_clocks_are_close_enough(margin_s, certain):
    # GIVEN two ranks that exit, a second after each other by clocks that agree to some margin
    hosts = [
        HostEnds((end(1, margin_s=margin_s, status=3), failed(0)), 3, status=1),
        HostEnds((replace(end(2, LATER_S, margin_s=margin_s, status=4), host="node-2"),), 3, status=1),
    ]
    (broken,) = broken_in(hosts, LATER_S)
    assert [departure.ranks for departure in broken.first] == ([(1,)] if certain else [(1,), (2,)])
    # AND the order of those of one host is certain in any case
    (broken,) = broken_in([replace(hosts[0], ranks=(*hosts[0].ranks, end(2, LATER_S, status=4)))], LATER_S)
    assert [departure.ranks for departure in broken.first] == [(1,)]


def test_a_job_has_succeeded_where_all_of_its_launchers_have():
    well, ill = HostEnds((end(0, status=0),), 2, status=0), HostEnds((end(1, status=1),), 2, status=1)
    assert broken_in([well, well], AT_S) == []
    (broken,) = broken_in([well, ill], AT_S)
    assert (broken.first[0].ranks, broken.world_size) == ((1,), 2)


def called(rank: int, *sizes: int, backend: str = "gloo", **about) -> RankEnd:
    """A rank whose exchange has failed in the last of its calls of all_reduce, the 126th of its group."""
    last = len(sizes) - 1
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "collective_seq_id": 126 - last + at,
            "profiling_name": f"{backend}:all_reduce",
            "input_sizes": [[size]],
            "input_dtypes": ["Float"],
            "frames": [{"name": "train", "filename": "/job/train.py", "line": 52 if rank == 2 else 91}],
            # (NCCL knows what has not ended; Gloo counts a failed call as ended)
            "retired": backend == "gloo",
            "state": "completed" if backend == "nccl" and at < last else "started",
        }
        for at, size in enumerate(sizes)
    ]
    calls, groups, _ = calls_of(entries, {"0": Group("0", "default_pg", (0, 1, 2, 3), frozenset({backend}))}, None)
    return failed(rank, **{"calls": calls, "groups": groups, **about})


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_an_exchange_that_ranks_call_differently_is_the_reason_for_its_failure(backend):
    # GIVEN a rank that Gloo or NCCL has aborted, which called nothing wrong, and whose calls are unknown
    aborted = end(1, stage="backward", status=-6)
    ends = aborted, *(called(rank, 4, 4, 3 if rank == 2 else 4, backend=backend) for rank in (0, 2, 3))
    broken = broken_by(ends, JobEnd(world_size=4), LATER_S)
    assert broken.first[0].ranks == (1,)
    hang = broken.mismatch
    assert (hang.kind, hang.ranks, hang.others, hang.number) == ("different_sizes", (2,), (0, 3), 126)
    assert (hang.call.sizes, hang.other_call.sizes) == (((3,),), ((4,),))
    assert (hang.call.frames[0].line, hang.other_call.frames[0].line) == (52, 91)


def test_an_exchange_that_ranks_call_alike_or_whose_calls_are_unknown_has_no_such_reason():
    alike = [called(rank, 4, 4) for rank in (0, 2, 3)]
    for ends in (alike, [called(2, 4, 3), failed(0)]):
        assert broken_by((end(1, status=3), *ends), JobEnd(world_size=4), LATER_S).mismatch is None


def test_what_is_known_of_an_end_is_kept_with_it():
    (first,) = broken_by((end(2, status=1, error="KeyError", message=IN_WORKER, place=LINE),), JobEnd(), AT_S).first
    # (the line of the worker, below torch's)
    assert (first.error, first.message, first.place) == (
        "KeyError",
        "'no-such-sample'",
        Place("load", "/job/data.py", 57),
    )
    (first,) = broken_by((end(2, status=1, error="RuntimeError", message=KILLED_WORKER),), JobEnd(), AT_S).first
    assert (first.worker, first.status, first.stage, first.step) == (4711, -signal.SIGKILL, "data", 60)
    exited = "DataLoader worker (pid 4711) exited unexpectedly with exit code 7. Details are lost"
    (first,) = broken_by((end(2, status=1, error="RuntimeError", message=exited),), JobEnd(), AT_S).first
    assert (first.worker, first.status) == (4711, 7)


@pytest.mark.parametrize(
    ("status", "killed", "by_cgroup", "expected"),
    [
        (-9, {}, True, ("cgroup", 8 << 30)),
        (-9, {1002}, False, ("kernel_log", 8 << 30)),
        (-9, {7}, False, ("", None)),
        (-11, {}, True, ("", None)),
    ],
)
def test_a_rank_that_was_killed_is_out_of_memory_only_where_the_kernel_says_so(status, killed, by_cgroup, expected):
    ended = with_memory(end(2, status=status), killed, 8 << 30, by_cgroup=by_cgroup)
    (first,) = broken_by((ended, failed(0)), JobEnd(), AT_S).first
    assert (first.out_of_memory, first.limit_bytes) == expected


def test_ranks_that_failed_in_one_place_are_one_group_with_the_most_frequent_reason():
    ends = end(2, status=3), failed(0, CLOSED), failed(1, RESET), failed(3, RESET), ended(4)
    gave_up, killed = broken_by(ends, JobEnd(), LATER_S).others
    assert (gave_up.ranks, gave_up.message, gave_up.place) == ((0, 1, 3), "Connection reset by peer", LINE)
    assert (killed.ranks, killed.status, killed.stage) == ((4,), -15, "backward")


def test_each_attempt_is_judged_by_itself():
    broken = broken_by((end(2, status=-9), failed(0)), JobEnd(attempt=1, restarted=True, world_size=2), LATER_S)
    assert (broken.attempt, broken.restarted, broken.world_size, broken.time_s) == (1, True, 2, AT_S)
