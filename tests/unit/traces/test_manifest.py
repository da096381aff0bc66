import json
from typing import Any

import pytest

from sftriage.errors import InputError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.traces.manifest import (
    CaptureInfo,
    CauseInfo,
    Manifest,
    PlaceInfo,
    UnknownVersionError,
    contents_of,
    may_contain,
)
from tests.unit.conftest import SOME


def changed(manifest: Manifest, path: str, value: Any) -> bytes:
    document = json.loads(manifest.to_json())
    *holders, last = path.split(".")
    place = document
    for part in holders:
        place = place[int(part)] if part.isdigit() else place[part]
    place[last] = value
    return json.dumps(document).encode()


def test_unknown_fields_are_ignored_and_an_unknown_version_is_refused(make_manifest):
    manifest = make_manifest("c-1")
    assert Manifest.from_json(changed(manifest, "weather", "yes"), "m") == manifest
    assert Manifest.from_json(changed(manifest, "capture.gpu", {"uuid": 1}), "m") == manifest
    for version in (0, 2):
        other = changed(manifest, "schema_version", version).replace(b'"capture_id"', b'"other"')
        with pytest.raises(UnknownVersionError, match=rf"^m: schema_version {version}; this sftriage reads 1$"):
            Manifest.from_json(other, "m")


HOSTILE = {
    "schema_version": ["1", True],
    "capture_id": ["../etc", "a\n", "", "a" * 101, 7],
    "artefacts.0.name": ["../../etc/passwd", "manifest.json", "a\x00b"],
    "artefacts.0.role": ["virus"],
    "artefacts.0.size_bytes": [-1, 2**63, "7"],
    "artefacts.0.sha256": ["AB" * 32],
    "artefacts": [[], {}, [json.loads(SOME.model_dump_json())] * 2],
    "job": ["\x1b[2J", "j" * 2001],
    "created_at": ["2027-01-15T08:00:00", "2027-01-15T08:00:00+02:00", 1_800_000_000],
    "trigger.label": ["guilty"],
    "trigger.ranks": [[], [-1], [0.5]],
    "trigger.gain_s": [float("nan")],
    "trigger.share": [float("inf")],
    "trigger.stage": ["s" * 32],
    "trigger.window": [{"first_step": 9, "last_step": 8}, None],
    "capture.rank": [8],
    "capture.steps": [6],
    "capture.first_step": [10**30],
    "capture.last_step": [159],
    "capture.world_size": [0],
    "capture.clock": [{f"k{n}": 1 for n in range(65)}],
    "capture.timings_s": [{"\x1b": 1.0}],
    "may_contain": [None],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in HOSTILE.items() for value in values])
def test_hostile_values_are_refused(path, value, make_manifest):
    with pytest.raises(InputError, match=r"^m: not a manifest: [^\x00-\x1f]+$"):
        Manifest.from_json(changed(make_manifest("c-1"), path, value), "m")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema_version": 1}'])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(InputError, match=r"^m: not a manifest: "):
        Manifest.from_json(data, "m")


def test_what_a_capture_measured_is_in_its_manifest_and_one_that_measured_nothing_has_none():
    request = CaptureRequest("c-1", 0, "torch", 5, 1, 60.0, 2**29)
    with pytest.raises(InputError, match="capture c-1 measured no step: busy"):
        CaptureInfo.of(request, CaptureResult("c-1", 0, "refused", "busy"), world_size=1, host="h")
    # AND a profiler's message is kept without its control characters
    result = CaptureResult("c-1", 0, "stored", "one\ntwo\x1b[2J" + "x" * 3000, first_step=1, last_step=3)
    info = CaptureInfo.of(request, result, world_size=1, host="h")
    assert info.detail.startswith("one two [2Jxxx")
    assert (info.steps, info.requested_steps) == (3, 5)


def test_the_private_data_of_a_trace_depends_on_its_options():
    assert "file paths" not in may_contain({"with_stack": False})
    assert "file paths" in may_contain({"with_stack": True})
    assert "values of operator arguments" in may_contain({"record_shapes": True})


def test_what_a_capture_of_a_hang_holds_is_in_its_manifest(make_manifest):
    # GIVEN the manifest of a whole job that hangs, which has a cause, but no findings
    at = PlaceInfo(function="validate", file="/job/train.py", line=52, source="dist.all_gather(outs, mine)")
    sentence = "Rank 2 called all_gather where the others called all_reduce."
    cause = CauseInfo(code="different_collective", sure=True, sentence=sentence, next_step="Compare.", place=at)
    manifest = make_manifest("c-1").model_copy(update={"hang": cause})
    # THEN it is read as it was written, with a few words for a list
    again = Manifest.from_json(manifest.to_json(), "m")
    assert again == manifest
    assert (again.cause, again.cause.short) == (cause, "different collective at train.py:52")
    # AND another program's kind of hang is refused
    with pytest.raises(InputError, match=r"^m: not a manifest: hang\.code"):
        Manifest.from_json(changed(manifest, "hang.code", "magic"), "m")
    # AND what it may hold is more than stacks
    assert "its collectives" in contents_of("stacks", {"whole_job": True, "detail": [0]})
    assert "collectives" not in contents_of("stacks", {"sample_stacks": True})
