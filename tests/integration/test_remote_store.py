"""Captures in S3: whatever goes wrong on the way, nothing is lost, and nothing is listed that is not whole."""

import hashlib
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest

from sftriage.errors import IntegrityError, StoreError, UsageError
from sftriage.runs.directory import RunInfo, create
from sftriage.traces import uploading
from sftriage.traces.manifest import Manifest
from sftriage.traces.remote import Patience, RemoteStore, open_objects
from sftriage.traces.store import FileToStore, LocalStore
from sftriage.traces.uploading import Uploader
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, LOOP, wait_until
from tests.integration.s3 import BUCKET, FAULTS, Proxy, environment_of
from tests.unit.conftest import manifest_of

URL = f"s3://{BUCKET}/team%20a"
ASKS = policy("name: any, match: {label: suspect, gain: '>= 99%'}", limits="overhead_budget: 100%")
LARGE_BYTES = 20 * 2**20


@pytest.fixture
def server(moto):
    moto.clear()
    return moto


@pytest.fixture
def through(server, monkeypatch):
    """A proxy before the server, which this process and those that it starts talk to."""
    with Proxy(server) as proxy:
        for name, value in environment_of(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def direct(server, monkeypatch):
    """The store as one sees it whose requests do not go wrong."""

    def opened(**scope):
        with pytest.MonkeyPatch.context() as patched:
            for name, value in environment_of(server.url).items():
                patched.setenv(name, value)
            return RemoteStore.open(URL, **scope)

    return opened


def run_with(directory: Path, *sizes: int) -> Path:
    """A run with captures of so many bytes: c-1, c-2, ..."""
    info = RunInfo("run-1", "resnet", "2027-01-15T08:00:00+00:00", ("x",), "default", "cd" * 32, "/nowhere")
    store = LocalStore(create(directory / "run", info, "").path)
    for number, size_bytes in enumerate(sizes, 1):
        source, name = directory / "source", f"c-{number}"
        source.write_bytes(random.Random(number).randbytes(size_bytes))
        file = FileToStore(source, "trace.json.gz", compress=False)
        store.put_files(name, [file], lambda artefacts, it=name: manifest_of(it, artefacts[0]))
    return directory / "run"


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that has three captures, one of them larger than what goes in one request."""
    return run_with(tmp_path, 3000, LARGE_BYTES, 300_000)


def manifests(run) -> tuple[Manifest, ...]:
    return LocalStore(run).manifests().manifests


def whole(store: RemoteStore, directory: Path, leaving: str = "") -> list[str]:
    """What is listed; all of it can be fetched, and is what its manifest says. One may be ``leaving`` meanwhile."""
    listing = store.manifests()
    assert not listing.unfit
    for manifest in listing.manifests:
        for artefact in manifest.artefacts:
            try:
                path = store.get(store.reference(manifest), artefact.name, directory / "fetched", force=True)
            except (UsageError, IntegrityError):
                assert manifest.capture_id == leaving
                continue
            assert hashlib.sha256(path.read_bytes()).hexdigest() == artefact.sha256
    return [manifest.capture_id for manifest in listing.manifests]


def uploader(run, **how) -> Uploader:
    patience = Patience(connect_s=5.0, idle_s=5.0, retries=1, retry_s=5.0)
    remote = RemoteStore(open_objects(URL, patience=patience), job="resnet", run="run-1")
    return Uploader(run, remote, URL, **how)


def wait_for(sender: Uploader, what=lambda standing: standing.done):
    standing = sender.standing
    wait_until(lambda: what(sender.wait(standing, 0.1)))
    return sender.standing


def test_captures_lie_in_the_bucket_as_anybody_reads_them(through, server, direct, run, tmp_path):
    # WHEN a run's captures are uploaded
    sender = uploader(run)
    sender.start()
    wait_for(sender)
    assert sender.close(DEADLINE_S)
    # THEN they lie there by job, run and id, with names and bytes of their own
    place = "team a/resnet/run-1"
    assert server.objects().keys() == {
        f"{place}/c-{n}/{name}" for n in (1, 2, 3) for name in ("trace.json.gz", "manifest.json")
    }
    body = server.client.get_object(Bucket=BUCKET, Key=f"{place}/c-1/manifest.json")["Body"].read()
    assert body == (run / "captures" / "c-1" / "manifest.json").read_bytes()
    assert whole(direct(), tmp_path) == ["c-1", "c-2", "c-3"]
    # AND the large one went in parts
    assert any(method == "POST" and "uploadId" in path for method, path in through.requests)
    assert not any(method == "POST" and "c-1" in path for method, path in through.requests)


@pytest.mark.parametrize("seed", range(4))
def test_with_faults_injected_nothing_is_lost_and_nothing_listed_that_is_not_whole(
    through, direct, run, tmp_path, monkeypatch, seed
):
    # GIVEN a server of which two answers of five goes wrong in some way
    for name, seconds in (("POLL_S", 0.05), ("FIRST_DELAY_S", 0.02), ("LONGEST_DELAY_S", 0.2)):
        monkeypatch.setattr(uploading, name, seconds)
    chance, lock = random.Random(seed), threading.Lock()

    def plan(method, path):
        with lock:
            return chance.choice(FAULTS) if chance.random() < 0.4 else None

    through.plan = plan
    # WHEN captures are uploaded, one is pinned and one removed meanwhile
    sender = uploader(run)
    sender.start()
    store = direct()
    LocalStore(run).pin("c-1")
    wait_for(sender, lambda standing: standing.stored)
    LocalStore(run).remove("c-3")
    # THEN whatever is listed at any time is whole
    sender.release_all()
    while not sender.standing.done:
        whole(store, tmp_path, leaving="c-3")
        wait_for(sender, lambda standing, before=sender.standing: standing is not before)
    assert sender.close(DEADLINE_S)
    # AND in the end all of it is there
    assert through.faults > 5
    assert whole(store, tmp_path) == ["c-1", "c-2"]
    assert store.manifests().manifests == manifests(run)
    assert store.pinned() == {"resnet/run-1/c-1"}
    assert {LocalStore(run).upload(name).state for name in ("c-1", "c-2")} == {"stored"}


ARTEFACT, MANIFEST = "c-1/trace.json.gz", "c-1/manifest.json"


@pytest.mark.parametrize(
    ("method", "what", "fault", "listed", "sends_artefact"),
    [
        ("PUT", ARTEFACT, "hold", [], True),
        ("PUT", ARTEFACT, "hold answer", [], False),
        ("GET", ARTEFACT, "hold", [], False),
        ("PUT", MANIFEST, "hold", [], False),
        ("PUT", MANIFEST, "hold answer", ["c-1"], False),
        ("GET", MANIFEST, "hold", ["c-1"], False),
        ("PUT", "c-2/trace.json.gz", "hold answer", ["c-1"], False),  # a part of several
    ],
)
def test_a_crash_at_any_point_is_finished_by_the_next_process(
    start, sftriage, through, direct, environment, run, tmp_path, method, what, fault, listed, sends_artefact
):
    # GIVEN a process that uploads, and is killed at a certain point
    environment.update(environment_of(through.url))
    through.plan = lambda how, path: fault if how == method and what in path else None
    process = start("traces", "upload", "--run", run, "--store", URL)
    assert through.holding.wait(DEADLINE_S)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    # THEN nothing is listed that is not whole, and what was under way says that it waits
    assert whole(direct(), tmp_path) == listed
    under_way = what.partition("/")[0]
    assert LocalStore(run).upload(under_way).state == "waiting"
    # WHEN another one goes on
    through.plan = lambda how, path: None
    through.requests.clear()
    done = sftriage("traces", "upload", "--run", run, "--json").json
    # THEN it finishes it, without sending again what is there
    assert done == {"store": URL, "stored": 3, "left": [], "removals": [], "done": True}
    assert whole(direct(), tmp_path) == ["c-1", "c-2", "c-3"]
    assert any(how == "PUT" and ARTEFACT in path for how, path in through.requests) == sends_artefact
    assert direct().manifests().manifests == manifests(run)


def test_a_bucket_that_is_not_there_is_said_in_one_line(start, environment, server):
    environment.update(environment_of(server.url))
    process = start("traces", "list", "--store", "s3://no-such-bucket/x")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, len(err.splitlines())) == (1, "", 1)
    assert "The specified bucket does not exist" in err


def test_a_store_that_stands_still_ends_a_request(through, run):
    through.plan = lambda how, path: "hold"
    patience = Patience(connect_s=1.0, idle_s=0.2, retries=0, retry_s=1.0)
    with pytest.raises(StoreError):
        RemoteStore(open_objects(URL, patience=patience)).ids()


def test_ctrl_c_leaves_the_rest_for_later_and_says_so(start, through, environment, run):
    # GIVEN an upload that is held up
    environment.update(environment_of(through.url))
    through.plan = lambda how, path: "hold" if "c-2" in path else None
    process = start("traces", "upload", "--run", run, "--store", URL, "--json")
    assert through.holding.wait(DEADLINE_S)
    # WHEN somebody has waited long enough, THEN it ends, though the request goes on
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert not through.ended.is_set()
    assert process.returncode == 1, err
    assert "not all in the store yet" in err
    assert (json.loads(out)["store"], json.loads(out)["done"]) == (URL, False)


def test_a_run_uploads_while_it_goes_on_and_finishes_at_its_end(start, through, direct, environment, tmp_path):
    # GIVEN a job whose captures are kept in S3 alone
    environment.update(environment_of(through.url))
    directory, policy = tmp_path / "run", tmp_path / "asks.yaml"
    policy.write_text(ASKS)
    job = start(
        *("run", "--out", directory, "--job", "my job", "--store", URL, "--drop-local", "--policy", policy),
        *("--", sys.executable, LOOP, 2, 1_000_000, 0, "torch"),
    )
    wait_until(lambda: list((directory / "steps").glob("*.steps")))
    # WHEN a capture is asked for while the job runs
    _, err = start(
        "capture", "--run", directory, "--reason", "a look", "--rank", 1, "--steps", 3, "--json"
    ).communicate(timeout=DEADLINE_S)
    # THEN it is uploaded beside it, and goes from here
    store = direct()
    wait_until(store.ids)
    (capture_id,) = LocalStore(directory).ids()
    wait_until(lambda: not (directory / "captures" / capture_id / "trace.json.gz").exists())
    assert job.poll() is None, err
    # WHEN another is asked for while the store is away, and the job ends
    through.plan = lambda how, path: "error"
    more = start("capture", "--run", directory, "--reason", "more", "--rank", 0, "--steps", 3)
    _, err = more.communicate(timeout=DEADLINE_S)
    assert more.returncode == 0, err
    (other,) = LocalStore(directory).ids() - {capture_id}
    wait_until(lambda: (upload := LocalStore(directory).upload(other)) and upload.state == "failed")
    os.kill(job.pid, signal.SIGTERM)
    through.plan = lambda how, path: None
    _, err = job.communicate(timeout=DEADLINE_S)
    # THEN it is waited for, and said where they are
    assert f"2 captures are in {URL}" in err
    manifests = LocalStore(directory).manifests()
    assert (len(manifests.manifests), manifests.unfit) == (2, {})
    assert store.manifests().manifests == manifests.manifests
    assert {one.job for one in manifests.manifests} == {"my job"}
    # AND from the run they are fetched as if they were here
    got = start("traces", "get", capture_id, "--run", directory, "--out", tmp_path / "got", "--json")
    out, err = got.communicate(timeout=DEADLINE_S)
    assert got.returncode == 0, err
    assert hashlib.sha256((tmp_path / "got").read_bytes()).hexdigest() == json.loads(out)["sha256"]
    # AND so they are from anywhere that knows the URL
    listed = json.loads(start("traces", "list", "--store", URL, "--json").communicate(timeout=DEADLINE_S)[0])
    assert {row["capture_id"] for row in listed} == {capture_id, other}


@pytest.mark.parametrize("ending", ["refused", "changed", "stopped", "SIGTERM", "SIGINT"])
def test_an_upload_that_is_given_up_leaves_no_parts_in_the_bucket(
    through, server, start, environment, tmp_path, ending
):
    # GIVEN a capture of more parts than are sent at once, of which one is there already, and more are on their way
    huge = run_with(tmp_path, 72 * 2**20)

    def uploads() -> set[str]:
        return {one["UploadId"] for one in server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])}

    # (those of tests whose uploads were killed)
    before = uploads()
    begun, go_on = threading.Event(), threading.Event()

    def plan(method: str, path: str) -> str | None:
        if method != "PUT" or "partNumber=" not in path or "partNumber=1&" in path:
            return None
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return "error" if ending == "refused" else None

    through.plan = plan
    # WHEN it ends before the last of them
    if ending.startswith("SIG"):
        environment.update(environment_of(through.url))
        process = start("traces", "upload", "--run", huge, "--store", URL)
        assert begun.wait(DEADLINE_S)
        assert uploads() - before
        process.send_signal(getattr(signal, ending))
        threading.Timer(0.5, go_on.set).start()
        assert process.wait(DEADLINE_S) == {"SIGTERM": 128 + signal.SIGTERM, "SIGINT": 1}[ending]
    else:
        if ending == "changed":
            with (huge / "captures" / "c-1" / "trace.json.gz").open("r+b") as file:
                file.write(b"y")
        sender = uploader(huge, tries=1)
        sender.start()
        assert begun.wait(DEADLINE_S)
        assert uploads() - before
        threading.Timer(0.5, go_on.set).start()
        if ending != "stopped":
            wait_for(sender, lambda standing: standing.given_up)
        assert sender.close(DEADLINE_S)
    # THEN nothing of it stays, and it is not listed
    assert uploads() <= before
    assert server.objects() == {}
