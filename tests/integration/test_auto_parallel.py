"""`sftriage run --auto` on hybrid jobs: which ranks do the same work, and where they wait, is known by itself."""

import subprocess

import pytest
import torch

from sftriage.runs.recordings import load_recording
from tests.integration.processes import FORKED, slowed
from tests.integration.runs import named, verdicts
from tests.integration.test_auto_seams import POLICY, UNEDITED

SLOW_FROM = 80
EXCHANGING = ("data", "forward", "backward", "exchange", "optimizer", "other")
SLOWED = {
    # which rank is slow: the script, its ranks, samples a step, stages, sync stages, and each rank's cohort
    "a sharded stage's second rank": ("pipeline", 2, 16, EXCHANGING, EXCHANGING[1:4], ("pp0", "pp1", "pp0", "pp1")),
    "a sharded stage's first rank": ("pipeline", 1, 16, EXCHANGING, EXCHANGING[1:4], ("pp0", "pp1", "pp0", "pp1")),
    "the only rank of a stage": ("pipeline", 1, 16, EXCHANGING, ("exchange",), ("pp0", "pp1")),
    "one of a pair with a tensor": ("hybrid", 2, 8, EXCHANGING, EXCHANGING[1:4], ("", "", "", "")),
    "one that averages by hand": ("averaged", 1, 8, EXCHANGING, ("exchange",), ("Sequential-17668",) * 2),
}


@pytest.mark.parametrize("which", SLOWED)
def test_the_slow_rank_of_a_hybrid_job_is_named_and_trains_as_without_us(start, tmp_path, environment, which):
    # GIVEN a script that knows nothing of sftriage, and a data set that becomes slow on one rank
    script, slow, a_step, stages, sync, cohorts = SLOWED[which]
    (tmp_path / "policy.yaml").write_text(POLICY)
    command = (*FORKED, len(cohorts), UNEDITED / f"{script}.py", tmp_path)
    # WHEN it runs
    options = ("--auto", "--policy", tmp_path / "policy.yaml", "--out", tmp_path / "run")
    job = start("run", *options, "--", *command, env=environment | slowed(slow, a_step, SLOW_FROM))
    said, told = job.communicate(timeout=240)
    assert job.returncode == 0, told
    # THEN that rank is suspected of that stage
    assert (slow, "data") in [named(verdict) for verdict in verdicts(tmp_path / "run")], told
    # AND each rank has its cohort, and its stages
    (ranks,) = load_recording(tmp_path / "run").ranks.values()
    for rank, cohort in enumerate(cohorts):
        info = ranks[rank].info
        assert (info.cohort, info.schema.stages, set(info.schema.sync)) == (cohort, stages, set(sync))
    # AND what was trained is bit for bit what it is without us
    trained = torch.load(tmp_path / "trained.pt")
    plain = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert plain.stdout == said, plain.stderr
    for one, other in zip(torch.load(tmp_path / "trained.pt"), trained, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("way", ["hooks", "sharded", "local", "ring"])
def test_a_rank_whose_peers_wait_in_exchanges_of_the_scripts_own_is_named(start, tmp_path, environment, way):
    # GIVEN a script that exchanges in its own way WHEN the data of one rank becomes slow
    (tmp_path / "policy.yaml").write_text(POLICY)
    options = ("--auto", "--policy", tmp_path / "policy.yaml", "--out", tmp_path / "run")
    command = (*FORKED, 3, UNEDITED / "exchanged.py", way)
    job = start("run", *options, "--", *command, env=environment | slowed(1, 8, SLOW_FROM))
    said, told = job.communicate(timeout=240)
    assert job.returncode == 0, told
    # THEN that rank is suspected, no other and no stage in which it is waited for
    judged = verdicts(tmp_path / "run")
    suspects = {named(verdict) for verdict in judged if verdict["label"] == "suspect"}
    assert (1, "data") in suspects, told
    assert not [one for one in suspects if one is not None and one[1] in ("optimizer", "backward", "exchange")], told
    # AND what was trained is what it is without us
    plain = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert plain.stdout == said, plain.stderr
