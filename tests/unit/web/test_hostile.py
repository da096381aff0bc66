"""What somebody hostile may try: everything is refused, or shown as text."""

import json

import pytest

from tests.unit.recorded import verdict
from tests.unit.web.reading import FORGED, NASTY, SHORT_NASTY, UPWARDS, Seen, harmless, text_of

PLACES = [
    *("/static/{}", "/static/{}/page.css", "/static/{}/templates/base.html", "/{}/run.json"),
    *("/captures/{}", "/captures/{}/run.json", "/captures/{}/files/trace.json.gz"),
    *("/captures/c-1/files/{}", "/captures/c-1/files/{}/run.json"),
]


def test_no_path_leads_out(captured):
    for target in (place.format(way) for place in PLACES for way in UPWARDS):
        answer = captured.get(target)
        assert (target, answer.status) == (target, 404)
        assert b"root:" not in answer.body
        assert b"run_id" not in answer.body


def test_a_forged_capture_id_is_refused(captured):
    for target in (f"/captures/{forged}{rest}" for forged in FORGED for rest in ("", "/files/trace.json.gz")):
        answer = captured.get(target)
        assert (target, answer.status) == (target, 404)
        assert "<script>" not in answer.text.replace('<script src="/static/', "")


def test_html_in_a_stage_name_is_text(captured, store, trace, make_manifest):
    # GIVEN a journal and a manifest whose stages, reasons and rules are markup
    nasty = verdict(110, "suspect", stage=NASTY, advances={NASTY: 0.1, "'\"><script>": 0.2})
    captured.decide(nasty, "throttle", NASTY, rule=NASTY)
    captured.decide(verdict(120, "needs_evidence", reasons=(NASTY,)), "hold", NASTY)
    store.put("c-2", trace, lambda artefact: make_manifest("c-2", artefact, stage=SHORT_NASTY, rule=NASTY))
    # WHEN the pages are read THEN none of it has become markup, and it is there to be read
    for target in ("/", "/decisions", "/captures/c-2", "/captures/c-1"):
        answer = captured.get(target)
        assert answer.status == 200
        harmless(answer)
    assert "&lt;img src=x" in captured.get("/decisions").text
    assert "&lt;b onclick" in captured.get("/captures/c-2").text
    # AND what the charts are told is what was recorded
    figure = next(a for tag, a in Seen(captured.get().text).tags if "data-stages" in a)
    assert NASTY in json.loads(figure["data-stages"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "not JSON", "not a manifest"),
        (lambda text: "[" * 100_000, "not a manifest"),
        (lambda text: "{}", "not a manifest"),
        (lambda text: text.replace('"c-1"', '"c-9"'), "is the manifest of c-9"),
        (lambda text: text.replace("trace.json.gz", "../../run.json"), "not a manifest"),
        (lambda text: text.replace("trace.json.gz", "manifest.json"), "not a manifest"),
        (lambda text: text.replace('"size_bytes": ', '"size_bytes": 1'), "it had"),
        (lambda text: text.replace('"resnet"', '"\\u001b[31m"'), "not a manifest"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema_version 99"),
        (lambda text: "x" * (5 << 20), "larger than"),
    ],
)
def test_a_hostile_manifest_is_refused_in_words(captured, change, said):
    # GIVEN a manifest that somebody has laid hands on
    path = captured.directory.path / "captures" / "c-1" / "manifest.json"
    path.write_text(change(path.read_text()))
    # WHEN its page, its file and the overview are asked for
    page, overview = captured.get("/captures/c-1"), captured.get("/")
    file = captured.get("/captures/c-1/files/trace.json.gz")
    # THEN it is not shown and not served, the page says why, and everything else goes on
    assert (page.status, file.status, overview.status) == (422, 422, 200)
    assert said in text_of(page)
    assert "cannot be read" in text_of(overview)


def test_markup_in_a_manifest_is_text(captured):
    path = captured.directory.path / "captures" / "c-1" / "manifest.json"
    path.write_text(path.read_text().replace('"resnet"', json.dumps(NASTY)))
    answer = captured.get("/captures/c-1")
    assert answer.status == 200
    assert NASTY not in answer.text
    assert "&lt;img src=x" in answer.text


def test_a_link_in_place_of_a_capture_is_none(captured, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (captured.directory.path / "captures" / "c-3").symlink_to(tmp_path / "elsewhere")
    assert captured.get("/captures/c-3").status == 404
    assert captured.get("/").status == 200
