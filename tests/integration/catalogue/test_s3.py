"""The captures of a store elsewhere, found, fetched and removed: an S3 server, and the catalogue in PostgreSQL."""

import hashlib
import json
from functools import partial

import pytest

from sftriage.traces.store import LocalStore
from tests import needs
from tests.integration.catalogue.asking import ask, asked, put
from tests.integration.s3 import BUCKET, environment_of, served

pytestmark = needs.postgres

STORE = f"s3://{BUCKET}/team"


@pytest.fixture(scope="module")
def moto():
    with served() as server:
        yield server


@pytest.fixture
def bucket(moto, monkeypatch, environment, tmp_path, trace):
    """A store with the captures of two runs, two each and both of the same names."""
    for name, value in environment_of(moto.url).items():
        monkeypatch.setenv(name, value)
    environment.update(environment_of(moto.url))
    moto.clear()
    for number, run in enumerate(("one", "two")):
        local = LocalStore(tmp_path / run)
        for second, name in enumerate(("w1-r2", "w9-r3")):
            put(local, trace, name, 10 * number + second, 2 + second, run)
            for path in sorted((tmp_path / run / "captures" / name).iterdir()):
                key = f"team/resnet/{run}/{name}/{path.name}"
                moto.client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    return moto


@pytest.mark.parametrize("shared", [False, True], ids=["a catalogue of its own", "a shared catalogue"])
def test_captures_elsewhere_are_found_fetched_and_removed(bucket, start, environment, url, tmp_path, shared):
    if shared:
        environment["SFTRIAGE_CATALOGUE"] = url

    sftriage = partial(asked, start, tmp_path)
    # WHEN captures of a step are asked for THEN those of both runs are there
    status, out, err = sftriage("for-step", "162", "--store", STORE, "--run-id", "two", "--json")
    assert status == 0, err
    assert [row["reference"] for row in json.loads(out)["captures"]] == ["resnet/two/w1-r2", "resnet/two/w9-r3"]
    # AND one is fetched, byte by byte; of a shared catalogue without saying where it is
    where = [] if shared else ["--store", STORE]
    status, out, err = sftriage("get", "resnet/two/w9", *where, "--json")
    assert status == 0, err
    (fetched,) = json.loads(out)["files"]
    content = (tmp_path / fetched["path"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == fetched["sha256"]
    assert content == (tmp_path / "two" / "captures" / "w9-r3" / "trace.json.gz").read_bytes()
    # WHEN what is old is removed, and one of it is pinned
    status, out, err = sftriage("pin", "resnet/one/w1-r2", *where)
    assert (status, out) == (0, "resnet/one/w1-r2 is pinned\n"), err
    status, out, err = sftriage("prune", "--store", STORE, "--bytes", "0Ki", "--json")
    assert status == 0, err
    gone = [one["capture_id"] for one in json.loads(out)["captures"]]
    assert gone == ["resnet/one/w9-r3", "resnet/two/w1-r2", "resnet/two/w9-r3"]
    # THEN traces, manifests and rows are gone as one, and what is pinned is not
    assert bucket.objects().keys() == {
        f"team/resnet/one/w1-r2/{name}" for name in ("trace.json.gz", "manifest.json", "pinned")
    }
    if shared:
        assert ask(url, "SELECT reference FROM sftriage_captures") == [("resnet/one/w1-r2",)]
    status, out, err = sftriage("list", *where, "--json")
    assert ([row["reference"] for row in json.loads(out)], err) == (["resnet/one/w1-r2"], "")
