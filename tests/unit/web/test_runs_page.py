"""The page that follows the newest run of this machine, and has the others to choose from."""

import json

import pytest

from sftriage.errors import UsageError
from sftriage.runs import source
from sftriage.runs.directory import RunInfo, create, find_run, remember, started_runs
from sftriage.runs.source import StartedRuns
from sftriage.web import run_page
from sftriage.web.run_page import RunsPage
from sftriage.web.serving import Access
from tests.scenario import NOW_S, Recorder, decision, verdict
from tests.unit.web.asking import NASTY, Seen, ask, harmless, text_of


@pytest.fixture(autouse=True)
def always_looks(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def begin(tmp_path):
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
def app():
    return RunsPage(StartedRuns(), Access.to("127.0.0.1", None, ""), lambda: NOW_S).app


def version(answer) -> str:
    return next(attributes["data-version"] for tag, attributes in Seen(answer.text).tags if tag == "body")


def test_the_newest_run_is_followed_and_the_switch_is_said(app, begin):
    # GIVEN nothing yet
    waiting = ask(app, "/")
    assert "No run yet" in text_of(waiting)
    # WHEN a run begins THEN it is shown
    begin("run-1", "resnet")
    first = ask(app, "/")
    assert "resnet run-1" in text_of(first)
    assert "This run began after" not in text_of(first)
    # WHEN a newer one begins THEN that is shown instead, and it is said which was shown before
    begin("run-2", "bert")
    second = ask(app, "/")
    assert "bert run-2" in text_of(second)
    assert "This run began after resnet, run-1 , which was shown here as the newest until then" in text_of(second)
    # AND whoever listens has heard of each change
    assert len({version(answer) for answer in (waiting, first, second)}) == 3


def test_whoever_looks_at_one_run_stays_there_and_hears_of_a_newer_one(app, begin):
    begin("run-1")
    assert "newer" not in text_of(ask(app, "/runs/run-1/decisions")).replace("newer ones as they begin", "")
    begin("run-2", "bert")
    for page in ("/runs/run-1/", "/runs/run-1/decisions"):
        answer = text_of(ask(app, page))
        assert "resnet run-1" in answer
        assert "There is a newer run: bert, run-2" in answer


def test_every_link_stays_with_its_run(app, begin):
    # GIVEN two runs
    begin("run-1")
    begin("run 2/ü")
    for page, root in (("/", "/runs/run%202%2F%C3%BC/"), ("/runs/run-1/", "/runs/run-1/")):
        kept = ("/static/", "/runs/", "#")
        for tag, attributes in Seen(ask(app, page).text).tags:
            for name in ("href", "action", "data-heat"):
                value = attributes.get(name)
                # THEN a link leads to one of them, and none to the newest, but for those that say so
                assert value is None or value == "/" or value.startswith(kept), (tag, attributes)
                if tag == "form":
                    assert value in (None, root)


def test_the_runs_are_there_to_choose_from(app, begin):
    begin("run-1", NASTY, going=False)
    begin("run-2", "bert")
    answer = ask(app, "/")
    harmless(answer)
    links = {
        attributes["href"]: attributes.get("aria-current")
        for tag, attributes in Seen(answer.text.partition('id="runs"')[2].partition("</details>")[0]).tags
        if tag == "a"
    }
    assert links == {"/": None, "/runs/run-2/": "true", "/runs/run-1/": None}
    assert "run-1 ended" in text_of(answer)
    assert ask(app, "/runs/run-1/static/page.css").status == 200
    for nowhere in ("/runs/run-3/", "/runs/", "/decisions", "/runs/run-1/captures/c-1", "/runs/../run-1/"):
        assert ask(app, nowhere).status == 404


def test_a_run_that_was_begun_anew_in_its_place_is_another(app, begin, tmp_path):
    run = begin("run-1")
    assert "resnet run-1" in text_of(ask(app, "/"))
    info = json.loads(run.info_file.read_text())
    run.info_file.unlink()
    run.info_file.write_text(json.dumps(info | {"run_id": "run-1b", "job": "bert"}))
    assert "bert run-1b" in text_of(ask(app, "/"))


def test_few_runs_are_kept_in_memory(monkeypatch, begin):
    monkeypatch.setattr(run_page, "MAX_OPEN", 2)
    page = RunsPage(StartedRuns(), Access.to("127.0.0.1", None, ""))
    for number in range(4):
        begin(f"run-{number}")
    for number in (0, 1, 2, 3, 0):
        assert f"resnet run-{number}" in text_of(ask(page.app, f"/runs/run-{number}/"))
    assert [run_id for _, run_id in page._open] == ["run-3", "run-0"]


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
