"""Real ranks over Gloo that reduce around a straggler: the sums are right, who it is may change, and nobody hangs."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.processes import FORKED, ended, wait_until

JOB = Path(__file__).parent / "jobs" / "stragglar_ranks.py"


@pytest.mark.parametrize("ranks", range(2, 9))
def test_gradients_are_those_of_an_all_reduce(environment, ranks):
    # GIVEN ranks, each of which in turn is the straggler, and gradients that do and do not divide into chunks
    # WHEN they are reduced THEN each rank has the mean: to the last bit that of the same order of summation
    done = subprocess.run(
        [*FORKED, str(ranks), JOB, "sums"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["right"] * ranks


def test_ddp_trains_the_same_model_around_a_straggler_that_moves(environment):
    # GIVEN a model in several buckets WHEN another rank is the straggler in every step
    # THEN its parameters are those of training without, and the same to the last bit on all ranks
    done = subprocess.run([*FORKED, "3", JOB, "ddp"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["right"] * 3


def test_groups_side_by_side_have_stragglers_of_their_own(environment):
    # GIVEN six ranks in two groups, neither of which knows of the other WHEN each reduces THEN each has its own mean
    done = subprocess.run([*FORKED, "6", JOB, "groups"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_what_is_no_ddp_or_has_a_hook_already_stays_as_it_is(environment, tmp_path):
    # GIVEN a model that is not wrapped, and one whose gradients are compressed by a hook WHEN each takes another one in
    # THEN nothing changes, that is said, and training goes on
    environment = {**environment, "SFTRIAGE_RINGS": str(tmp_path)}
    done = subprocess.run([*FORKED, "2", JOB, "hooked"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["right"] * 2


def test_ranks_whose_releases_differ_all_refuse(environment, tmp_path):
    # GIVEN three ranks, of which the second has another release WHEN all take the hook in
    # THEN none does, the first says so, and they train on
    environment = {**environment, "SFTRIAGE_RINGS": str(tmp_path)}
    done = subprocess.run([*FORKED, "3", JOB, "releases"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["right"] * 3


@pytest.mark.parametrize("how", ["killed", "stopped", "voting", "across", "casting"])
def test_a_rank_that_is_gone_while_all_switch_ends_the_others(environment, tmp_path, how):
    # GIVEN three ranks that switch, by a word of their own or by their votes, in a file or across hosts, with nobody to
    # end them but themselves
    meeting = {"WORLD_SIZE": "3", "MEETING": str(tmp_path / "meeting"), "SFTRIAGE_RINGS": str(tmp_path)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(3):
            process = subprocess.Popen(
                [sys.executable, JOB, how],
                env={**environment, **meeting, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            stack.enter_context(ended(process))
            ranks.append(process)
        # WHEN the second is gone where all switch, or have voted THEN the others fail too, and say so
        others = ranks[::2]
        wait_until(lambda: all(one.poll() is not None for one in others), deadline_s=120)
        assert [one.returncode for one in others] == [1, 1]
        assert all(one.stdout.read().startswith("failed: ") for one in others)
