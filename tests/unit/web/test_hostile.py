"""The pages of runs and of stores: they serve only what a manifest names, and only if it is unchanged."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.web.client import FORGED, UPWARDS, harmless, text_of
from tests.unit.web.stored import shelf_at

TRACE = "trace.json.gz"


@dataclass
class Site:
    get: Callable[..., Any]
    captures: str
    directory: Path
    others: tuple[str, ...]

    @property
    def capture(self) -> str:
        return f"{self.captures}/c-1"


@pytest.fixture(params=["a run", "a store"])
def site(request, tmp_path) -> Site:
    if request.param == "a run":
        run = request.getfixturevalue("captured")
        directory = run.directory.path / "captures" / "c-1"
        return Site(run.get, "/captures", directory, ("/decisions", "/static/{}/templates/base.html", "/{}/run.json"))
    shelf = shelf_at(tmp_path / "share", tmp_path / "catalogue.db")
    made = shelf.put("c-1")
    shelf.look()
    others = (
        "/?job=resnet",
        "/captures/{}/run-1/c-1",
        "/captures/resnet/{}/c-1",
        f"/captures/resnet/run-1/{{}}/files/{TRACE}",
    )
    return Site(shelf.get, "/captures/resnet/run-1", shelf.directory(made), others)


def test_pages_run_only_their_own_scripts_and_load_nothing_else(site):
    for target in ("/", site.capture, "/nowhere", site.others[0]):
        names = [tag for tag, _ in harmless(site.get(target))]
        assert (names.count("h1"), names.count("main")) == (1, 1)


def test_no_path_leads_out(site):
    places = [
        *site.others[1:],
        "/static/{}",
        "/static/{}/page.css",
        site.captures + "/{}",
        site.captures + "/{}/run.json",
    ]
    places += [f"{site.captures}/{{}}/files/{TRACE}", site.capture + "/files/{}", site.capture + "/files/{}/run.json"]
    for target in (place.format(way) for place in places for way in UPWARDS):
        answer = site.get(target)
        assert (target, answer.status) == (target, 404)
        assert b"root:" not in answer.body
        assert b"run_id" not in answer.body


def test_a_forged_capture_id_is_refused(site):
    for target in (f"{site.captures}/{forged}{rest}" for forged in FORGED for rest in ("", f"/files/{TRACE}")):
        answer = site.get(target)
        assert (target, answer.status) == (target, 404)
        assert "<script>" not in answer.text.replace('<script src="/static/', "")


def test_only_what_the_manifest_names_is_served(site):
    for name in ("manifest.json", "pinned", "nothing.gz", ".lock", "%00", f"{TRACE}%00"):
        assert site.get(f"{site.capture}/files/{name}").status == 404


def test_what_is_downloaded_is_what_is_stored(site):
    stored = (site.directory / TRACE).read_bytes()
    answer = site.get(f"{site.capture}/files/{TRACE}")
    assert answer.body == stored
    assert hashlib.sha256(stored).hexdigest() in site.get(site.capture).text
    assert answer.headers["content-length"] == str(len(stored))
    assert answer.headers["content-disposition"] == f'attachment; filename="c-1-{TRACE}"'
    # AND it is never taken for anything that could run here
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "content-encoding" not in answer.headers
    # AND HEAD returns the headers only
    head = site.get(f"{site.capture}/files/{TRACE}", method="HEAD")
    assert (head.body, head.headers["content-length"]) == (b"", str(len(stored)))


@pytest.mark.parametrize("becomes", ["other bytes", "longer", "a link"])
def test_a_file_that_is_not_what_it_was_is_not_served(site, becomes):
    path = site.directory / TRACE
    content = path.read_bytes()
    path.unlink()
    if becomes == "a link":
        path.symlink_to("/etc/passwd")
    else:
        path.write_bytes(bytes(len(content)) if becomes == "other bytes" else content + b"x")
    answer = site.get(f"{site.capture}/files/{TRACE}")
    assert (answer.status, b"root:" in answer.body) == (422, False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: "not JSON", "not a manifest"),
        (lambda text: "[" * 100_000, "not a manifest"),
        (lambda text: "{}", "not a manifest"),
        (lambda text: "\udcff", "not a manifest"),
        (lambda text: "x" * (5 << 20), "(not a|no) manifest"),
        (lambda text: text.replace('"c-1"', '"c-9"'), "is the manifest of (resnet/run-1/)?c-9"),
        (lambda text: text.replace("trace.json.gz", "../../run.json"), "not a manifest"),
        (lambda text: text.replace("trace.json.gz", "manifest.json"), "not a manifest"),
        (lambda text: text.replace('"size_bytes": ', '"size_bytes": 1'), "expected"),
        (lambda text: text.replace('"resnet"', '"\\u001b[31m"'), "not a manifest"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema_version 99"),
    ],
)
def test_a_hostile_manifest_is_refused_with_a_reason(site, change, problem):
    # GIVEN a manifest that was tampered with WHEN its page, its file and the overview are requested
    path = site.directory / "manifest.json"
    path.write_text(change(path.read_text()), errors="surrogateescape")
    page, file, overview = (site.get(one) for one in (site.capture, f"{site.capture}/files/{TRACE}", "/"))
    # THEN it is not shown and not served, the page says why, and everything else goes on
    assert (page.status, file.status, overview.status) == (422, 422, 200)
    assert re.search(problem, text_of(page))
