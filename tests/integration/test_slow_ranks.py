"""The whole path on real jobs: hidden slow ranks are found, captured and linked; what cannot be decided is held.

What is asked of a live job is what happens, with delays that no busy machine makes up for. That nobody is accused who
is not slow is asked of recordings (`test_policy_replay`), and of long runs (`python -m bench long_run`).
"""

from sftriage.traces.manifest import Manifest
from tests.integration.linked import check_linked
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, FORKED, IN_TURN, wait_until
from tests.integration.runs import captures, named, verdicts

FOUND = {"data:2": (2, "data"), "forward:0": (0, "forward"), "optimizer:3": (3, "optimizer"), "other:1": (1, "other")}
HELD = {"backward:1": "sync_ambiguous", "data:2+forward:1": "co_critical"}
RULE = 'name: slow-rank, match: {scope: [rank], gain: ">= 50%"}, capture: {profiler: torch, steps: 3}, cooldown: 0s'
LIMITS = "overhead_budget: 100%, captures_per_hour: 100, captures_per_run: 100"
POLICY = policy(RULE, steps=(16, 8, 8), limits=LIMITS)


def captured(run, rank, stage):
    found = (one for one in captures(run) if (one.capture.rank, one.trigger.stage) == (rank, stage))
    return next(found, None)


def test_each_slow_rank_is_found_captured_and_linked_and_what_cannot_be_decided_is_held(start, sftriage, tmp_path):
    # GIVEN a real job of four ranks, in which one after the other becomes slow, in one stage after the other
    run = tmp_path / "run"
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    job = start(
        *("run", "--policy", tmp_path / "policy.yaml", "--out", run, "--"),
        *(*FORKED, 4, IN_TURN, tmp_path, *FOUND, *HELD),
    )
    wait_until(lambda: verdicts(run))
    made: dict[str, Manifest] = {}
    for turn, fault in enumerate((*FOUND, *HELD)):
        (tmp_path / f"next-{turn}").touch()
        if fault in FOUND:
            # THEN it is named and captured while it is slow
            made[fault] = wait_until(lambda whom=FOUND[fault]: captured(run, *whom))
        else:
            # AND where the coarse signal cannot tell who it is, the window is held with the reason
            wait_until(lambda fault=fault: [HELD[fault]] in [one["reasons"] for one in verdicts(run)])
    (tmp_path / f"next-{len(FOUND) + len(HELD)}").touch()
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    # AND every capture is linked to the window that led to it
    decisions = sftriage("decisions", "--run", run, "--json").json
    for manifest in made.values():
        check_linked(run, manifest, decisions, 4)
        of_it = next(one for one in verdicts(run) if one["last_step"] == manifest.trigger.window.last_step)
        assert named(of_it) == (manifest.capture.rank, manifest.trigger.stage)
    # AND no window is both held and captured, and what is held says what would resolve it
    held = [d for d in decisions if d["outcome"] == "hold"]
    assert all(d["resolves"] and not d["requests"] for d in held)
    assert {reason for reason in HELD.values() if any(reason in d["words"] for d in held)} == set(HELD.values())
    # AND the spool is empty: nothing was left lying about
    assert list((run / "spool").iterdir()) == []
