"""Copies of a run's captures, from the command line: sent, reported, and kept up to date."""

import dataclasses
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from sftriage.model.captures import CaptureResult
from sftriage.model.events import CaptureChanged
from sftriage.runs.directory import RunDirectory, read_info, write_info
from sftriage.runtime import copies
from sftriage.runtime.copies import RunUploads, follow
from sftriage.sinks.stream import Stream
from sftriage.traces import uploading
from sftriage.traces.manifest import CauseInfo, PlaceInfo
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from sftriage.traces.uploading import Uploader
from tests.integration.processes import wait_until
from tests.unit.conftest import run_in
from tests.unit.traces.faulty import CONTENT, FaultyObjects, captured, run_of
from tests.unit.traces.test_uploading import SLEPT


@pytest.fixture
def run(tmp_path, store, put) -> RunDirectory:
    """A run with two captures."""
    directory = run_in(tmp_path / "run")
    put("c-1")
    put("c-2", second=1)
    return directory


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    return tmp_path / "shared" / "traces"


def test_captures_are_uploaded_and_their_place_is_shown(sftriage, run, elsewhere):
    # GIVEN a run that keeps its captures here alone
    refused = sftriage("traces", "upload", "--run", run.path)
    assert (refused.code, "has no store; name one with --store" in refused.err) == (2, True)
    assert "upload" not in sftriage("traces", "show", "c-1", "--run", run.path).out
    assert sftriage("traces", "list", "--run", run.path, "--json").json[0]["upload"] is None
    # WHEN they are uploaded to a directory
    done = sftriage("traces", "upload", "--run", run.path, "--store", elsewhere)
    # THEN they are there, and the run says so
    assert (done.code, done.out) == (0, f"2 of 2 captures are in {elsewhere.as_uri()}\n")
    assert RemoteStore.open(str(elsewhere)).ids() == {"resnet/run-1/c-1", "resnet/run-1/c-2"}
    assert f"upload      stored in {elsewhere.as_uri()}, verified" in (
        sftriage("traces", "show", "c-1", "--run", run.path).out
    )
    row = sftriage("traces", "list", "--run", run.path, "--json").json[0]
    assert row["upload"].keys() == {"state", "url", "reason", "verified_at"}
    assert (row["upload"]["state"], row["upload"]["url"]) == ("stored", elsewhere.as_uri())
    # AND it keeps the store in mind, and has no other
    assert sftriage("traces", "upload", "--run", run.path, "--json").json["stored"] == 2
    other = sftriage("traces", "upload", "--run", run.path, "--store", elsewhere / "x")
    assert (other.code, "a run has only one store" in other.err) == (2, True)
    # AND they are listed, and fetched, by whoever knows no run
    listed = sftriage("traces", "list", "--store", elsewhere, "--json").json
    assert [row["capture_id"] for row in listed] == ["c-1", "c-2"]
    got = sftriage("traces", "get", "c-2", "--store", elsewhere, "--out", run.path / "got")
    assert (run.path / "got").read_bytes() == LocalStore(run.path).path("c-2", "trace.json.gz").read_bytes(), got.err


def test_what_is_changed_here_changes_there_at_once(sftriage, run, elsewhere):
    sftriage("traces", "upload", "--run", run.path, "--store", elsewhere)
    store = RemoteStore.open(str(elsewhere))
    # WHEN one is pinned and the others pruned
    assert sftriage("traces", "pin", "c-2", "--run", run.path).code == 0
    assert store.pinned() == {"resnet/run-1/c-2"}
    assert "c-1" in sftriage("traces", "prune", "--run", run.path, "--bytes", "1Ki").out
    # THEN they went there too
    assert store.ids() == {"resnet/run-1/c-2"}
    assert not list((elsewhere / "resnet" / "run-1").glob("c-1"))


def test_traces_are_removed_locally_on_request(sftriage, run, elsewhere):
    sftriage("traces", "upload", "--run", run.path, "--store", elsewhere, "--drop-local")
    assert not list((run.path / "captures").rglob("trace.json.gz"))
    got = sftriage("traces", "get", "c-1", "--run", run.path, "--out", run.path / "got")
    assert (got.code, (run.path / "got").exists()) == (0, True), got.err


def test_while_a_run_goes_on_a_trace_goes_from_here_once_its_capture_is_stored_and_not_before(run, elsewhere):
    # GIVEN a run that keeps its traces elsewhere alone
    info = dataclasses.replace(read_info(run), store=elsewhere.as_uri(), drop_local=True)
    kept = RunUploads(run, info)
    stream = Stream([kept])
    stream.start()
    # WHEN one capture is stored and another one runs
    stream.publish(CaptureChanged(1.0, CaptureResult("c-1", 2, "running")))
    stream.publish(CaptureChanged(1.0, CaptureResult("c-2", 2, "stored")))
    # THEN of the one the trace is only there, and of the other here until the end
    first, second = (run.path / "captures" / one / "trace.json.gz" for one in ("c-1", "c-2"))
    wait_until(lambda: not second.exists())
    stream.close(30.0)
    assert first.exists()
    message: list[str] = []
    kept.finish(message.append)
    assert message == [f"2 captures are in {elsewhere.as_uri()}"]
    assert not first.exists()


def test_a_failed_upload_is_reported_and_fails_the_command(sftriage, run, elsewhere, monkeypatch):
    monkeypatch.setattr(uploading, "FIRST_DELAY_S", 0.01)
    # GIVEN a capture that cannot be uploaded
    (run.path / "captures" / "c-1" / "trace.json.gz").write_bytes(b"")
    # WHEN it is tried
    failed = sftriage("traces", "upload", "--run", run.path, "--store", elsewhere, "--json")
    # THEN the other one is there, and the message says why this one is not
    assert failed.code == 1
    answer = json.loads(failed.out)
    assert (answer["stored"], answer["done"]) == (1, False)
    assert answer["left"][0]["capture_id"] == "c-1"
    assert "0 bytes" in answer["left"][0]["reason"]
    assert failed.err.startswith("sftriage: 1 capture is not in the store yet (")


def test_while_another_process_uploads_it_is_left_to_it(sftriage, run, elsewhere):
    with LocalStore(run.path).uploading():
        refused = sftriage("traces", "upload", "--run", run.path, "--store", elsewhere)
    assert (refused.code, "another process is uploading" in refused.err) == (2, True)


def without_obstore(monkeypatch):
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_what_talks_to_a_store_only_that_is_refused(sftriage, run, monkeypatch):
    without_obstore(monkeypatch)
    assert sftriage("traces", "list", "--run", run.path).code == 0
    refusal = sftriage("traces", "list", "--store", "s3://bucket").refusal
    assert refusal == "sftriage: a bucket needs obstore: pip install 'sftriage[store]'\n"


def test_a_directory_needs_nothing_that_talks_to_buckets(sftriage, monkeypatch, tmp_path):
    # GIVEN a directory that hosts share, and no obstore
    without_obstore(monkeypatch)
    (shared := tmp_path / "shared").mkdir()
    manifest = captured(created_at=datetime.now(timezone.utc))
    store = RemoteStore.open(str(shared), job=manifest.job, run=manifest.run)
    # WHEN a capture is put there THEN it is listed and fetched
    store.put_artefact("c-1", manifest.artefacts[0], CONTENT)
    store.put_manifest(manifest)
    (listed,) = sftriage("traces", "list", "--store", shared, "--json").json
    assert (listed["capture_id"], listed["cause"]) == ("c-1", None)
    got = sftriage("traces", "get", "c-1", "--store", shared, "--out", tmp_path / "t")
    assert (got.code, (tmp_path / "t").read_bytes()) == (0, CONTENT)
    # AND what is found out later is listed too, in words and as values
    place = PlaceInfo(function="pause_for", file="/job/train.py", line=70, source="time.sleep(fault.delay_s)")
    cause = CauseInfo(code="sleep", sure=True, sentence="It sleeps.", next_step="Look there.", place=place)
    store.note("c-1", SLEPT.model_copy(update={"cause": cause}))
    (listed,) = sftriage("traces", "list", "--store", shared, "--json").json
    assert listed["cause"]["code"] == "sleep"
    assert "time.sleep at train.py:70" in " ".join(sftriage("traces", "list", "--store", shared).out.split())
    # AND nothing is left of one that is removed
    store.remove("c-1")
    assert list(shared.iterdir()) == []


def test_the_end_of_a_run_waits_only_as_long_as_something_moves(run):
    # GIVEN a store that is away
    objects = FaultyObjects()
    objects.fails = {"any"}
    uploader = Uploader(run.path, run_of(objects), "s3://bucket")
    uploader.start()
    # WHEN it is followed and nothing moves, THEN that has an end, and it is known what is left
    standing = follow(uploader, limit_s=60.0, still_s=0.3)
    assert uploader.close(10.0)
    assert standing.left.keys() == {"c-1", "c-2"}
    assert not standing.done


def test_a_store_that_is_down_is_reported_once_and_the_change_is_kept(run, monkeypatch, caplog):
    # GIVEN a run whose captures are in a store that cannot be reached now
    objects = FaultyObjects()
    monkeypatch.setattr(copies.RemoteStore, "open", lambda url, **_: run_of(objects))
    write_info(run, dataclasses.replace(read_info(run), store="s3://bucket"))
    Uploader(run.path, run_of(objects), "s3://bucket").turn()
    objects.fails = {"any"}
    store = LocalStore(run.path, changed=lambda: copies.push(run.path))
    # WHEN several things change
    store.pin("c-1")
    store.pin("c-2")
    # THEN they are so here, and one message says what the copy lacks
    assert store.pinned() == {"c-1", "c-2"}
    assert caplog.text.count("is not up to date") == 1
    assert f"sftriage traces upload --run {run.path}" in caplog.text
