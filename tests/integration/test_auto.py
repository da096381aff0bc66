"""What the default policy takes of a job with a slow loader: stacks alone, and operators where these leave it open."""

from pathlib import Path

import pytest

from sftriage.policy.in_force import find
from sftriage.runs.decisions import decisions_of
from sftriage.runs.directory import RunDirectory
from tests.integration.processes import FORKED, SLOW_DATA, wait_until
from tests.integration.runs import captures, on_record

SLOW_S = 0.1


@pytest.fixture
def trained(start, tmp_path):
    """The run of a job under the default policy, and how it is ended; ``how`` is its last rank slow."""

    def train(*how: object):
        # (the machine may be busy: nothing is held back because a rank waited for a core)
        policy = tmp_path / "policy.yaml"
        policy.write_text(find("default").read_text().replace("overhead_budget: 0.5%", "overhead_budget: 100%"))
        run, release = tmp_path / "run", tmp_path / "release"
        job = start("run", "--policy", policy, "--out", run, "--", *FORKED, 2, SLOW_DATA, release, SLOW_S, *how)

        def end() -> str:
            release.touch()
            return job.communicate(timeout=120)[1]

        return run, end

    return train


def test_of_a_loader_that_sleeps_stacks_alone_are_taken_and_name_the_line(trained):
    # GIVEN a rank that sleeps in data, under the policy that a first run has WHEN it is captured
    run, end = trained()
    wait_until(lambda: on_record(run, "cause"))
    said = end()
    (manifest,) = captures(run)
    # THEN no profiler was started, and decision and manifest say why
    assert [one.name for one in manifest.artefacts] == ["stacks.speedscope.json"]
    assert (manifest.capture.profiler, manifest.trigger.chosen, manifest.capture.rank) == ("stacks", "host_stage", 1)
    assert set(manifest.capture.timings_s) == {"start", "run", "export"}
    assert manifest.reproduced is not None
    assert manifest.reproduced.answer == "yes"
    decided = next(one for one in decisions_of(RunDirectory(run)) if one["requests"])
    assert (decided["parameters"]["profiler"], decided["parameters"]["chosen"]) == ("stacks", "host_stage")
    assert "auto chose the stack sampler: data is host work" in decided["words"]
    # AND the cause is the line, which is told
    assert manifest.findings is not None
    cause = manifest.findings.cause
    assert cause is not None
    assert cause.place is not None
    assert (cause.code, cause.place.source, Path(cause.place.file).name) == (
        "sleep",
        "time.sleep(slow_s)",
        "slow_data.py",
    )
    assert cause.sentence in said
    assert manifest.followed is None


def test_what_stacks_leave_open_is_asked_of_operators_once_and_both_captures_name_each_other(trained, sftriage):
    # GIVEN a rank that waits in data where no line says for what WHEN its first capture has said no more
    run, end = trained("opaque")
    wait_until(lambda: len(on_record(run, "cause")) > 1)
    before = len(on_record(run, "window"))
    wait_until(lambda: len(on_record(run, "window")) > before + 5)
    end()
    # THEN another follows it, by the other means and without waiting, and there is no third
    first, second = sorted(captures(run), key=lambda one: one.capture.first_step)
    assert (first.capture.profiler, second.capture.profiler) == ("stacks", "torch")
    assert (second.trigger.chosen, second.trigger.follows) == ("left_open", first.capture_id)
    assert first.followed is not None
    assert first.followed.capture_id == second.capture_id
    assert (second.created_at - first.created_at).total_seconds() < 300
    (follow_up,) = [one for one in decisions_of(RunDirectory(run)) if one["reason"] == "follow_up"]
    assert follow_up["parameters"]["follows"] == first.capture_id
    assert on_record(run, "cause")[0]["left_open"] == "operators"
    # AND that is what is shown
    shown = sftriage("traces", "show", first.capture_id, "--run", run).out
    assert f"followed by {second.capture_id}" in shown
    listed = sftriage("traces", "list", "--run", run).out
    assert "follow-up" in listed
