import hashlib
import re
import threading

import pytest

from sftriage.decisions import CaptureResult
from sftriage.runs.lateness import HeatSource
from sftriage.runs.source import RunSource
from sftriage.traces.findings import KernelShare, Share
from sftriage.traces.manifest import FollowedInfo
from sftriage.web.access import Access
from sftriage.web.page import MAX_STREAMS
from sftriage.web.run_page import RunPage
from tests.unit.recorded import request_of, verdict
from tests.unit.web.asking import ask
from tests.unit.web.reading import NASTY, Seen, harmless, text_of
from tests.unit.web.test_charts import findings

# Every state has a face.


def test_no_run_yet_then_one(tmp_path, run):
    # GIVEN a page that waits for a run
    there = []
    app = RunPage(RunSource(lambda: there[0] if there else None), Access.to("127.0.0.1", None, "")).app
    assert "No run yet" in text_of(ask(app, "/"))
    assert ask(app, "/decisions").status == 200
    assert ask(app, "/captures/c-1").status == 404
    assert ask(app, "/heat.bin").status == 404
    # WHEN one begins THEN the page shows it
    there.append(run.directory)
    assert "Warming up" in text_of(ask(app, "/"))


def test_a_run_that_ended_before_its_first_window(run, tmp_path):
    (tmp_path / "run" / "rings").rmdir()
    assert "ended before its first window" in text_of(run.get())


def test_a_damaged_run_says_what_is_damaged(run):
    run.directory.info_file.write_text("{}")
    assert "not a run" in text_of(run.get())


@pytest.mark.parametrize(
    ("label", "outcome", "reason", "said"),
    [
        ("healthy", "ignore", "healthy", ["Healthy", "Is the job healthy? Yes", "no trouble so far"]),
        ("suspect", "ignore", "gain under the rule's", ["Slow", "rank 2 in data", "gain under the rule's"]),
        ("suspect", "throttle", "cooldown", ["capture throttled", "rank 2 in data", "since step 120", "cooldown"]),
        ("stalled", "hold", "in_sync", ["Stalled", "it stands still", "nobody is named", "no time to draw"]),
        ("needs_evidence", "hold", "co_critical", ["Undecided: held", "several ranks are late together"]),
    ],
)
def test_every_label_has_a_face(run, label, outcome, reason, said):
    onset = 120 if label == "suspect" else None
    reasons = (reason,) if label in ("stalled", "needs_evidence") else ()
    run.decide(verdict(100, label, reasons=reasons, onset=onset), outcome, reason)
    seen = text_of(run.get())
    for words in said:
        assert words in seen


def test_a_capture_that_failed_is_said_out_loud(run):
    run.decide(verdict(100, "suspect"), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    run.ended(CaptureResult("c-1", 2, "failed", "the disk is full"))
    seen = run.get()
    assert "A capture came to nothing" in text_of(seen)
    assert "the disk is full" in text_of(seen)
    # AND its page says so too
    assert "This capture came to nothing" in text_of(run.get("/captures/c-1"))


def test_a_capture_that_runs_has_a_page(run):
    run.decide(verdict(100, "suspect"), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    assert "This capture is under way" in text_of(run.get("/captures/c-1"))


# The pages.


def test_the_overview_answers_at_one_look(captured):
    seen = text_of(captured.get())
    for words in ("Slow, and captured", "Is the job healthy? No", "since step 120", "rank 2 in data"):
        assert words in seen
    assert "Capture of rank 2 done" in seen


def test_the_overview_can_be_read_without_seeing_it(captured):
    # GIVEN the overview
    answer = captured.get()
    seen = Seen(answer.text)
    names = [tag for tag, _ in seen.tags]
    # THEN it has its landmarks, one main heading, and a language
    assert {"header", "nav", "main", "footer"} <= set(names)
    assert (names.count("h1"), names.count("main")) == (1, 1)
    assert dict(seen.tags)["html"]["lang"] == "en"
    # AND every picture has words for it or is passed over, every field a label, every chart a table
    assert all("alt" in attributes for tag, attributes in seen.tags if tag == "img")
    assert all("aria-label" in a or "aria-hidden" in a for tag, a in seen.tags if tag == "svg")
    assert names.count("figure") == names.count("table") == 2
    assert all(a.get("aria-labelledby") in answer.text for tag, a in seen.tags if tag == "section")
    # AND no two parts have one name
    ids = [a["id"] for _, a in seen.tags if "id" in a]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("target", ["/", "/decisions", "/captures/c-1", "/nowhere"])
def test_pages_hold_nothing_that_runs_and_ask_nobody_else(captured, target):
    harmless(captured.get(target))


def test_the_pages_own_files_ask_nobody_else_but_perfetto(captured):
    addresses = set()
    for path in re.findall(r'"(/static/[^"]+)"', captured.get("/captures/c-1").text):
        addresses |= set(re.findall(r"(?:https?:)?//[a-z][a-z0-9.-]+\.[a-z]+", captured.get(path).text))
    assert addresses == {"https://ui.perfetto.dev", "http://www.w3.org"}


def test_a_capture_page_shows_the_suspect_beside_a_control(captured, store):
    manifest = store.manifest("c-1")
    seen = text_of(captured.get("/captures/c-1"))
    for words in ("Capture of rank 2, steps 160 to 164", "rank 2 captured", "rank 0 control", "+40.0 ms", "slow-rank"):
        assert words in seen
    assert manifest.artefacts[0].sha256 in seen
    assert "Open in Perfetto" in seen


def test_a_capture_that_follows_another_says_what_was_chosen_and_why_and_leads_to_it(
    captured, store, trace, make_manifest
):
    def of(capture_id, **why):
        manifest = make_manifest(capture_id)
        return lambda one: manifest.model_copy(
            update={"trigger": manifest.trigger.model_copy(update=why), "artefacts": (one,)}
        )

    store.put("c-9", trace, of("c-9", chosen="left_open", follows="c-1"))
    store.note("c-1", FollowedInfo(capture_id="c-9"))
    second, first = captured.get("/captures/c-9"), captured.get("/captures/c-1")
    assert "auto chose PyTorch Profiler: the capture that it follows does not show why" in text_of(second)
    assert '<a href="/captures/c-1">c-1</a>, the first capture' in second.text
    assert '<a href="/captures/c-9">c-9</a>' in first.text


def test_a_control_that_was_captured_is_the_one_beside(run, store, trace, make_manifest):
    run.record(4, range(200), lambda rank, step: {"data": 10.0, "forward": 30.0, "backward": 60.0})
    requests = (request_of("c-1"), request_of("c-2", 3, "control"))
    run.decide(verdict(100, "suspect"), "capture", "rule slow-rank", requests=requests)
    store.put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    assert "rank 3 control" in text_of(run.get("/captures/c-1"))


def test_findings_are_shown_once_they_are_there(captured, store):
    share = Share(name=NASTY, kind="python", waits=True, self_s=0.04, calls=1.0)
    assert "has not been looked into" in text_of(captured.get("/captures/c-1"))
    store.note("c-1", findings().model_copy(update={"shares": (share,)}))
    answer = captured.get("/captures/c-1")
    assert "It slept." in text_of(answer)
    assert NASTY not in answer.text
    assert "What the device did" not in answer.text


def test_what_the_device_did_is_shown_where_it_did_something(captured, store):
    kernel = KernelShare(name=NASTY, operator="aten::sort", within="Router", device_s=0.03, calls=2.0)
    store.note("c-1", findings().model_copy(update={"kernels": (kernel,)}))
    answer = captured.get("/captures/c-1")
    assert "aten::sort in Router 30.0 ms none 2.0" in text_of(answer)
    assert NASTY not in answer.text


def test_decisions_are_listed_and_filtered(captured):
    captured.decide(verdict(110, "suspect"), "throttle", "cooldown")
    everything, throttled = captured.get("/decisions"), captured.get("/decisions?outcome=throttle")
    assert everything.text.count("<li>") == 3
    assert throttled.text.count("<li>") == 1
    for query in ("?outcome=nonsense", "?page=0", "?page=-3", "?page=99999999999999999999", "?page=x", "?outcome=hold"):
        assert captured.get(f"/decisions{query}").status == 200


def test_a_span_without_windows_says_so(captured):
    assert "No window touches these steps" in text_of(captured.get("/?from=100000"))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("from=abc", ["from is the number of a step"]),
        ("from=abc&to=-1", ["from is the number of a step", "to is the number of a step"]),
        ("last=-1", ["last is a whole number of steps, 1 or more"]),
        ("last=0", ["last is a whole number of steps, 1 or more"]),
        ("last=1e9&from=100", ["last is a whole number of steps, 1 or more"]),
        (f"to={'9' * 20}", ["to is the number of a step"]),
        ("from=%D9%A3", ["from is the number of a step"]),
        ("from=&to=", []),
        ("last=1000&from=", []),
    ],
)
def test_a_span_that_means_nothing_is_passed_over_and_said(captured, query, said):
    answer = captured.get(f"/?{query}")
    assert answer.status == 200
    assert re.findall(r"Passed over: ([^<]*)<", answer.text) == said
    # AND the map, which the page asks for by the same words, is there
    assert captured.get(f"/heat.bin?{query}").status == 200


def test_the_heat_map_is_served_as_numbers_and_its_table_without_a_script(captured):
    page = captured.get()
    (canvas,) = [attributes for tag, attributes in Seen(page.text).tags if tag == "canvas"]
    (address,) = [attributes["data-heat"] for _, attributes in Seen(page.text).tags if "data-heat" in attributes]
    assert len(captured.get(address).body) == int(canvas["width"]) * int(canvas["height"])
    # AND where no script draws it, the page says so, and has the latest ranks in a table that is open
    assert "Without it, the table below says" in text_of(page)
    assert [a for tag, a in Seen(page.text).tags if tag == "details" and a["id"] == "heat-table" and "open" in a]


def test_a_window_later_the_page_shows_it(captured):
    before = captured.get()
    captured.decide(verdict(110))
    after = captured.get()
    assert "Slow, and captured" in text_of(before)
    assert "Healthy" in text_of(after)
    version = r'data-version="(\w+)"'
    assert re.search(version, before.text)[1] != re.search(version, after.text)[1]


# What is downloaded.


def test_what_is_downloaded_is_what_is_stored(captured, store):
    artefact = store.manifest("c-1").artefacts[0]
    answer = captured.get(f"/captures/c-1/files/{artefact.name}")
    assert hashlib.sha256(answer.body).hexdigest() == artefact.sha256
    assert answer.headers["content-length"] == str(artefact.size_bytes)
    assert answer.headers["content-disposition"] == 'attachment; filename="c-1-trace.json.gz"'
    # AND it is never taken for anything that could run here
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "content-encoding" not in answer.headers
    # AND asking only for the headers gives them alone
    head = captured.get(f"/captures/c-1/files/{artefact.name}", method="HEAD")
    assert (head.body, head.headers["content-length"]) == (b"", str(artefact.size_bytes))


@pytest.mark.parametrize("name", ["manifest.json", "pinned", "nothing.gz", ".lock", "%00", "trace.json.gz%00"])
def test_only_what_the_manifest_names_is_served(captured, name):
    assert captured.get(f"/captures/c-1/files/{name}").status == 404


def test_a_file_that_is_not_what_it_was_is_not_served(captured):
    path = captured.directory.path / "captures" / "c-1" / "trace.json.gz"
    path.write_bytes(path.read_bytes() + b"x")
    assert captured.get("/captures/c-1/files/trace.json.gz").status == 422
    path.unlink()
    path.symlink_to("/etc/passwd")
    answer = captured.get("/captures/c-1/files/trace.json.gz")
    assert (answer.status, b"root:" in answer.body) == (422, False)


def test_the_pages_own_files_may_be_kept(run):
    address = re.search(r'"(/static/page\.css\?v=\w+)"', run.get().text)[1]
    answer = run.get(address)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/css; charset=utf-8")
    assert "immutable" in answer.headers["cache-control"]
    assert run.get().headers["cache-control"] == "no-store"


def test_there_are_only_so_many_listeners(run):
    # GIVEN as many pages as may listen
    routes = run.app._app.routes
    page = routes[[route.path for route in routes].index("/events")].endpoint.__self__
    page._streams = MAX_STREAMS
    # WHEN one more comes THEN it is told to come again
    answer = run.get("/events")
    assert (answer.status, answer.headers["retry-after"]) == (503, "30")
    assert run.get("/events", method="HEAD").status == 200


def test_a_map_that_takes_long_does_not_keep_the_page_waiting(captured, monkeypatch):
    # GIVEN a map that takes its time
    go_on, drawn, plain_map = threading.Event(), threading.Event(), HeatSource.map

    def slowly(self, *steps):
        assert go_on.wait(60)
        return plain_map(self, *steps)

    monkeypatch.setattr(HeatSource, "map", slowly)
    monkeypatch.setattr("sftriage.web.run_page.HEAT_PATIENCE_S", 0.001)
    monkeypatch.setattr(RunSource, "_drawn", _then(RunSource._drawn, drawn))
    # WHEN the page is asked for THEN it is there without
    before = captured.get()
    assert "is being drawn" in text_of(before)
    # AND once the map is there, the page has changed, and shows it
    go_on.set()
    assert drawn.wait(60)
    monkeypatch.setattr("sftriage.web.run_page.HEAT_PATIENCE_S", 60)
    after = captured.get()
    assert "heat-cursor" in after.text
    version = r'data-version="(\w+)"'
    assert re.search(version, before.text)[1] != re.search(version, after.text)[1]


def _then(method, event):
    def called(*arguments):
        method(*arguments)
        event.set()

    return called
