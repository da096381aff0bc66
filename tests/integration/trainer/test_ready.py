"""The moment the last gradient is ready, in real DDP jobs: one rank is slow inside its backward pass."""

import json
from pathlib import Path

import pytest

from sftriage.model.windows import StepRecord
from sftriage.windows.rings import Ring
from tests.integration.conftest import own_environment
from tests.integration.forked import forked_output
from tests.integration.jobs.moments import CASES, COMPARED_STEPS, PAUSE_S, ROWS, SLOW, STEPS, THAWED_AT
from tests.integration.processes import JOBS, LAUNCH, ROOT


def run_ranks(job: str, directory: Path, *arguments: object) -> str:
    environment = own_environment(directory) | {"PYTHONPATH": str(ROOT)}
    return forked_output(LAUNCH, 2, JOBS / job, directory, *arguments, env=environment)


def ready_at_ns(record: StepRecord) -> int:
    """When the last gradient of one backward was ready, by the host: so much later at most as was spent in `other`."""
    assert record.ready_ns is not None
    return record.start_ns + record.durations_ns[0] + record.ready_ns


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A job of two ranks, one of which pauses in its backward once the other has all its gradients; what they say."""
    directory = tmp_path_factory.mktemp("ready")
    return directory, run_ranks("ready.py", directory, *ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_rank_that_is_slow_inside_backward_shows_in_its_moment_and_nowhere_else(trained, row):
    directory, said = trained
    check_moments(directory / row, row, said)


def check_moments(rings: Path, row: str, said: str) -> None:
    if row == "compile" and "does not work here" in said:
        pytest.skip(said.strip())
    steps = []
    for rank in range(2):
        with Ring(rings / f"rank-{rank}.0.ring") as ring:
            batch = ring.read()
            assert (len(batch.steps), batch.torn, ring.misuse) == (STEPS, 0, 0)
            steps.append(batch.steps.records())
    # THEN every step has a moment, but for the one in which a frozen layer turned out to be thawed
    without = {THAWED_AT} if row == "thawed" else set()
    for records in steps:
        assert {record.step for record in records if record.ready_ns is None} == without
    for fast, slow in zip(*steps, strict=True):
        if fast.step in without:
            continue
        # AND the slow rank's is after the pause, which the other one waits for after its own
        assert slow.rank == SLOW
        assert min(slow.ready_ns, fast.durations_ns[1] - fast.ready_ns) >= PAUSE_S * 1e9
        # (of several micro-batches, what came after the gradients of the others is not known)
        if row != "accumulate":
            assert ready_at_ns(slow) + slow.outside_ns[0] >= ready_at_ns(fast) + PAUSE_S * 1e9
        for record in (fast, slow):
            # AND both ranks' backward lasts until then: by its duration alone nobody could say which of them is slow
            end_ns = record.start_ns + record.durations_ns[0] + record.durations_ns[1] + record.outside_ns[0]
            assert end_ns >= ready_at_ns(slow)
            assert record.ready_ns <= record.durations_ns[1]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> list[dict[str, dict[str, int]]]:
    """What each of two ranks found when it trained every case twice, plain and watched."""
    lines = [json.loads(line) for line in run_ranks("bits.py", tmp_path_factory.mktemp("bits"), *CASES).splitlines()]
    return [{line["case"]: line for line in lines if line["rank"] == rank} for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_watching_changes_no_bit_of_any_gradient(compared, case):
    for found in (rank[case] for rank in compared):
        if "skip" in found:
            pytest.skip(found["skip"])
        # GIVEN gradients of twelve steps and the parameters after them, of plain DDP and of DDP with its model watched
        assert found["compared"] == COMPARED_STEPS * found["parameters"] + found["parameters"]
        # THEN not one bit differs
        assert found["differ"] == 0
        # AND the comparison was of something: there were gradients, and the watch saw their last one in every step
        assert found["not_zero"] > found["compared"] / 2
        assert (found["ready_plain"], found["ready_watched"]) == (0, COMPARED_STEPS)


def test_under_fsdp2_there_is_no_moment(rings):
    # GIVEN two ranks under fully_shard, one of which pauses in its backward
    ranks_found = sorted(map(json.loads, run_ranks("sharded.py", rings).splitlines()), key=lambda found: found["rank"])
    for found in ranks_found:
        # THEN watch() leaves the model alone, says so once, and no step has a moment
        assert (found["hooks"], len(found["warnings"]), set(found["ready_ns"])) == (0, 1, {None})
        assert "FSDP" in found["warnings"][0]
    # AND this is why: on the rank that is not slow, too, the last gradient is accumulated after the other's pause
    paused_ns = ranks_found[SLOW]["paused_ns"]
    assert len(paused_ns) == STEPS
    assert all(
        last_ns > paused for found in ranks_found for last_ns, paused in zip(found["last_ns"], paused_ns, strict=True)
    )
