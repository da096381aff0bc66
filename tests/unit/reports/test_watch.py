"""What `sftriage watch` shows of a run: exact, within the terminal, and text whatever a file says."""

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from sftriage.model.captures import CaptureResult, ManualRequest
from sftriage.model.events import CauseFound, FollowUpDecided, ManualRequestDecided, Place, RemedyChanged
from sftriage.model.verdicts import Regression
from sftriage.reports.watch_changes import WatchPosition, all_of, closing, events, news, opening
from sftriage.reports.watch_lines import Room, apportion, clean, picture_lines, together
from sftriage.runs.liveness import RankCoverage, Watcher
from sftriage.runs.picture import Picture, captures_of, frontier_of, picture, picture_values
from sftriage.runs.source import View
from sftriage.traces.manifest import CauseInfo
from sftriage.traces.store import LocalStore, Upload
from tests.scenario import NOW_S, Recorder, Run, decision, request_of, run_at, verdict
from tests.unit.web.asking import NASTY
from tests.unit.web.test_charts import findings

RECORDED = RankCoverage(4, 4)
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n[bold red]rank\u202e\u200b\ud800" + "x" * 300


@pytest.fixture
def run(tmp_path) -> Run:
    """A run that goes on; nothing is known of it yet."""
    made = run_at(tmp_path / "run")
    (tmp_path / "run" / "rings").mkdir()
    return made


def shown(run: Run, **changes) -> Picture:
    """The picture of a run whose four ranks record, with what else is to be known of it."""
    return picture(replace(run.source.view(), **{"telemetry": RECORDED, **changes}), "sftriage-runs/run-1")


def text(of: Picture, room: Room | None = None, now_s: float = NOW_S) -> str:
    return "\n".join(line.plain for line in picture_lines(of, room or Room(100), now_s))


# What is shown


def test_before_there_is_a_run_it_says_what_it_waits_for():
    written = text(Picture(View("none"), "waiting", "runs/next"))
    assert "Waiting for a run" in written
    assert "runs/next" in written


def test_until_the_first_window_it_says_that_the_job_warms_up_and_where_nobody_watches_what_to_do(run):
    written = text(shown(run))
    assert "Warming up" in written
    assert "4 of 4 ranks record" in written
    assert "attach" not in written
    alone = shown(run, watcher=Watcher("unwatched"), unwatched=True)
    assert "Unknown" in text(alone)
    assert f"take it over. sftriage attach --run {run.directory.path}" in text(alone, Room(300))
    assert picture_values(alone)["unwatched"] is True


def test_a_healthy_job_is_healthy_since_the_first_window_after_the_last_trouble(run):
    for first, label in ((20, "healthy"), (70, "suspect"), (120, "healthy"), (170, "healthy")):
        run.decide(verdict(first, label))
    # (a window's time is that of its last step: 1_800_000_169)
    assert "Healthy  since step 120, 7 min ago" in text(shown(run))
    # AND a window that a capture disturbed ends no health
    run.decide(verdict(220, "needs_evidence", reasons=("self_inflicted",)), "hold", "self_inflicted")
    run.decide(verdict(270))
    assert shown(run).outlook.since_step == 120


def test_a_suspect_is_shown_with_its_numbers_and_what_was_done(run, trace, make_manifest):
    # GIVEN a rank that was captured
    run.decide(verdict(50))
    run.decide(verdict(100, "suspect", onset=120), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    written = text(shown(run))
    # THEN since when, who, where, how much, how often, and that a capture runs
    for words in (
        "Slow, and captured  since step 120",
        "rank 2, data  20.0 ms of each slow step (20%)  in 90% of steps",
    ):
        assert words in written
    assert "running  rank 2  c-1" in written
    # AND how far its trace is, where that takes its time
    run.ended(CaptureResult("c-1", 2, "running", "fetching from node-b: 12.0 MiB of 48.0 MiB"))
    assert "running  rank 2  c-1  fetching from node-b: 12.0 MiB of 48.0 MiB" in text(shown(run))
    # WHEN the capture has ended and is stored THEN what became of it
    manifest = LocalStore(run.directory.path).put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    run.ended(CaptureResult("c-1", 2, "stored", first_step=160, last_step=164))
    steps = f"steps {manifest.capture.first_step} to {manifest.capture.last_step}"
    assert f"stored  rank 2  c-1  {steps}" in text(shown(run))


def test_a_hold_off_is_shown_with_what_would_resolve_it(run):
    held = verdict(20, "needs_evidence", reasons=("co_critical",))
    run.decide(held, "hold", "captures_left")
    written = text(shown(run))
    assert "Undecided: held" in written
    assert "Next: Ask for fewer" in written
    # AND there is a line for it where there are few
    assert "Next: Ask for fewer" in text(shown(run), Room(40, 12))


def test_a_stalled_job_shows_its_last_frontier_and_who_has_been_waited_for(run):
    run.decide(verdict(20))
    of = verdict(80, "stalled", reasons=("not_arrived",))
    missing = replace(verdict(20, "suspect").suspects[0], gain_s=75.0, share=0.0)
    run.decide(replace(of, suspects=(missing,)), "capture", "rule", requests=(request_of("c-1"),))
    now = shown(run)
    assert "Stalled" in text(now)
    assert "rank 2, data  waited for 75 s\n" in text(now)
    assert now.frontier is not None
    assert now.frontier.windows == 1


def test_captures_that_no_window_led_to_are_there_with_who_asked(run):
    # GIVEN a person who asked for two captures, one of which is over, and one that another capture led to
    of = verdict(20)
    run.decide(of)
    journal = Recorder(run.directory.decisions)
    asked = replace(decision(of, "capture", "a person asked"), label="asked", requests=(request_of("a-1"),))
    journal.append(ManualRequestDecided(ManualRequest("a-1", (2,), "ada", "curious"), asked))
    journal.capture(CaptureResult("a-1", 2, "failed", "too large"))
    journal.append(
        FollowUpDecided("a-1", replace(asked, requests=(request_of("b-1", rank=1, role="control"),), time_s=1.9e9))
    )
    journal.close()
    # WHEN shown THEN the newest is first
    first, second = captures_of(run.source.view())
    assert (first.capture_id, first.state, first.role) == ("b-1", "running", "control")
    assert (second.capture_id, second.state, second.asked_by, second.detail) == ("a-1", "failed", "ada", "too large")
    assert "failed  rank 2  a-1  asked for by ada, too large" in text(shown(run))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("waiting", "to be uploaded"),
        ("uploading", "uploading"),
        ("stored", "uploaded"),
        ("failed", "upload failed: no such bucket"),
    ],
)
def test_how_far_a_capture_is_on_its_way_elsewhere(run, trace, make_manifest, state, said):
    LocalStore(run.directory.path).put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    uploads = {"c-1": Upload(url="s3://bucket", state=state, reason="no such bucket" if state == "failed" else "")}
    assert text(shown(run, uploads=uploads), Room(200)).count(f", {said}\n") == 1


def test_what_lacks_in_the_telemetry_is_said(run):
    of = verdict(20)
    run.decide(replace(of, numbers={"coverage": 0.7499}))
    with run.directory.decisions.open("a") as file:
        file.write("no entry\n")
    written = text(shown(run, telemetry=RankCoverage(3, 4)))
    assert "3 of 4 ranks record, 74.9% of the newest window's steps came in, 1 line of the journal" in written


def test_a_run_that_has_ended_says_so(tmp_path):
    run = run_at(tmp_path / "run")
    run.decide(verdict(20))
    assert shown(run).state == "ended"
    assert "the run has ended" in text(shown(run))


# Exact


ADVANCES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=12
)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40), st.integers(0, 10_000))
def test_shares_add_up_and_none_is_off_by_one(values, total):
    shares = apportion(values, total)
    whole = sum(values)
    assert sum(shares) == (total if whole > 0 else 0)
    for value, share in zip(values, shares, strict=True):
        assert share >= 0
        if whole > 0:
            assert abs(share - value / whole * total) < 1 + 1e-6


@settings(deadline=None)
@given(ADVANCES, st.integers(1, 14), st.booleans())
def test_stages_put_together_keep_their_time_and_the_one_that_is_named(advances_s, most, has_name):
    named = min(advances_s, key=lambda stage: advances_s[stage]) if has_name else None
    found = together(advances_s, most, named)
    assert len(found) <= most
    assert sum(found.values()) == pytest.approx(sum(advances_s.values()))
    if most > 1 and named is not None:
        assert found[named] == advances_s[named]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=9),
    st.integers(34, 200),
    st.one_of(st.none(), st.integers(8, 40)),
)
def test_bars_times_and_shares_add_up_to_the_step(tmp_path_factory, stacks, width, height):
    # GIVEN windows of any frontier
    run = run_at(tmp_path_factory.mktemp("exact") / "run")
    for n, stack in enumerate(stacks):
        run.decide(verdict(20 + 10 * n, advances=dict(zip(("data", "backward", "other"), stack, strict=True))))
    frontier = frontier_of(run.source.view().rows)
    assert frontier is not None
    # THEN its stages sum to the step
    assert sum(frontier.advances_s.values()) == pytest.approx(frontier.exposed_s, rel=1e-12, abs=1e-12)
    # AND so does what is written of them, to the last digit
    lines = text(shown(run), Room(width, height)).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("Frontier"))
    rows = [line for line in lines[start + 1 :][:4] if line.endswith("%")]
    stages = [line for line in rows if not line.lstrip().startswith("step time")]
    tenths = [round(float(line.split()[-3]) * 10) for line in stages]
    shares = [round(float(line.split()[-1].rstrip("%")) * 10) for line in stages]
    assert sum(tenths) == round(sum(frontier.advances_s.values()) * 1e4)
    if frontier.exposed_s > 0.0:
        assert sum(shares) == 1000


# Within the terminal


@settings(deadline=None)
@given(st.integers(1, 140), st.one_of(st.none(), st.integers(1, 50)), st.booleans(), st.booleans())
def test_it_fits_whatever_the_terminal(busy, width, height, blocks, footer):
    room = Room(width, height, blocks, "Ctrl-C ends this" if footer else "")
    lines = picture_lines(busy, room, NOW_S)
    assert height is None or len(lines) <= height
    assert all(cell_len(line.plain) <= width for line in lines)
    if not blocks and height is None:
        assert not set("".join(line.plain for line in lines)) & set("█▏▁▇")


@pytest.fixture(scope="module")
def busy(tmp_path_factory) -> Picture:
    """A run with much to show, of which some has double width."""
    run = run_at(tmp_path_factory.mktemp("busy") / "run")
    advances = {f"stage-{n}-\u65e5\u672c\u8a9e": 0.001 * n for n in range(30)}
    for n in range(40):
        of = verdict(20 + 10 * n, ("suspect", "healthy", "needs_evidence")[n % 3], advances=advances)
        run.decide(of, "throttle", "cooldown of rule slow-rank " * 5)
    captured = verdict(500, "suspect", advances=advances)
    run.decide(captured, "capture", "rule", requests=tuple(request_of(f"c-{n}") for n in range(30)))
    return shown(run)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24)])
def test_on_a_small_terminal_every_part_has_a_face(busy, width, height):
    written = text(busy, Room(width, height, footer="Ctrl-C"))
    for title in ("Slow, and captured", "Frontier", "Suspects", "Decisions", "Captures", "Telemetry", "Ctrl-C"):
        assert title in written
    # AND what does not fit is counted, or put together
    assert "others" in written
    assert "more" in written


# Hostile


@pytest.mark.parametrize(
    ("nasty", "harmless"), [(HOSTILE, "[bold red]rank"), (NASTY, NASTY), ("[/]", "[/]"), ("\x9b31m", "31m")]
)
def test_names_are_text(run, nasty, harmless):
    # GIVEN a run whose stages, reasons, rules and requests do things to a terminal, or are markup
    clear = nasty.replace("\ud800", "")
    of = verdict(20, "suspect", stage=clear, advances={clear: 0.1, "data": 0.2}, reasons=(clear,))
    run.decide(of, "throttle", clear, rule=clear)
    view = run.source.view()
    view = replace(view, info=replace(view.info, job=nasty, policy=nasty, run_id=nasty))
    # WHEN it is shown, in each way
    written = text(picture(view, nasty), Room(2000))
    told = "\n".join([opening(view, nasty), *news(WatchPosition(), view, NOW_S)[1]])
    for said in (written.replace("\n", ""), told.replace("\n", "")):
        # THEN nothing in it is more than text, and what is harmless is there as it was
        assert clean(said) == said
        said.encode()
        assert harmless in said


# What has changed


def test_a_line_is_said_where_a_window_differs_from_the_one_before(run):
    # GIVEN a run of which all so far has been told
    run.decide(verdict(20))
    told = all_of(run.source.view())
    # WHEN windows come in
    run.decide(verdict(30))
    run.decide(verdict(40, "suspect"), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    run.decide(verdict(50, "suspect"), "throttle", "captures_left")
    run.decide(verdict(60, "suspect"), "throttle", "captures_left")
    run.decide(verdict(70, "suspect", rank=3), "throttle", "captures_left")
    run.ended(CaptureResult("c-1", 2, "failed", "no space"))
    told, lines = news(told, run.source.view(), NOW_S)
    # THEN each that is another is said, and each that is the same is not
    assert [line[21:].partition(":")[0] for line in lines] == [
        "Rank 2 is slow in data",
        "Rank 2 is slow in data",
        "Rank 3 is slow in data",
        "No trace of rank 2",
    ]
    assert lines[0].endswith("Capturing rank 2 (c-1).")
    assert lines[1].endswith("and ? left. To resolve it: Ask for fewer, or raise the policy's limits.")
    assert lines[0].startswith("2027-01-15 08:01:29  ")
    # AND nothing is said twice
    assert news(told, run.source.view(), NOW_S)[1] == []
    assert closing(run.source.view()) == "The run has ended: 6 windows judged, 0 captures stored."


def test_a_fault_that_passes_or_comes_to_stay_is_another(run):
    # GIVEN a suspect that seems to have passed
    first, second, third = (verdict(start, "suspect") for start in (20, 30, 40))
    passed = [
        replace(one, suspects=(replace(one.suspects[0], pattern="one-off", gain_s=2.0),)) for one in (first, second)
    ]
    told = all_of(run.source.view())
    for one in (*passed, third):
        run.decide(one, "ignore", "observe_only")
    # WHEN it turns out to stay THEN that is said, and what is as before is not
    _, lines = news(told, run.source.view(), NOW_S)
    assert [line.rpartition("; ")[2].partition(". ")[0] for line in lines] == ["one-off, and has passed", "chronic"]


def test_a_restart_is_said(run):
    run.decide(verdict(20))
    told = all_of(run.source.view())
    run.decide(verdict(20, attempt=1))
    assert "The job was started anew (restart 1)." in news(told, run.source.view(), NOW_S)[1][0]
    assert "restart 1" in text(shown(run))


def test_a_journal_that_began_anew_is_told_anew(run):
    for first in (20, 30, 40):
        run.decide(verdict(first))
    told = all_of(run.source.view())
    run.directory.decisions.unlink()
    run.decide(verdict(20, "suspect"), "hold", "pending")
    assert len(news(told, run.source.view(), NOW_S)[1]) == 1


def test_every_window_is_an_event_once(run):
    run.decide(verdict(20))
    run.decide(verdict(30, "suspect"), "capture", "rule", requests=(request_of("c-1"),))
    told, values = events(WatchPosition(), run.source.view())
    assert [(value["type"], value["first_step"]) for value in values] == [("window", 20), ("window", 30)]
    assert values[1]["decision"]["captures"][0]["capture_id"] == "c-1"
    run.ended(CaptureResult("c-1", 2, "refused", "another profiler runs"))
    run.decide(verdict(40))
    told, values = events(told, run.source.view())
    assert [value["type"] for value in values] == ["window", "capture"]
    assert values[1]["state"] == "refused"
    assert events(told, run.source.view())[1] == []


SENTENCE = "Rank 2 is slow in data: 38.0 of 40.0 ms in load (data.py:57), which sleeps."


def found(code="sleep", sentence=SENTENCE, sure=True) -> CauseFound:
    return CauseFound(NOW_S, "c-1", 2, code, sure, sentence, Place("load", "/job/data.py", 57), 3, "Look there.")


def test_what_is_done_about_a_straggler_is_news_once(run):
    run.decide(verdict(20, "suspect"))
    told = all_of(run.source.view())
    of = {"attempt": 0, "remedy": "stragglar", "rank": 2, "who": "rank 2", "where": "data", "time_s": NOW_S}
    with contextlib.closing(Recorder(run.directory.decisions)) as journal:
        journal.append(RemedyChanged(**of, step=69, state="trying", reason="worthwhile", numbers={"expected_s": 0.05}))
    after, (line,) = news(told, run.source.view(), NOW_S)
    assert line.endswith("rank 2 in data: is tried; it would save 50.0 ms a step by its model.")
    assert news(after, run.source.view(), NOW_S)[1] == []
    assert events(told, run.source.view())[1][-1]["state"] == "trying"


def test_why_is_news_once_as_a_line_and_as_an_event(run):
    # GIVEN a run of which all so far has been told, and causes that are found one after the other
    run.decide(verdict(20, "suspect"))
    told = all_of(run.source.view())
    with contextlib.closing(Recorder(run.directory.decisions)) as journal:
        journal.append(found("unknown", "It is not known why."))
        journal.append(found(sure=False))
    # WHEN news are told THEN what is known is a line, with how sure it is, and what is not known is none
    after, lines = news(told, run.source.view(), NOW_S)
    assert lines == [f"2027-01-15 08:10:00  {SENTENCE} This is likely, and not sure."]
    assert news(after, run.source.view(), NOW_S)[1] == []
    # AND for programs there are both
    _, values = events(told, run.source.view())
    assert [(value["type"], value["code"], value["capture_id"]) for value in values] == [
        ("cause", "unknown", "c-1"),
        ("cause", "sleep", "c-1"),
    ]
    assert (values[1]["place"], values[1]["next_step"]) == (
        {"function": "load", "file": "/job/data.py", "line": 57},
        "Look there.",
    )


def test_why_stands_below_who_where_a_capture_has_shown_it(run, store, trace, make_manifest):
    # GIVEN a captured suspect whose trace shows why it is slow
    run.decide(verdict(100, "suspect", onset=120), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    store.put("c-1", trace, lambda artefact: make_manifest("c-1", artefact))
    cause = CauseInfo(code="sleep", sure=True, sentence=SENTENCE, next_step="Look there.")
    store.note("c-1", findings().model_copy(update={"cause": cause}))
    run.ended(CaptureResult("c-1", 2, "stored", first_step=160, last_step=164))
    # WHEN it is watched THEN it says so, and what to do about it
    written = text(shown(run), Room(200))
    assert f"Why: {SENTENCE}" in written
    assert "Next: Look there." in written
    assert picture_values(shown(run))["cause"]["sentence"] == SENTENCE


# The command


def test_once_shows_a_run_that_has_ended(sftriage, tmp_path):
    run = run_at(tmp_path / "run")
    run.decide(verdict(20))
    code, out, _ = sftriage("watch", "--run", run.directory.path, "--once")
    assert code == 0
    assert "Healthy" in out
    values = sftriage("watch", "--run", run.directory.path, "--once", "--json").json
    assert (values["state"], values["windows"]) == ("ended", 1)
    # AND without a terminal and without --once, a run that has ended is shown, and that is all
    assert "the run has ended" in sftriage("watch", "--run", run.directory.path).out
    lines = sftriage("watch", "--run", run.directory.path, "--json").out.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["window", "ended"]


def test_what_is_no_run_is_an_error(sftriage, tmp_path):
    assert sftriage("watch", "--run", tmp_path / "none", "--once").code == 2
    assert sftriage("watch", "--once").code == 2
    (tmp_path / "run.json").write_text('{"version": 99}')
    code, out, err = sftriage("watch", "--run", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "newer" in err
    assert "not a directory" in sftriage("watch", "--run", tmp_path / "run.json").err
    # AND what is something else is not waited for
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert "not a run directory" in sftriage("watch", "--run", tmp_path / "other").err


def test_that_the_job_is_slower_than_its_own_best_is_said_when_it_begins_and_ends(run):
    # GIVEN a job with a suspect, which becomes slower than it has been on all ranks beside it, and is as good again
    slower = Regression(40, 38, 45, 0.21, "all", ("backward",), 0.05)
    windows = [None, slower, slower, replace(slower, until_step=60), None]
    told = all_of(run.source.view())
    for n, found in enumerate(windows):
        run.decide(verdict(20 + 10 * n, "suspect", regression=found), "throttle", "captures_left")
    # THEN each change is said, and what is as before is not
    _, lines = news(told, run.source.view(), NOW_S)
    assert ["best" in line for line in lines] == [False, True, True]
    assert "slower than its best of 50.0 ms a step by 21% since about step 40 (38 to 45), in backward" in lines[1]
    assert "as good as its best again since about step 60" in lines[2]
