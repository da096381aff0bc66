"""The page about a run, and the page that follows the newest run of this machine."""

import json
import re
import threading
from dataclasses import replace
from datetime import datetime, timezone
from html import escape, unescape

import pytest

from sftriage.errors import UsageError
from sftriage.model.captures import CaptureResult, ManualRequest
from sftriage.model.events import (
    CaptureChanged,
    EvidenceGathered,
    ManualRequestDecided,
    NamedPolicy,
    PolicyChanged,
    RemedyChanged,
    TakenOver,
)
from sftriage.policy.in_force import find
from sftriage.runs import source
from sftriage.runs.directory import RunInfo, create, find_run, read_info, remember, started_runs, write_info
from sftriage.runs.lateness import HeatSource
from sftriage.runs.source import RunSource, StartedRuns
from sftriage.traces.manifest import KernelShare, Share
from sftriage.traces.store import LocalStore, Upload
from sftriage.web import run_page
from sftriage.web.page import MAX_STREAMS
from sftriage.web.run_page import RunPage, RunsPage
from sftriage.web.serving import Access
from tests.integration.processes import wait_until
from tests.scenario import NOW_S, Recorder, decision, request_of, slow_loader, verdict
from tests.unit.hanging import FOUND, NEXT_STEP, SENTENCE, WHOLE_JOB, put_hang
from tests.unit.web.client import NASTY, SHORT_NASTY, Tags, fetch, harmless, text_of
from tests.unit.web.test_charts import findings


def version(answer) -> str:
    return next(attributes["data-version"] for tag, attributes in Tags(answer.text).tags if tag == "body")


def test_no_run_yet_then_one(tmp_path, run):
    # GIVEN a page that waits for a run
    there = []
    app = RunPage(RunSource(lambda: there[0] if there else None), Access.to("127.0.0.1", None, "")).app
    assert "No run yet" in text_of(fetch(app, "/"))
    assert fetch(app, "/decisions").status == 200
    assert fetch(app, "/captures/c-1").status == 404
    assert fetch(app, "/heat.bin").status == 404
    # WHEN one begins THEN the page shows it
    there.append(run.directory)
    assert "Warming up" in text_of(fetch(app, "/"))


# The pages.


def test_the_overview_is_accessible(captured):
    # GIVEN the overview
    answer = captured.get()
    page = Tags(answer.text)
    names = [tag for tag, _ in page.tags]
    # THEN it has its landmarks, one main heading, and a language
    assert {"header", "nav", "main", "footer"} <= set(names)
    assert (names.count("h1"), names.count("main")) == (1, 1)
    assert dict(page.tags)["html"]["lang"] == "en"
    # AND every picture has a label or is hidden, every chart has a table
    assert all("alt" in attributes for tag, attributes in page.tags if tag == "img")
    assert all("aria-label" in a or "aria-hidden" in a for tag, a in page.tags if tag == "svg")
    assert names.count("figure") == names.count("table") == 3
    assert all(a.get("aria-labelledby") in answer.text for tag, a in page.tags if tag == "section")
    # AND no two parts have one name
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_static_files_name_no_other_host_but_perfettos(captured):
    addresses = set()
    for path in re.findall(r'"(/static/[^"]+)"', captured.get("/captures/c-1").text):
        addresses |= set(re.findall(r"(?:https?:)?//[a-z][a-z0-9.-]+\.[a-z]+", captured.get(path).text))
    assert addresses == {"https://ui.perfetto.dev", "http://www.w3.org"}


def test_a_control_that_was_captured_is_the_one_beside(run, store, trace, make_manifest):
    run.record(4, range(200), lambda rank, step: {"data": 10.0, "forward": 30.0, "backward": 60.0})
    requests = (request_of("c-1"), request_of("c-2", 3, "control"))
    run.decide(verdict(100, "suspect"), "capture", "rule slow-rank", requests=requests)
    store.put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    assert "rank 3 control" in text_of(run.get("/captures/c-1"))


def test_findings_are_shown_once_they_are_there(captured, store):
    assert "has not been reduced yet" in text_of(captured.get("/captures/c-1"))
    share = Share(name=NASTY, kind="python", waits=True, self_s=0.04, calls=1.0)
    store.note("c-1", findings().model_copy(update={"shares": (share,)}))
    answer = captured.get("/captures/c-1")
    assert "It slept." in text_of(answer)
    assert NASTY not in answer.text
    # AND what the device did where it did something
    assert "What the device did" not in answer.text
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


def test_a_stall_shows_who_waits_for_whom(run, captured):
    run.record(4, range(100), slow_loader)
    assert 'id="stall"' not in captured.get().text
    missing = verdict(200, "suspect", stage="forward").suspects
    stalled = replace(
        verdict(200, "stalled", reasons=("not_arrived",)), suspects=missing, numbers={"waiting_ranks": 3.0}
    )
    captured.decide(stalled, "hold", "not_arrived")
    (table,) = re.findall(r'<table class="stall">.*?</table>', captured.get().text, re.DOTALL)
    cells = [re.findall(r'<td class="([a-z ]+)"', row) for row in table.split("</tr>")[1:-1]]
    waits = ["passed", "passed", "waiting gate", "ahead"]
    assert cells == [waits, waits, ["passed", "missing", "ahead gate", "ahead"], waits]


def test_GIVEN_a_hang_THEN_its_reason_is_the_headline_and_its_capture_shows_where_each_rank_is(run, captured):
    stalled = replace(verdict(60, "stalled", reasons=("in_sync",)), last_step=60)
    captured.decide(stalled, "capture", "rule_matched", requests=(WHOLE_JOB,))
    put_hang(run.directory.path)
    captured.record_events(FOUND, CaptureChanged(1.0, CaptureResult("c-9", 2, "stored", first_step=60, last_step=60)))
    page = captured.get().text
    headline = re.search(r'<p class="sentence">(.*?)</p>', page)[1]
    assert (unescape(headline), page.count("<strong>Rank 2")) == (SENTENCE, 0)
    capture = text_of(captured.get("/captures/c-9"))
    assert "Capture of every rank, step 60" in capture
    assert "2 node-2 60 validate (train.py:52) all_gather of 3 floats, #126 of the default group in forward" in capture
    assert SENTENCE in capture
    assert NEXT_STEP in capture
    assert "sftriage reduce" not in capture


def test_a_span_without_windows_says_so(captured):
    assert "No window contains these steps" in text_of(captured.get("/?from=100000"))


@pytest.mark.parametrize(
    ("query", "problems"),
    [
        ("from=abc", ["from must be the number of a step"]),
        ("from=abc&to=-1", ["from must be the number of a step", "to must be the number of a step"]),
        ("last=-1", ["last must be a whole number of steps, 1 or more"]),
        ("last=0", ["last must be a whole number of steps, 1 or more"]),
        ("last=1e9&from=100", ["last must be a whole number of steps, 1 or more"]),
        (f"to={'9' * 20}", ["to must be the number of a step"]),
        ("from=%D9%A3", ["from must be the number of a step"]),
        ("from=&to=", []),
        ("last=1000&from=", []),
    ],
)
def test_an_invalid_span_is_ignored_with_a_reason(captured, query, problems):
    answer = captured.get(f"/?{query}")
    assert answer.status == 200
    assert re.findall(r"Ignored: ([^<]*)<", answer.text) == problems
    # AND the map, whose address has the same query, is there
    assert captured.get(f"/heat.bin?{query}").status == 200


def test_the_heat_map_is_served_as_numbers_and_its_table_without_a_script(captured):
    page = captured.get()
    (canvas,) = [attributes for tag, attributes in Tags(page.text).tags if tag == "canvas"]
    (address,) = [attributes["data-heat"] for _, attributes in Tags(page.text).tags if "data-heat" in attributes]
    assert len(captured.get(address).body) == int(canvas["width"]) * int(canvas["height"])
    # AND where no script draws it, the page says so, and has the latest ranks in a table that is open
    assert "Without it, the table below shows" in text_of(page)
    assert [a for tag, a in Tags(page.text).tags if tag == "details" and a["id"] == "heat-table" and "open" in a]


def test_the_pages_own_files_may_be_kept(run):
    address = re.search(r'"(/static/page\.css\?v=\w+)"', run.get().text)[1]
    answer = run.get(address)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/css; charset=utf-8")
    assert "immutable" in answer.headers["cache-control"]
    assert run.get().headers["cache-control"] == "no-store"


@pytest.mark.parametrize(("kinds", "stepwise"), [(("steps",), False), (("steps", "device-steps"), True)])
def test_a_job_judged_by_the_devices_clock_is_drawn_by_device_times(run, kinds, stepwise):
    for kind in kinds:
        run.record(4, range(100), slow_loader, kind=kind)
    run.decide(replace(verdict(40), clock="device"))
    answer = run.get()
    assert "heat-cursor" in answer.text
    assert ("Where single steps are not known" not in text_of(answer)) == stepwise


def test_event_streams_are_limited(run):
    # GIVEN the maximum of open pages
    routes = run.app._app.routes
    page = routes[[route.path for route in routes].index("/events")].endpoint.__self__
    page._streams = MAX_STREAMS
    # WHEN another page connects THEN it must try again later
    answer = run.get("/events")
    assert (answer.status, answer.headers["retry-after"]) == (503, "30")
    assert run.get("/events", method="HEAD").status == 200


def test_a_map_that_takes_long_does_not_keep_the_page_waiting(captured, monkeypatch):
    # GIVEN a slow map
    go_on, plain_map = threading.Event(), HeatSource.map
    monkeypatch.setattr(HeatSource, "map", lambda *of: go_on.wait(60) and plain_map(*of))
    monkeypatch.setattr("sftriage.web.run_page.HEAT_PATIENCE_S", 0.001)
    # WHEN the page is requested THEN it comes without the map
    before = captured.get()
    assert "is being drawn" in text_of(before)
    # AND once the map is there, the page has changed, and shows it
    go_on.set()
    after = wait_until(lambda: answer if "heat-cursor" in (answer := captured.get()).text else None)
    assert version(after) != version(before)


@pytest.fixture
def slow(run):
    """A run whose rank 2 is slow in data."""
    run.directory.policy_file.write_text(find("default").read_text())
    late, in_time = {"data": 50.0, "forward": 30, "backward": 60}, {"data": 10.0, "forward": 30, "backward": 100}
    run.record(4, range(200), lambda rank, step: late if rank == 2 else in_time)
    run.decide(verdict(100, "suspect"))
    return run


def test_a_step_as_measured_and_without_stragglers_is_there_for_perfetto(slow):
    assert 'href="/whatif"' in slow.get("/").text
    answer = slow.get("/whatif.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    events = json.loads(answer.body)["traceEvents"]
    ends = {
        pid: max(one["ts"] + one["dur"] for one in events if one["ph"] == "X" and one["pid"] == pid) for pid in (1, 2)
    }
    # (durations of a straggler are in the mean of all)
    assert ends[1] > ends[2] > 0.0
    waits = {one["tid"] for one in events if one["name"].startswith("waits") and one["pid"] == 1}
    assert waits == {0, 1, 3}


def test_a_question_is_answered_on_the_page_as_by_the_command(slow, sftriage):
    # GIVEN the page of a run, WHEN it gets a question, THEN its answer is the command's
    said = sftriage("whatif", slow.directory.path, "--without", "rank 2", "--set", "forward=0.5x", "--steps", "150:180")
    page = slow.get("/whatif?without=rank+2&set=forward%3D0.5x&steps=150%3A180").text
    assert escape(said.out.strip()) in page
    assert 'value="150:180"' in page
    # AND an unknown name gets those there are
    problem = slow.get("/whatif?set=network%3D0").text
    assert "--set network: no such operations; there are backward (together), " in problem
    assert 'id="workers"' in problem


def test_a_run_that_cannot_be_replayed_yet_says_why(run):
    run.directory.policy_file.write_text(find("default").read_text())
    assert 'href="/whatif"' not in run.get("/").text
    for address in ("/whatif", "/whatif.json"):
        answer = run.get(address)
        assert answer.status == 422
        assert "no steps yet" in answer.text


def test_html_in_a_stage_name_is_text(captured, store, trace, make_manifest):
    # GIVEN a journal and a manifest whose stages, reasons and rules are markup
    nasty = verdict(110, "suspect", stage=NASTY, advances={NASTY: 0.1, "'\"><script>": 0.2})
    captured.decide(nasty, "throttle", NASTY, rule=NASTY)
    captured.decide(verdict(120, "needs_evidence", reasons=(NASTY,)), "hold", NASTY)
    # AND so are requests and all other events
    requests = (request_of("a-1"),)
    remedy = {"attempt": 0, "remedy": "stragglar", "rank": 2, "who": f"rank 2 {NASTY}", "where": NASTY, "time_s": NOW_S}
    captured.record_events(
        ManualRequestDecided(
            ManualRequest("a-1", (1,), NASTY, NASTY), decision(nasty, "capture", NASTY, requests=requests)
        ),
        PolicyChanged(NOW_S, "changed", (NamedPolicy(NASTY),), (NASTY,), later=(NASTY,)),
        EvidenceGathered(time_s=NOW_S, first_step=100, last_step=149, remarks=(NASTY,)),
        RemedyChanged(**remedy, step=109, state="trying", reason="worthwhile"),
        TakenOver(NOW_S, NASTY, 7),
    )
    store.put("c-2", trace, lambda artefact: make_manifest("c-2", artefact, stage=SHORT_NASTY, rule=NASTY))
    # WHEN the pages are read THEN none of it has become markup, and it is there to be read
    for target in ("/", "/decisions", "/captures/c-2", "/captures/c-1", "/captures/a-1"):
        answer = captured.get(target)
        assert answer.status == 200
        harmless(answer)
    for target in ("/", "/decisions", "/captures/a-1"):
        assert "&lt;img src=x" in captured.get(target).text
    assert "&lt;b onclick" in captured.get("/captures/c-2").text
    # AND the charts' data are as recorded
    figure = next(a for tag, a in Tags(captured.get().text).tags if "data-stages" in a)
    assert NASTY in json.loads(figure["data-stages"])


def test_a_link_in_place_of_a_capture_is_none(captured, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (captured.directory.path / "captures" / "c-3").symlink_to(tmp_path / "elsewhere")
    assert captured.get("/captures/c-3").status == 404
    assert captured.get("/").status == 200


# Where copies are.

URL = "s3://our-traces/pretraining"
DONE = datetime(2027, 1, 15, 8, 5, tzinfo=timezone.utc)


@pytest.fixture
def elsewhere(captured):
    write_info(captured.directory, replace(read_info(captured.directory), store=URL))
    return captured


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
    # AND if the copy is gone too, the page says so
    (there / "trace.json.gz").unlink()
    assert captured.get("/captures/c-1/files/trace.json.gz").status == 422
    LocalStore(captured.directory.path).note_upload("c-1", note.model_copy(update={"url": "file:///nowhere/at/all"}))
    assert captured.get("/captures/c-1/files/trace.json.gz").status == 404


@pytest.mark.parametrize("content", ["", "{}", "[" * 10_000, json.dumps({"url": "x" * 10_000, "state": "failed"})])
def test_an_upload_that_makes_no_sense_is_none(captured, content):
    (captured.directory.path / "captures" / "c-1" / "upload.json").write_text(content)
    assert captured.get("/captures/c-1").status == captured.get().status == 200


@pytest.fixture
def always_looks(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def begin(always_looks, tmp_path):
    """Begin a run, which judges one window."""

    def begin(run_id: str, job: str = "resnet", *, going: bool = True):
        path = tmp_path / run_id
        rings = str(path / "rings")
        run = create(
            path, RunInfo(run_id, job, "2027-01-15T08:00:00+00:00", ("train",), "default", "0" * 64, rings), ""
        )
        if going:
            (path / "rings").mkdir()
        journal = Recorder(run.decisions)
        journal.window(of := verdict(20), decision(of))
        journal.close()
        remember(run)
        return run

    return begin


@pytest.fixture
def runs_app():
    return RunsPage(StartedRuns(), Access.to("127.0.0.1", None, ""), lambda: NOW_S).app


def test_every_link_stays_with_its_run(runs_app, begin):
    # GIVEN two runs
    begin("run-1")
    begin("run 2/ü")
    for page, root in (("/", "/runs/run%202%2F%C3%BC/"), ("/runs/run-1/", "/runs/run-1/")):
        kept = ("/static/", "/runs/", "#")
        for tag, attributes in Tags(fetch(runs_app, page).text).tags:
            for name in ("href", "action", "data-heat"):
                value = attributes.get(name)
                # THEN a link leads to one of them, and none to the newest, but for those that say so
                assert value is None or value == "/" or value.startswith(kept), (tag, attributes)
                if tag == "form":
                    assert value in (None, root)


def test_the_runs_are_there_to_choose_from(runs_app, begin):
    begin("run-1", NASTY, going=False)
    begin("run-2", "bert")
    answer = fetch(runs_app, "/")
    harmless(answer)
    links = {
        attributes["href"]: attributes.get("aria-current")
        for tag, attributes in Tags(answer.text.partition('id="runs"')[2].partition("</details>")[0]).tags
        if tag == "a"
    }
    assert links == {"/": None, "/runs/run-2/": "true", "/runs/run-1/": None}
    assert "run-1 ended" in text_of(answer)
    assert fetch(runs_app, "/runs/run-1/static/page.css").status == 200
    for nowhere in ("/runs/run-3/", "/runs/", "/decisions", "/runs/run-1/captures/c-1", "/runs/../run-1/"):
        assert fetch(runs_app, nowhere).status == 404


def test_a_run_that_was_begun_anew_in_its_place_is_another(runs_app, begin, tmp_path):
    run = begin("run-1")
    assert "resnet run-1" in text_of(fetch(runs_app, "/"))
    info = json.loads(run.info_file.read_text())
    run.info_file.unlink()
    run.info_file.write_text(json.dumps(info | {"run_id": "run-1b", "job": "bert"}))
    assert "bert run-1b" in text_of(fetch(runs_app, "/"))


def test_few_runs_are_kept_in_memory(monkeypatch, begin):
    monkeypatch.setattr(run_page, "MAX_OPEN", 2)
    page = RunsPage(StartedRuns(), Access.to("127.0.0.1", None, ""))
    for number in range(4):
        begin(f"run-{number}")
    for number in (0, 1, 2, 3, 0):
        assert f"resnet run-{number}" in text_of(fetch(page.app, f"/runs/run-{number}/"))
    assert (page._opened.cache_info().currsize, page._opened.cache_info().misses) == (2, 5)


def test_what_was_started_and_has_gone_or_is_none_is_passed_over(begin, tmp_path):
    with pytest.raises(UsageError, match="no run was started yet"):
        find_run(None)
    runs = [begin("run-1"), begin("run-2"), begin("run-3")]
    remember(runs[0])
    with (tmp_path / "state" / "sftriage" / "runs.jsonl").open("a") as file:
        file.write('{"path": "/nowhere"}\n{"path": 3}\nnonsense\n{"pa')
    runs[1].info_file.unlink()
    # (one that was taken over is the newest again, and is there once)
    assert [run.path.name for run in started_runs()] == ["run-1", "run-3"]
    runs[2].info_file.write_text("nonsense")
    assert [run.info.run_id for run in StartedRuns().look().runs] == ["run-1"]
