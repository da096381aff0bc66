"""Policy files that change while a job runs: valid changes apply, invalid ones are reported once and change nothing."""

import os
import threading
from functools import partial

import pytest

from sftriage.controller.controller import Controller
from sftriage.model.events import PolicyChanged, WindowJudged
from sftriage.policy import in_force as module
from sftriage.policy.in_force import PolicyFiles, change_lines
from sftriage.policy.parsing import PolicyError
from sftriage.runs.journal import Journal, read_journal
from sftriage.traces.disk import Disk
from tests.unit.controller.test_controller import window

POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {{name: {name}}}
spec:
  detection: {{window_steps: {window}}}
  rules: [{{name: any, match: {{gain: ">= {gain}"}}, capture: {{steps: 3}}, cooldown: 0s}}]
"""
BROKEN = POLICY.format(name="broken", window=50, gain="5")
A, B = (POLICY.format(name=name, window=50, gain="5%") for name in "ab")
LATER_S = 1e12
"""A time at which whatever has been written has long settled."""


def kinds(files, polls=3):
    """What a few polls one after the other have to say."""
    return [change.kind for change in (files.poll() for _ in range(polls)) if change]


def name(files):
    return files.current.loaded[0].policy.metadata.name


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(A, encoding="utf-8")
    return path


@pytest.fixture
def files(path):
    return PolicyFiles([path], now=lambda: LATER_S)


def test_the_first_content_must_be_valid(path):
    path.write_text(BROKEN, encoding="utf-8")
    with pytest.raises(PolicyError, match=r"spec.rules\[0\].match.gain"):
        PolicyFiles([path])


@pytest.mark.parametrize(
    ("contents", "reported", "in_force"),
    [
        ((A,), [], "a"),
        ((B,), ["changed"], "b"),
        # A mistake is reported once, even if it is saved again; another mistake is reported too.
        ((BROKEN, BROKEN, BROKEN + "#"), ["refused", "refused"], "a"),
        # A return to the valid content is reported too.
        ((BROKEN, A), ["refused", "restored"], "a"),
        # A file that is gone keeps the last good policy until it is back.
        ((None, B), ["refused", "changed"], "b"),
    ],
)
def test_a_valid_change_applies_and_an_invalid_one_is_reported_once(path, files, contents, reported, in_force):
    found = []
    for content in contents:
        path.unlink() if content is None else path.write_text(content, encoding="utf-8")
        found += kinds(files)
    assert (found, name(files)) == (reported, in_force)


def test_a_config_maps_symbolic_links_are_followed(tmp_path):
    # GIVEN a mounted ConfigMap: policy.yaml -> ..data/policy.yaml, ..data -> ..1
    for version, text in (("..1", A), ("..2", B)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "policy.yaml").write_text(text, encoding="utf-8")
        os.utime(tmp_path / version / "policy.yaml", ns=(10**18, 10**18))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    files = PolicyFiles([tmp_path / "policy.yaml"], now=lambda: LATER_S)
    assert name(files) == "a"
    # WHEN Kubernetes turns ..data, as it does, by a rename
    (tmp_path / "..tmp").symlink_to("..2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    # THEN that is a change
    assert (kinds(files), name(files)) == (["changed"], "b")


def test_problems_have_their_place(path, files):
    path.write_text(BROKEN, encoding="utf-8")
    assert any(f"{path}:7:" in line and "spec.rules[0].match.gain" in line for line in files.poll().problems)
    path.unlink()
    assert f"{path}: no such file" in files.poll().problems[0]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_a_pipe_is_refused_without_waiting(path, files, make):
    path.unlink()
    make(path)
    assert (kinds(files), name(files)) == (["refused"], "a")


def test_a_half_written_file_raises_no_alarm(path):
    # GIVEN a file that was changed just now
    files = PolicyFiles([path], now=lambda: path.stat().st_mtime)
    path.write_text(B[: len(B) // 2], encoding="utf-8")
    assert files.poll() is None
    # WHEN the rest comes
    path.write_text(B, encoding="utf-8")
    # THEN the only report is that the policy has changed
    assert (kinds(files), name(files)) == (["changed"], "b")
    # AND a file that stays half written is reported at the second check
    path.write_text(B[: len(B) // 2], encoding="utf-8")
    assert [files.poll(), files.poll().kind, files.poll()] == [None, "refused", None]


def test_changes_for_the_next_run_are_listed(path, files):
    path.write_text(POLICY.format(name="a", window=100, gain="5%"), encoding="utf-8")
    change = files.poll()
    assert (change.kind, change.later) == ("changed", ("detection.window_steps",))
    assert "detection.window_steps takes effect with the next run" in change_lines(change)[0]
    # WHEN it is as it was when the run began
    path.write_text(POLICY.format(name="a", window=50, gain="6%"), encoding="utf-8")
    assert files.poll().later == ()


def test_the_controller_applies_and_records_a_change_at_the_next_window(path, files, tmp_path, caplog):
    # GIVEN a controller whose policy wants more than the suspect is worth
    path.write_text(POLICY.format(name="high", window=50, gain="90%"), encoding="utf-8")
    assert files.poll().kind == "changed"
    controller = Controller(files, Journal(tmp_path / "decisions.jsonl"), tmp_path / "state.json")
    assert controller.take(window(0, late_s=0.02), 100.0).decision.outcome == "ignore"
    # WHEN the policy is broken, and then changed to one that wants less
    path.write_text(BROKEN, encoding="utf-8")
    assert controller.take(window(20, late_s=0.02), 101.0).decision.outcome == "ignore"
    path.write_text(B, encoding="utf-8")
    judged = controller.take(window(40, late_s=0.02), 102.0)
    # THEN the window after the change is decided by it, and the capture names it
    assert judged.decision.outcome == "capture"
    assert controller.trigger_of(judged.decision.requests[0].capture_id).policy == "b"
    # AND the mistake and the change are in the log and in the journal, before the windows that they came with
    assert "keeping high as it was" in caplog.text
    assert "now in force: b" in caplog.text
    entries = list(read_journal(tmp_path / "decisions.jsonl"))
    assert [type(entry) for entry in entries] == [WindowJudged, *(PolicyChanged, WindowJudged) * 2]
    refused, changed = entries[1], entries[3]
    assert (refused.kind, refused.policies[0].name, refused.policies[0].document) == ("refused", "high", None)
    assert "spec.rules[0].match.gain" in refused.problems[0]
    assert (changed.kind, changed.time_s, changed.policies[0].name) == ("changed", 102.0, "b")
    assert changed.policies[0].document["spec"]["rules"][0]["match"]["gain"] == ">= 5%"


def test_a_hanging_disk_delays_nothing(path, files, monkeypatch):
    # GIVEN files that are changed, on a disk that does not answer
    disk, answers = Disk(), threading.Event()
    files.do = partial(disk.do, patience_s=0.01)
    path.write_text(B, encoding="utf-8")
    original = module._content
    monkeypatch.setattr(module, "_content", lambda path: answers.wait(20.0) and original(path))
    # THEN what is in force stays, at once
    assert (kinds(files), name(files)) == ([], "a")
    # AND once it answers, the change is taken over
    answers.set()
    disk.drain(20.0)
    assert (kinds(files), name(files)) == (["changed"], "b")
    disk.close()


def test_a_folder_stands_for_its_current_policies(tmp_path):
    # GIVEN the folder of a mounted ConfigMap
    (tmp_path / "001-a.yaml").write_text(A, encoding="utf-8")
    files = PolicyFiles([tmp_path], now=lambda: LATER_S)
    # WHEN another policy comes THEN both are in force, by their files' names
    (tmp_path / "000-c.yaml").write_text(A.replace("name: a", "name: c").replace("name: any", "name: other"), "utf-8")
    assert kinds(files) == ["changed"]
    assert [one.policy.metadata.name for one in files.current.loaded] == ["c", "a"]
    # WHEN one goes THEN the other one is
    (tmp_path / "000-c.yaml").unlink()
    assert (kinds(files), name(files)) == (["changed"], "a")
    # WHEN all are gone THEN the last good ones hold
    (tmp_path / "001-a.yaml").unlink()
    assert (kinds(files), name(files)) == (["refused"], "a")
    with pytest.raises(PolicyError):
        PolicyFiles([tmp_path])
