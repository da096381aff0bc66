"""Captures that a person requests: requests are checked, and their captures show the requester and the reason."""

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
    ("reason", "user", "refusal"),
    [
        *((odd, "ada", "the reason has control characters; give one line of text") for odd in ODD),
        ("", "ada", "the reason is empty; give one line of text"),
        ("x" * 501, "ada", "the reason is too long; 500 characters at most"),
        ("\udcff", "ada", "the reason is not UTF-8 text"),
        ("a look", "a\nb", "the requester's name has control characters; give one line of text"),
        ("a look", "x" * 501, "the requester's name is too long; 500 characters at most"),
    ],
)
def test_a_reason_or_a_name_must_be_a_line_of_text(sftriage, run, monkeypatch, reason, user, refusal):
    monkeypatch.setenv("LOGNAME", user)
    outcome = sftriage("capture", "--run", run.path, "--rank", 0, "--reason", reason)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"sftriage: {refusal}\n")
    assert not list(run.requests.iterdir())


def test_capture_has_the_options_of_a_policy_with_their_defaults_and_bounds():
    """(--rank selects the ranks.)"""
    signature = inspect.signature(flattened(capture), eval_str=True).parameters
    for name, field in Capture.model_fields.items():
        if name in ("ranks", "sample", "control_ranks"):
            continue
        if name in ("torch", "nsys", "stacks"):
            options = {f"nsys_{one}" if name == "nsys" else one for one in field.annotation.model_fields}
            assert options <= signature.keys()
            # (if not set, the default of the policy applies)
            assert {signature[one].default.default for one in options} == {None}
            continue
        option = signature[name].default
        assert option.default == field.default, name
        bounds = {bound: getattr(one, bound) for one in field.metadata for bound in ("ge", "le") if hasattr(one, bound)}
        assert (option.min, option.max) == (bounds.get("ge"), bounds.get("le")), name


def test_a_requested_capture_shows_requester_and_reason_but_no_stage(sftriage, run, trace, make_manifest):
    # GIVEN a capture requested by a person, and one by a rule
    store = LocalStore(run.path)
    store.put(CAPTURE, trace, lambda artefact: asked_for(make_manifest(CAPTURE, artefact)))
    store.put("w0-49-r2-x-1", trace, lambda artefact: make_manifest("w0-49-r2-x-1", artefact, stage=None))
    # WHEN it is shown THEN it has a reason and a policy
    shown = sftriage("traces", "show", CAPTURE, "--run", run.path).out.splitlines()
    assert "because     requested by ada: why is the loader slow?" in shown
    (rule,) = (line for line in shown if line.startswith("rule"))
    assert rule.startswith("rule        none, requested by hand; under the limits of policy default (sha256 cdcdcdcdcd")
    # AND in a list it has no suspect stage and no window, unlike the other
    requested, other = (
        next(line for line in sftriage("traces", "list", "--run", run.path).out.splitlines() if name in line)
        for name in (CAPTURE, "w0-49-r2-x-1")
    )
    assert "all local stages" in other
    assert "100 to 149" in other
    assert "stages" not in requested
    assert "(requested)" in requested


REQUEST = ManualRequest("a1", (0, 2), "alice", "it is slow", steps=3)


def test_a_request_is_accepted_once(tmp_path: Path) -> None:
    # GIVEN a request in a run's directory, beside a directory
    directory = RunDirectory(tmp_path)
    (directory.requests / "a0.json").mkdir(parents=True)
    leave(directory, REQUEST)
    # WHEN the run reads it THEN it is unchanged, and gone once its file is removed
    ((path, request),) = requests_in(directory)
    assert request == REQUEST
    path.unlink()
    assert requests_in(directory) == []
