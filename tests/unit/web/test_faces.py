"""Who is still there of a run, who watches it, who is heard of, and where copies are: every state has a face."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from sftriage.base.process import start_ticks
from sftriage.recorder import Monitor
from sftriage.recorder.files import RingFile
from sftriage.runs import liveness
from sftriage.runs.directory import read_info, write_info
from sftriage.runs.liveness import (
    RankCoverage,
    Watcher,
    WatcherLook,
    launcher_of,
    note_launcher,
    telemetry_of,
    trainers_alive,
    watcher_of,
)
from sftriage.traces.store import LocalStore, Upload
from sftriage.windows.steplog import StepLog
from tests.scenario import info_of, verdict
from tests.unit.web.asking import text_of

URL = "s3://our-traces/pretraining"
DONE = datetime(2027, 1, 15, 8, 5, tzinfo=timezone.utc)
NOBODY = 2**22 + 1
"""No process: pids end before."""


# Who watches.


@pytest.fixture
def rings(run):
    return run.directory.path / "rings"


@pytest.fixture
def trainer(rings):
    """A trainer that goes on: this process."""
    return RingFile(rings, info_of(0, 1, pid=os.getpid(), pid_start_ticks=_ticks(os.getpid())), 8)


def _ticks(pid: int) -> int:
    return start_ticks(pid) or 0


@contextlib.contextmanager
def held(lock, pid: int):
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(pid))
        file.flush()
        yield


def test_whoever_holds_the_lock_watches_and_a_run_that_was_never_locked_is_not_spoken_of(run, rings):
    assert watcher_of(run.directory, rings) == Watcher("unknown")
    with held(run.directory.lock, os.getpid()):
        assert watcher_of(run.directory, rings) == Watcher("watched", os.getpid())
    # AND so does a holder of another container
    with held(run.directory.lock, NOBODY):
        assert watcher_of(run.directory, rings) == Watcher("watched")


def test_a_lock_is_not_tried_while_its_holder_is_known(run, rings, monkeypatch):
    # (whoever tries it keeps `sftriage attach` from it for that moment)
    monkeypatch.setattr(liveness, "is_locked", lambda lock: pytest.fail("tried"))
    with held(run.directory.lock, os.getpid()):
        watcher_of(run.directory, rings)


def test_a_job_of_which_nothing_is_recorded_says_why_until_something_is(run, rings):
    why = "no sftriage.Monitor was made"
    write_info(run.directory, replace(read_info(run.directory), not_recorded=why))
    with held(run.directory.lock, os.getpid()):
        assert f"No step is recorded yet: {why}." in text_of(run.get())
    write_info(run.directory, replace(read_info(run.directory), ended_at="2027-01-15T08:10:00+00:00"))
    rings.rmdir()
    assert f"Nothing was recorded: {why}." in text_of(run.get())
    run.decide(verdict(100))
    assert why not in text_of(run.get())


def test_a_job_that_goes_on_while_nobody_watches(run, rings, trainer):
    # GIVEN a healthy job whose sftriage was killed
    run.directory.lock.write_text(str(NOBODY))
    assert watcher_of(run.directory, rings) == Watcher("unwatched")
    run.decide(verdict(100))
    seen = run.get()
    # THEN nothing is said to be healthy: it is unknown since the last step that was judged, and how to watch it is said
    for words in ("Unknown since step 149", "nobody watches it any more", "at step 149 it was: yes", "nobody watches"):
        assert words in text_of(seen)
    assert 'class="face face-unknown"' in seen.text
    assert f"sftriage attach --run {run.directory.path}" in text_of(seen)


@pytest.mark.parametrize(
    ("ended_at", "swept", "headline", "command"),
    [
        # Killed, and its job after it: its rings lie there still, with steps that nobody has judged.
        ("", False, "Unknown since step 149", "sftriage attach --run"),
        # The same once another run has swept its rings, or the machine has started again.
        ("", True, "Unknown since step 149", "sftriage analyze"),
        # It saw its end, and was killed while it tidied up.
        ("2027-01-15T08:10:00+00:00", False, "Healthy", None),
        ("2027-01-15T08:10:00+00:00", True, "Healthy", None),
        # An earlier version did not say when a run had ended.
        (None, False, "Unknown since step 149", "sftriage attach --run"),
        (None, True, "Healthy", None),
    ],
)
def test_a_run_that_everybody_has_left_is_unknown_unless_it_was_seen_to_end(
    run, rings, ended_at, swept, headline, command
):
    run.directory.lock.write_text(str(NOBODY))
    write_info(run.directory, replace(read_info(run.directory), ended_at=ended_at))
    run.decide(verdict(100))
    if swept:
        rings.rmdir()
    seen = text_of(run.get())
    assert headline in seen
    assert ("run-1 ended" in seen) is (command is None)
    for one in ("sftriage attach --run", "sftriage analyze"):
        assert (one in seen) is (one == command)


def test_a_run_whose_rings_are_on_another_host_goes_on_while_its_lock_is_held(run, rings):
    write_info(run.directory, replace(read_info(run.directory), ended_at=""))
    rings.rmdir()
    run.decide(verdict(100))
    with held(run.directory.lock, NOBODY):
        assert "run-1 running" in text_of(run.get())


def test_a_job_that_was_taken_over_says_so(run, rings):
    # GIVEN a launcher that another process than the one that watches has started
    run.decide(verdict(100))
    parent = os.getppid()
    note_launcher(rings, parent)
    with held(run.directory.lock, os.getpid()):
        assert watcher_of(run.directory, rings) == Watcher("taken_over", os.getpid())
        seen = text_of(run.get())
    assert "running, taken over" in seen
    assert f"process {os.getpid()} watches it now" in seen


@pytest.mark.parametrize("note", ["", "x y", "1", "{}", "\0", '{"pid": 1, "start_ticks": 1}'])
def test_a_note_that_makes_no_sense_is_none(run, rings, note):
    (rings / "launcher").write_text(note)
    with held(run.directory.lock, os.getpid()):
        assert watcher_of(run.directory, rings).state == "watched"


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"-1", b"1e9", b"9" * 60])
def test_a_lock_with_anything_in_it_is_looked_at(run, rings, content):
    run.directory.lock.write_bytes(content)
    assert watcher_of(run.directory, rings).state == "left"


def test_it_is_not_looked_all_the_time(run, rings, monkeypatch):
    looked = []
    monkeypatch.setattr(liveness, "watcher_of", lambda *_: looked.append(1) or Watcher("watched"))
    look = WatcherLook(run.directory)
    for now_s in (0.0, 1.0, 1.9, 2.1, 3.0, 4.2):
        look.at(now_s, rings)
    assert len(looked) == 3


def test_a_run_that_has_ended_says_that_it_has(run, rings):
    run.decide(verdict(100))
    rings.rmdir()
    assert "The run has ended." in text_of(run.get())


def test_a_run_that_is_watched_and_judges_nothing_is_looked_at_twice(run, rings):
    # GIVEN a window that is ten minutes old
    run.decide(verdict(100))
    said = "No window has been judged for some time"
    assert said not in text_of(run.get())
    with held(run.directory.lock, os.getpid()):
        run.source._opened.watcher._at_s = float("-inf")
        assert said in text_of(run.get())


# Who is heard of.


@pytest.mark.parametrize(
    ("ranks", "world_size", "attempt", "found"),
    [
        ([0, 1, 2, 3], 4, 0, RankCoverage(4, 4)),
        ([0, 3], 4, 0, RankCoverage(2, 4, (1, 2))),
        ([5], 1024, 0, RankCoverage(1, 1024, (0, 1, 2, 3, 4, 6, 7, 8))),
        ([0], 1, 7, RankCoverage()),
        ([], 4, 0, RankCoverage()),
    ],
)
def test_who_is_heard_of_is_seen_from_the_logs(run, ranks, world_size, attempt, found):
    for rank in ranks:
        StepLog(run.directory.steps, info_of(rank, world_size)).close()
    assert telemetry_of(run.directory.steps, attempt) == found
    run.decide(verdict(100))
    if found.lacking and attempt == 0:
        seen = text_of(run.get())
        assert f"{found.ranks} of {world_size:,} ranks record" in seen
        assert f"Nothing is heard of ranks {', '.join(map(str, found.missing))}" in seen


@pytest.mark.parametrize("content", [b"", b"x" * 5000])
def test_a_log_that_is_none_says_only_that_it_is_there(run, content):
    (run.directory.steps / "rank-0.0.steps").write_bytes(content)
    assert telemetry_of(run.directory.steps, None) == RankCoverage(1)


@pytest.mark.parametrize(("coverage", "said"), [(0.75, "Only 75% of the newest"), (1.0, ""), (0.99, ""), (None, "")])
def test_low_coverage_is_said(run, coverage, said):
    run.decide(replace(verdict(100), numbers={} if coverage is None else {"coverage": coverage}))
    assert ("steps came in" in text_of(run.get())) is bool(said)
    assert said in text_of(run.get())


def test_a_verdict_by_the_devices_clock_says_so(run):
    run.decide(replace(verdict(100, "suspect"), clock="device"))
    seen = text_of(run.get())
    assert "by the devices' clock" in seen
    assert "times are on the devices' clock" in seen


# Where copies are.


@pytest.fixture
def elsewhere(captured):
    """A run whose captures go to a store elsewhere."""
    write_info(captured.directory, replace(read_info(captured.directory), store=URL))
    return captured


@pytest.mark.parametrize(
    ("upload", "busy", "pill", "said"),
    [
        (None, False, "to be stored", "Nobody sends it now"),
        (None, True, "to be stored", "waits for its turn"),
        (Upload(url=URL, state="waiting"), True, "to be stored", "waits for its turn"),
        (Upload(url=URL, state="uploading"), True, "being stored", f"on its way to {URL}"),
        # Its sender has died.
        (Upload(url=URL, state="uploading"), False, "to be stored", "Nobody sends it now"),
        (Upload(url=URL, state="failed", reason="refused <b>"), True, "not stored", "refused <b>. It is tried again"),
        (Upload(url=URL, state="failed", reason="refused"), False, "not stored", "sftriage traces upload --run"),
        (Upload(url=URL, state="stored", verified_at=DONE), False, "stored", f"{URL} since 2027-01-15 08:05:00"),
    ],
)
def test_every_state_of_an_upload_has_a_face(elsewhere, upload, busy, pill, said):
    # GIVEN a capture that is so far on its way
    outbox = LocalStore(elsewhere.directory.path)
    if upload is not None:
        outbox.note_upload("c-1", upload)
    with outbox.uploading() if busy else contextlib.nullcontext():
        overview, page = elsewhere.get(), elsewhere.get("/captures/c-1")
    # THEN the overview says so at a glance, and the capture's page with what there is to know
    assert pill in text_of(overview)
    assert said in text_of(page)
    failed = upload is not None and upload.state == "failed"
    assert ("could not be stored" in text_of(overview)) is failed
    assert "<b>" not in page.text


def test_a_run_that_keeps_its_captures_here_speaks_of_no_copies(captured):
    assert "upload-" not in captured.get().text
    assert "copy elsewhere" not in text_of(captured.get("/captures/c-1"))


def test_a_page_that_listens_hears_of_an_upload(elsewhere):
    before = elsewhere.source.view().version
    LocalStore(elsewhere.directory.path).note_upload("c-1", Upload(url=URL, state="stored", verified_at=DONE))
    assert elsewhere.source.view().version != before


def test_a_trace_that_is_only_elsewhere_is_fetched_from_there(captured, store, tmp_path):
    # GIVEN a capture whose trace has gone from here once its copy was verified
    share = tmp_path / "share"
    manifest = store.manifest("c-1")
    there = share / "resnet" / "run-1" / "c-1"
    there.mkdir(parents=True)
    here = captured.directory.path / "captures" / "c-1" / "trace.json.gz"
    here.rename(there / "trace.json.gz")
    (there / "manifest.json").write_bytes(manifest.to_json())
    note = Upload(url=share.as_uri(), state="stored", verified_at=DONE)
    LocalStore(captured.directory.path).note_upload("c-1", note)
    # WHEN it is downloaded THEN it comes from there
    answer = captured.get("/captures/c-1/files/trace.json.gz")
    assert answer.body == (there / "trace.json.gz").read_bytes()
    # AND where that is gone too, it is said
    (there / "trace.json.gz").unlink()
    assert captured.get("/captures/c-1/files/trace.json.gz").status == 422
    LocalStore(captured.directory.path).note_upload("c-1", note.model_copy(update={"url": "file:///nowhere/at/all"}))
    assert captured.get("/captures/c-1/files/trace.json.gz").status == 404


@pytest.mark.parametrize("content", ["", "{}", "[" * 10_000, json.dumps({"url": "x" * 10_000, "state": "failed"})])
def test_an_upload_that_makes_no_sense_is_none(captured, content):
    (captured.directory.path / "captures" / "c-1" / "upload.json").write_text(content)
    assert captured.get("/captures/c-1").status == captured.get().status == 200


NOTE = '{"pid": %s, "start_ticks": 1}'


def test_a_launcher_is_known_as_long_as_it_is_there(tmp_path):
    # GIVEN a launcher that is noted
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note_launcher(tmp_path, launcher.pid)
    assert launcher_of(tmp_path) == launcher.pid
    # WHEN it has ended, THEN it is not there, whoever has its number later
    launcher.communicate(timeout=60)
    assert launcher_of(tmp_path) is None


@pytest.mark.parametrize(
    "note",
    [None, "", "12", "{}", "\x00" * 200, *(NOTE % pid for pid in (os.getpid(), "null", 99999999, -1, 10**30, '"1"'))],
    ids=range(11),
)
def test_a_note_that_is_none_is_of_nobody(tmp_path, note):
    if note is not None:
        (tmp_path / "launcher").write_text(note)
    assert launcher_of(tmp_path) is None


def test_trainers_are_there_as_long_as_one_is(tmp_path):
    assert not trainers_alive(tmp_path)
    (tmp_path / "rank-7.0.ring").write_bytes(b"no ring")
    assert not trainers_alive(tmp_path)
    monitor = Monitor(rank=0, world_size=1, rings=tmp_path)
    assert trainers_alive(tmp_path)
    monitor.close()
