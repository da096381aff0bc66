"""A capture that is fetched from another host is taken whole and as its manifest says, or not at all."""

import pytest

from sftriage.errors import CaptureError, SftriageError
from sftriage.fleet.fetching import taker
from sftriage.fleet.wire import RunName
from sftriage.traces.manifest import MANIFEST_NAME, Manifest
from sftriage.traces.store import LocalStore
from tests.unit.conftest import manifest_of


@pytest.fixture
def there(tmp_path):
    """A capture on its host: its manifest, and its files."""
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    LocalStore(tmp_path / "there").put("c-1", tmp_path / "trace.json", lambda artefact: manifest_of("c-1", artefact))
    folder = tmp_path / "there" / "captures" / "c-1"
    return (folder / MANIFEST_NAME).read_bytes(), {"trace.json.gz": folder / "trace.json.gz"}


def test_it_is_taken_as_it_was(there, tmp_path):
    here = LocalStore(tmp_path / "here")
    size_bytes = taker(here, RunName(run_id="run-7"))(*there)
    assert here.path("c-1", "trace.json.gz").read_bytes() == there[1]["trace.json.gz"].read_bytes()
    # AND its manifest is the one that it had, but for the run, whose name no agent knows
    was = Manifest.from_json(there[0], "there")
    assert here.manifest("c-1") == was.model_copy(update={"run": "run-7"})
    assert size_bytes == here.manifest("c-1").artefacts[0].size_bytes
    # AND once more is no other capture
    assert taker(here, RunName(run_id="run-7"))(*there) == size_bytes


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
        taker(here, RunName(run_id="run-7"))(manifest, files)
    assert here.ids() == frozenset()
