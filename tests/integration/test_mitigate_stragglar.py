"""Real ranks over Gloo that reduce around a straggler: the sums are right, who it is may change, and nobody hangs."""

import pytest

from tests.integration.forked import forked_output
from tests.integration.processes import JOBS, LAUNCH, wait_until
from tests.integration.remedies import meeting_ranks

JOB = JOBS / "stragglar_ranks.py"


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        # GIVEN ranks, each of which in turn is the straggler, and gradients that do and do not divide into chunks
        # WHEN they are reduced THEN each rank has the mean: to the last bit that of the same order of summation
        *((ranks, "sums") for ranks in range(2, 9)),
        # GIVEN a model in several buckets WHEN another rank is the straggler in every step
        # THEN its parameters are those of training without, and the same to the last bit on all ranks
        (3, "ddp"),
        # GIVEN two groups, neither of which knows of the other WHEN each reduces THEN each has its own mean
        (6, "groups"),
        # GIVEN a model that is not wrapped, and one whose gradients are compressed by a hook WHEN each takes another
        # one in THEN nothing changes, that is said, and training goes on
        (2, "hooked"),
        # GIVEN three ranks, of which the second has another release WHEN all take the hook in
        # THEN none does, the first says so, and they train on
        (3, "releases"),
    ],
)
def test_gradients_are_those_of_an_all_reduce(environment, tmp_path, ranks, what):
    if what in ("hooked", "releases"):
        environment = {**environment, "SFTRIAGE_RINGS": str(tmp_path)}
    assert forked_output(LAUNCH, ranks, JOB, what, env=environment).split() == ["right"] * ranks


@pytest.mark.parametrize("how", ["killed", "stopped", "voting", "across", "casting"])
def test_a_rank_lost_while_all_switch_ends_the_others(environment, tmp_path, how):
    # GIVEN three ranks that switch, by a word of their own or by their votes, in a file or across hosts, with nobody to
    # end them but themselves
    with meeting_ranks(3, environment, tmp_path, JOB, how) as ranks:
        # WHEN the second is lost as all switch, or have voted THEN the others fail too, with an error
        others = ranks[::2]
        wait_until(lambda: all(one.poll() is not None for one in others), deadline_s=120)
        assert [one.returncode for one in others] == [1, 1]
        assert all(one.stdout.read().startswith("failed: ") for one in others)
