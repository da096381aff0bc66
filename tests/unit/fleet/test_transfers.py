"""A capture that is fetched from another host is taken whole and as its manifest says, or not at all."""

import pytest

from sftriage.errors import CaptureError, SftriageError
from sftriage.fleet import transfers
from sftriage.fleet.transfers import REPORT_S, CountedFile, Fetching, HostCaptures, StoredBeforeError, Transfer
from sftriage.fleet.wire import RunName
from sftriage.model.captures import CaptureResult
from sftriage.traces.manifest import MANIFEST_NAME, Manifest
from sftriage.traces.store import LocalStore
from tests.unit.conftest import keep

RESULT = CaptureResult("c-1", 3, "stored")
UPLOADING = Transfer(RESULT, "uploading", 1, lambda _: None)


@pytest.fixture
def there(tmp_path):
    keep(tmp_path / "there", "c-1")
    folder = tmp_path / "there" / "captures" / "c-1"
    return (folder / MANIFEST_NAME).read_bytes(), {"trace.json.gz": folder / "trace.json.gz"}


def test_it_is_taken_as_it_was(there, tmp_path):
    here = LocalStore(tmp_path / "here")
    size_bytes = Fetching(here, tmp_path, RunName(run_id="run-7")).take(*there)
    assert here.path("c-1", "trace.json.gz").read_bytes() == there[1]["trace.json.gz"].read_bytes()
    # AND its manifest is the one that it had, but for the run, whose name no agent knows
    was = Manifest.from_json(there[0], "there")
    assert here.manifest("c-1") == was.model_copy(update={"run": "run-7"})
    assert size_bytes == here.manifest("c-1").artefacts[0].size_bytes
    # AND once more is no other capture
    assert Fetching(here, tmp_path, RunName(run_id="run-7")).take(*there) == size_bytes


@pytest.mark.parametrize("damage", ["content", "missing", "another", "manifest"])
def test_what_is_not_as_its_manifest_says_is_not_taken(there, tmp_path, damage):
    here, (manifest, files) = LocalStore(tmp_path / "here"), there
    if damage == "content":
        file = files["trace.json.gz"]
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    elif damage == "missing":
        files = {}
    elif damage == "another":
        files["more"] = files["trace.json.gz"]
    else:
        manifest = manifest[:-10]
    with pytest.raises((CaptureError, SftriageError)):
        Fetching(here, tmp_path, RunName(run_id="run-7")).take(manifest, files)
    assert here.ids() == frozenset()


@pytest.fixture
def kept(there, tmp_path):
    """The same capture in its host's store: the run's name, and the request."""
    name = RunName("job", "run-7", (tmp_path / "store").as_uri())
    host, url = HostCaptures(tmp_path / "there", name.store), name.store
    host.manifest("c-1", name)
    assert host.copied("c-1", name, UPLOADING)
    return name, host.manifest("c-1", name)[0], url


@pytest.mark.parametrize("near", [True, False])
def test_of_what_its_host_has_put_into_the_store_the_manifest_is_taken_and_the_rest_where_it_is_wanted(
    there, kept, tmp_path, near
):
    name, manifest, url = kept
    # WHEN it is taken
    here = LocalStore(tmp_path / "here")
    Fetching(here, tmp_path, name, lambda _: near).take(manifest, {}, True)
    # THEN it is there, and known to be in the store
    (one,) = here.manifests().manifests
    assert (one.job, one.run, here.copy_elsewhere("c-1")) == ("job", "run-7", url)
    assert (tmp_path / "here" / "captures" / "c-1" / "trace.json.gz").exists() is near
    # AND is fetched from there
    assert here.get("c-1", "trace.json.gz", tmp_path / "got").read_bytes() == there[1]["trace.json.gz"].read_bytes()


def test_what_is_not_in_the_store_though_its_host_says_so_is_not_taken(kept, tmp_path):
    name, manifest, _ = kept
    (gone,) = (tmp_path / "store").glob("job/run-7/c-1/trace.json.gz")
    gone.write_bytes(b"")
    here = LocalStore(tmp_path / "here")
    with pytest.raises(CaptureError, match=r"is not in file:.* as its host reports"):
        Fetching(here, tmp_path, name).take(manifest, {}, True)
    assert here.ids() == frozenset()


@pytest.mark.parametrize(("store", "why"), [("", "has no --store"), ("s3://other/a", "keeps them in s3://other/a")])
def test_a_host_puts_captures_into_the_store_of_their_run_alone(there, tmp_path, caplog, store, why):
    host = HostCaptures(tmp_path / "there", (tmp_path / "store").as_uri())
    for _ in range(2):
        assert not host.copied("c-1", RunName("job", "run-7", store), UPLOADING)
    assert [why in one.message for one in caplog.records] == [True]
    assert not (tmp_path / "store").exists()


def test_with_nothing_to_be_kept_here_a_host_keeps_what_is_in_the_store_nowhere_else(there, tmp_path):
    name = RunName("job", "run-7", (tmp_path / "store").as_uri())
    host = HostCaptures(tmp_path / "there", name.store, drop_local=True)
    host.manifest("c-1", name)
    # WHEN it was put there, and is requested once more, as after a restart
    for _ in range(2):
        assert host.copied("c-1", name, UPLOADING)
    # THEN only the manifest is here
    assert host.manifest("c-1", name)[1] == {}
    # AND WHEN the next run of the job orders it again THEN it learns where it is, and nothing changes
    for _ in range(2):
        with pytest.raises(StoredBeforeError, match="in the store, under the earlier run run-7"):
            host.manifest("c-1", RunName("job", "run-8", name.store))
    assert host.manifest("c-1", name)[1] == {}


def test_a_slow_transfer_reports_its_progress(tmp_path, monkeypatch):
    reports, now_s = [], [0.0]
    monkeypatch.setattr(transfers.time, "monotonic", lambda: now_s[0])
    transfer = Transfer(RESULT, "fetching from node-b:", 48 << 20, reports.append)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * (12 << 20))
    # GIVEN what is copied before anybody would wonder
    with source.open("rb") as reads, target.open("wb") as writes:
        counted, buffer = CountedFile(reads, transfer), bytearray(1 << 20)
        assert counted.readinto(buffer) == len(buffer)
        assert reports == []
        # WHEN it goes on
        now_s[0] = REPORT_S
        assert CountedFile(writes, transfer).write(bytes(11 << 20)) == 11 << 20
        transfer.moved(0)
    # THEN it is reported once
    (report,) = reports
    assert (report.result.capture_id, report.result.rank, report.result.state) == ("c-1", 3, "running")
    assert report.result.detail == "fetching from node-b: 12.0 MiB of 48.0 MiB"
    assert target.stat().st_size == 11 << 20
