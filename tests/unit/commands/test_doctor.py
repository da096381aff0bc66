"""What works on this machine, tried here."""

import json

import pytest

from sftriage.recorder import moments
from sftriage.runtime import doctor


def states(findings):
    return {one.what: one.state for one in findings}


def test_where_all_is_there_it_says_which_form_of_the_recorder_runs(tmp_path, sftriage):
    # GIVEN this machine WHEN it is asked THEN a rank was recorded and read, and nothing is left
    found = {one.what: one for one in doctor.examine(tmp_path)}
    assert (found["rings"].state, str(tmp_path) in found["rings"].detail) == ("ok", True)
    assert found["recorder"].detail.startswith(f"in {moments.FORM.name}")
    assert list(tmp_path.iterdir()) == []
    # AND a program gets the same
    said = sftriage("doctor", "--json")
    assert said.code == 0
    assert {one["what"] for one in json.loads(said.out)} >= {"python", "recorder", "rings", "nsys"}


def test_without_the_form_in_c_it_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(moments, "FORM", moments.PYTHON)
    monkeypatch.setattr(moments, "WHY_NOT_C", "it was lost")
    (found,) = [one for one in doctor.examine(tmp_path) if one.what == "recorder"]
    assert (found.state, "it was lost" in found.detail) == ("limited", True)


def test_where_nothing_can_be_recorded_it_fails(tmp_path, monkeypatch, sftriage):
    # GIVEN a file system that is full
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert states(doctor.examine(tmp_path))["rings"] == "missing"
    said = sftriage("doctor")
    assert (said.code, "missing" in said.out) == (1, True)


def test_without_locks_liveness_is_limited(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refused)
    found = states(doctor.examine(tmp_path))
    assert (found["rings"], found["locks"]) == ("ok", "limited")


@pytest.mark.parametrize("program", ["nsys", "py-spy"])
def test_a_profiler_that_is_not_there_is_missing(tmp_path, monkeypatch, sftriage, program):
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    assert states(doctor.examine(tmp_path))[program] == "missing"
    # AND a person is told what to install, to the letter
    assert "pip install 'sftriage[stacks]'" in sftriage("doctor").out
