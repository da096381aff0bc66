"""What some steps of a job come to: what was seen, and what is missing and how to write it."""

from sftriage.recorder import RingInfo
from sftriage.records import StageSchema, StepRecord
from sftriage.runtime.trying import Ranks, found_of
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


def ranks(*tellers, sync=("backward",), world_size=2, durations_ns=(10, 20, 60, 5, 5)):
    """Two ranks, each with a step."""
    infos = tuple(
        RingInfo(rank, world_size, rank, 0, "job", "node", "", StageSchema(STAGES, sync), 1, 2, 3, 4, "C")
        for rank in range(world_size)
    )
    step = StepRecord(0, 2, 0, 0, durations_ns, (0,) * len(sync), True, False, None)
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
    assert 'sync=("backward",)' in sync.lines[1]


def test_why_there_is_no_ready_moment_under_fsdp_is_said():
    (found,) = found_of(ranks(told(), sync=("forward", "backward"))).missing
    assert "FSDP" in found.what


def test_a_seam_that_switched_itself_off_says_why():
    (found,) = found_of(ranks(told(fired={"data": 0}, failed={"data": "RuntimeError('broken')"}))).missing
    assert found.what == "the seam data was switched off: RuntimeError('broken')"


def test_a_script_whose_optimizer_is_not_torchs_needs_a_monitor():
    (found,) = found_of(Ranks((), (), (told(fired={"optimizer": 0}, rounds=0),))).missing
    assert found.what == "no step of a torch.optim.Optimizer was seen: no step is recorded"
    assert found.lines[0] == "monitor = sftriage.Monitor()"


def test_a_job_that_says_nothing_at_all_may_not_look_at_pythonpath():
    found = found_of(Ranks((), (), ()))
    assert "PYTHONPATH" in found.missing[0].what
    assert not any(one.works for one in found.captures if one.profiler in ("torch", "stacks"))


def test_of_a_monitor_of_the_scripts_own_nothing_is_missing():
    found = found_of(ranks(told(by_hand=True, fired={"forward": 0})))
    assert (found.by_hand, found.missing) == (True, ())
