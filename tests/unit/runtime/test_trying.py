"""What some steps of a job come to: what was seen, and what is missing and how to write it."""

import textwrap
from dataclasses import replace

import pytest

from sftriage.model.windows import StageSchema, StepRecord
from sftriage.recorder import RingInfo
from sftriage.runtime.doctor import Ranks, found_of
from sftriage.runtime.first_step import Facts
from sftriage.seams.patches import NAMES

STAGES = ("data", "forward", "backward", "optimizer", "other")


def told(rank="0", **changed):
    """What a trainer's seams have seen: everything."""
    return {
        "rank": rank,
        "rounds": 10,
        "fired": dict.fromkeys(NAMES, 10) | changed.pop("fired", {}),
        "failed": {},
        "models": ["DistributedDataParallel"],
        "by_hand": False,
        "kineto": True,
    } | changed


EXCHANGING = ("data", "forward", "backward", "exchange", "optimizer", "other")


def ranks(*tellers, sync=("backward",), world_size=2, durations_ns=(10, 20, 60, 5, 5), ready_ns=None, stages=STAGES):
    """Two ranks, each with a step."""
    infos = tuple(
        RingInfo(rank, world_size, rank, 0, "job", "node", "", StageSchema(stages, sync), 1, 2, 3, 4, "C")
        for rank in range(world_size)
    )
    step = StepRecord(0, 2, 0, 0, durations_ns, (0,) * len(sync), True, False, ready_ns)
    return Ranks(infos, ((step,),) * world_size, tellers)


def test_of_a_job_of_which_all_is_seen_nothing_is_missing():
    found = found_of(ranks(told("0"), told("1"), told("", rounds=0, fired=dict.fromkeys(NAMES, 0))))
    assert found.missing == ()
    assert (found.ranks, found.steps, found.sync, found.models) == (2, 2, ("backward",), ("DistributedDataParallel",))
    assert found.stages == {"data": 0.1, "forward": 0.2, "backward": 0.6, "optimizer": 0.05, "other": 0.05}
    assert {one.name: (one.fired, one.share) for one in found.seams}["backward"] == (20, 0.6)
    assert {one.profiler: one.works for one in found.captures}["torch"]


def test_what_was_not_seen_is_said_with_the_lines_that_name_it():
    found = found_of(ranks(told(fired={"data": 0}), sync=()))
    data, sync = found.missing
    assert data.lines == ("import sftriage", 'with sftriage.stage("data"):', "    batch = next(batches)")
    assert sync.lines[1] == 'with sftriage.stage("exchange", sync=True):'


def test_collectives_are_listed_by_where_they_are_called_and_a_stage_that_none_is_in_is_no_sync_stage():
    # GIVEN a job whose ranks have a stage for exchanges WHEN none comes, THEN that is what is missing
    seen = told(collectives={"all_reduce (async) in backward": 4})
    found = found_of(ranks(seen, seen, sync=("exchange",), stages=EXCHANGING, durations_ns=(10, 20, 60, 0, 5, 5)))
    assert (found.sync, found.collectives) == ((), {"all_reduce (async) in backward": 8})
    assert "nothing is known to wait for the other ranks" in found.missing[0].what
    # AND where one has come, nothing is
    found = found_of(ranks(seen, sync=("exchange",), stages=EXCHANGING, durations_ns=(10, 20, 50, 10, 5, 5)))
    assert (found.sync, found.missing) == (("exchange",), ())


def test_why_there_is_no_ready_moment_under_fsdp_is_said():
    (found,) = found_of(ranks(told(), sync=("forward", "backward"))).missing
    assert "FSDP" in found.what


def test_a_seam_that_switched_itself_off_says_why():
    (found,) = found_of(ranks(told(fired={"data": 0}, failed={"data": "RuntimeError('broken')"}))).missing
    assert found.what == "the seam data was switched off: RuntimeError('broken')"


def test_a_script_whose_optimizer_is_not_torchs_needs_a_monitor():
    (found,) = found_of(Ranks((), (), (told(fired={"optimizer": 0}, rounds=0),))).missing
    assert found.what == "no step of a torch.optim.Optimizer was seen: no step is recorded"
    assert found.lines[:2] == (
        "import sftriage",
        "monitor = sftriage.Monitor()  # once, where the ranks know of each other (init_process_group)",
    )
    compile("\n".join(found.lines), "lines", "exec")


def test_of_a_job_of_which_nothing_is_known_no_more_is_said_than_that():
    found = found_of(Ranks((), (), ()))
    assert found.missing[0].what == "no process of the job on this host was seen to import torch: no step is recorded"
    assert found.missing[0].lines == ()
    # AND where it is known why its trainers are not reached, that, with the lines that need no such way
    hidden = Facts(auto=True, torch=2, status=0, hidden=frozenset({"PYTHONPATH"}))
    (overwritten,) = found_of(Ranks((), (), ()), hidden).missing
    assert "overwrote PYTHONPATH" in overwritten.what
    assert overwritten.lines[0] == "import sftriage"
    assert not any(one.works for one in found.captures if one.profiler in ("torch", "stacks"))


def by_hand(sync=("backward",), **changed):
    """What two ranks with a Monitor of the script's own have recorded."""
    return ranks(*(told(rank, by_hand=True, fired=dict.fromkeys(NAMES, 0)) for rank in "01"), sync=sync, **changed)


def left(seen):
    """The same ranks, each of which has left a step before its last one."""
    return replace(seen, steps=tuple((replace(last, complete=False), last) for (last,) in seen.steps))


def test_of_a_good_monitor_of_the_scripts_own_nothing_is_missing():
    found = found_of(by_hand(ready_ns=50))
    assert (found.by_hand, found.missing) == (True, ())


# what is wrong with the script's own Monitor, or with its loop: what is said, and what to write for it
WRONG = [
    (by_hand(), "no moment of the last gradient", "monitor.watch(model)"),
    (by_hand(sync=()), "no stage is said to wait", 'sync=("backward",)'),
    (by_hand(ready_ns=1, durations_ns=(0, 20, 60, 5, 5)), "data was declared, and never", 'with monitor.stage("data")'),
    (by_hand(ready_ns=1, durations_ns=(10, 20, 30, 5, 35)), "35% of the steps is in no stage", "with monitor.stage"),
    (left(by_hand(ready_ns=1)), "2 of 4 steps were left", "with monitor.step():"),
    (replace(by_hand(ready_ns=1), misuse=7), "7 calls made no sense to the recorder", ""),
    (replace(by_hand(), steps=((), ())), "the Monitor that the script makes has no step", "    with monitor.step():"),
    (replace(by_hand(), infos=(), steps=()), "records elsewhere (rings=)", "    with monitor.step():"),
    (by_hand(ready_ns=1, world_size=1), "2 processes train, and each says that it is rank 0 of 1", "world_size="),
]


@pytest.mark.parametrize(("seen", "what", "line"), WRONG)
def test_what_a_monitor_of_the_scripts_own_leaves_open_is_said(seen, what, line):
    (missing,) = found_of(seen).missing
    assert what in missing.what
    assert line in "\n".join(missing.lines)
    compile(textwrap.dedent("\n".join(missing.lines)), "lines", "exec")


def test_time_between_the_stages_is_said_once_all_of_them_are_seen():
    (between,) = found_of(ranks(told(), durations_ns=(10, 20, 30, 5, 35))).missing
    assert between.what.startswith("35% of the steps is in no stage")
    (data,) = found_of(ranks(told(fired={"data": 0}), durations_ns=(0, 20, 30, 5, 45))).missing
    assert "DataLoader" in data.what


@pytest.mark.parametrize(
    ("status", "steps", "said"),
    [
        (None, 2, None),
        (0, 2, None),
        (1, 2, "the job ended by itself with exit status 1, after 1 recorded step of a rank"),
        (137, 0, "the job ended by itself with exit status 137, before any step was recorded"),
    ],
)
def test_a_job_that_failed_is_said_first(status, steps, said):
    of = ranks(told()) if steps else Ranks((), (), (told(rounds=0),))
    missing = found_of(of, Facts(auto=True, status=status)).missing
    assert sum("ended by itself" in one.what for one in missing) == (said is not None)
    assert said is None or missing[0].what.startswith(said)
