"""Captures that a person asks for: what is asked for is checked, and what came of it says who asked and why."""

import inspect
from pathlib import Path

import pytest

from sftriage.commands.capture import capture
from sftriage.commands.cli import flattened
from sftriage.model.captures import ManualRequest
from sftriage.policy.schema import Capture
from sftriage.runs.directory import RunDirectory
from sftriage.runs.requests import leave
from sftriage.runtime.triage import requests_in
from sftriage.traces.store import LocalStore
from tests.unit.conftest import asked_for, run_going_on

CAPTURE = "asked-s57-r2-1"


@pytest.fixture
def run(tmp_path):
    return run_going_on(tmp_path / "run")


ODD = ("two\nlines", "\x1b[2J", "ends\n", "\x85")


@pytest.mark.parametrize(
    ("reason", "user", "said"),
    [
        *((odd, "ada", "the reason has control characters; give one line of text") for odd in ODD),
        ("", "ada", "the reason is empty; give one line of text"),
        ("x" * 501, "ada", "the reason is too long; 500 characters at most"),
        ("\udcff", "ada", "the reason is not UTF-8 text"),
        ("a look", "a\nb", "the requester's name has control characters; give one line of text"),
        ("a look", "x" * 501, "the requester's name is too long; 500 characters at most"),
    ],
)
def test_a_reason_or_a_name_that_is_no_line_of_text_is_refused_in_words(sftriage, run, monkeypatch, reason, user, said):
    monkeypatch.setenv("LOGNAME", user)
    outcome = sftriage("capture", "--run", run.path, "--rank", 0, "--reason", reason)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"sftriage: {said}\n")
    assert not list(run.requests.iterdir())


def test_whoever_asks_has_every_option_that_a_policy_has_with_its_default_and_its_bounds():
    """(Whom to capture is said by --rank.)"""
    signature = inspect.signature(flattened(capture), eval_str=True).parameters
    for name, field in Capture.model_fields.items():
        if name in ("ranks", "sample", "control_ranks"):
            continue
        if name in ("torch", "nsys", "stacks"):
            options = {f"nsys_{one}" if name == "nsys" else one for one in field.annotation.model_fields}
            assert options <= signature.keys()
            # Not said, it is as in a policy that does not say it
            assert {signature[one].default.default for one in options} == {None}
            continue
        option = signature[name].default
        assert option.default == field.default, name
        bounds = {bound: getattr(one, bound) for one in field.metadata for bound in ("ge", "le") if hasattr(one, bound)}
        assert (option.min, option.max) == (bounds.get("ge"), bounds.get("le")), name


def test_what_a_person_asked_for_says_who_asked_and_why_and_names_no_stage(sftriage, run, trace, make_manifest):
    # GIVEN a capture that a person asked for, and one that a rule did
    store = LocalStore(run.path)
    store.put(CAPTURE, trace, lambda artefact: asked_for(make_manifest(CAPTURE, artefact)))
    store.put("w0-49-r2-x-1", trace, lambda artefact: make_manifest("w0-49-r2-x-1", artefact, stage=None))
    # WHEN it is shown THEN nothing is blank that has an answer
    shown = sftriage("traces", "show", CAPTURE, "--run", run.path).out.splitlines()
    assert "because     requested by ada: why is the loader slow?" in shown
    (rule,) = (line for line in shown if line.startswith("rule"))
    assert rule.startswith("rule        none, requested by hand; under the limits of policy default (sha256 cdcdcdcdcd")
    # AND in a list it has no suspect stage and no window, as the other has
    asked, other = (
        next(line for line in sftriage("traces", "list", "--run", run.path).out.splitlines() if name in line)
        for name in (CAPTURE, "w0-49-r2-x-1")
    )
    assert "all local stages" in other
    assert "100 to 149" in other
    assert "stages" not in asked
    assert "(requested)" in asked


REQUEST = ManualRequest("a1", (0, 2), "alice", "it is slow", steps=3)


def test_a_request_that_is_left_is_taken_up_once(tmp_path: Path) -> None:
    # GIVEN a request that a person left in a run's directory, beside what is no file
    directory = RunDirectory(tmp_path)
    (directory.requests / "a0.json").mkdir(parents=True)
    leave(directory, REQUEST)
    # WHEN the run takes it up THEN it is what was left, and it is gone once its file is removed
    ((path, request),) = requests_in(directory)
    assert request == REQUEST
    path.unlink()
    assert requests_in(directory) == []
