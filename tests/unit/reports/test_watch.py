"""`sftriage watch`: exact figures that fit the terminal, and nothing but text from any file."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from sftriage.assistants.answers import Answers
from sftriage.model.captures import CaptureResult
from sftriage.model.events import CaptureChanged, CauseFound, Place, RemedyChanged
from sftriage.policy.in_force import find
from sftriage.reports.watch import FollowedRun, RunNews, closing, opening
from sftriage.reports.watch_lines import apportion, clean, picture_lines, together
from sftriage.runs.liveness import RankCoverage
from sftriage.runs.source import View
from sftriage.runs.summary import RunSummary
from tests.scenario import NOW_S, Run, request_of, run_at, slow_loader, verdict
from tests.unit.hanging import FOUND, NEXT_STEP, SENTENCE, WHOLE_JOB
from tests.unit.web.client import NASTY

RECORDED = RankCoverage(4, 4)
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n[bold red]rank\u202e\u200b\ud800" + "x" * 300


def shown(run: Run) -> RunSummary:
    """The summary of a run whose four ranks record."""
    return RunSummary(replace(run.source.view(), telemetry=RECORDED))


def text(of: RunSummary, width: int = 100, height: int | None = None, *, place: str = "runs/next", **options) -> str:
    return "\n".join(line.plain for line in picture_lines(of, place, NOW_S, width, height, **options))


ADVANCES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=12
)


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40), st.integers(0, 10_000))
def test_shares_add_up_and_none_is_off_by_more_than_one(values, total):
    shares = apportion(values, total)
    whole = sum(values)
    assert sum(shares) == (total if whole > 0 else 0)
    for value, share in zip(values, shares, strict=True):
        assert share >= 0
        if whole > 0:
            assert abs(share - value / whole * total) < 1 + 1e-6


@given(ADVANCES, st.integers(1, 14), st.booleans())
def test_merged_stages_keep_their_time_and_the_named_stage_its_own(advances_s, most, has_name):
    named = min(advances_s, key=lambda stage: advances_s[stage]) if has_name else None
    found = together(advances_s, most, named)
    assert len(found) <= most
    assert sum(found.values()) == pytest.approx(sum(advances_s.values()))
    if most > 1 and named is not None:
        assert found[named] == advances_s[named]


@settings(max_examples=30)
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
    frontier = RunSummary(run.source.view()).frontier
    assert frontier is not None
    # THEN its stages sum to the step
    assert sum(frontier.advances_s.values()) == pytest.approx(frontier.exposed_s, rel=1e-12, abs=1e-12)
    # AND so do the printed figures, to the last digit
    lines = text(shown(run), width, height).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("Frontier"))
    rows = [line for line in lines[start + 1 :][:4] if line.endswith("%")]
    stages = [line for line in rows if not line.lstrip().startswith("step time")]
    tenths = [round(float(line.split()[-3]) * 10) for line in stages]
    shares = [round(float(line.split()[-1].rstrip("%")) * 10) for line in stages]
    assert sum(tenths) == round(sum(frontier.advances_s.values()) * 1e4)
    if frontier.exposed_s > 0.0:
        assert sum(shares) == 1000


def test_a_fault_is_drawn_from_the_step_in_which_it_began(run):
    # GIVEN four ranks, one of them slow from step 60 on, and windows that overlap, the first of which begins before
    run.record(4, range(100), lambda rank, step: {"data": 50.0 if rank == 2 and step >= 60 else 10.0, "backward": 30.0})
    for first in (0, 20, 40, 50):
        slow = first + 49 > 60
        run.decide(verdict(first, "suspect" if slow else "healthy", onset=60 if slow else None), "hold", "pending")
    followed = FollowedRun(run.directory.path)
    for width, column_steps in ((200, 1), (60, 4)):
        # WHEN it is drawn, with a column a step or several
        lines = text(followed.summary(followed.look()), width).splitlines()
        at = next(n for n, line in enumerate(lines) if line.lstrip().startswith("step time"))
        bars, steps = (line[lines[at + 1].index("0") :] for line in lines[at : at + 2])
        # THEN step times rise in the step of the onset, which is marked, and in no earlier one
        onset = 60 // column_steps
        assert (steps.index("^60"), len(steps.rstrip())) == (onset, 100 // column_steps)
        assert set(bars[:onset]) == {"▅"}
        assert set(bars[onset : 100 // column_steps]) == {"█"}
    # AND without step logs, windows are drawn, without an onset
    assert "^" not in text(shown(run))


@given(st.integers(1, 140), st.one_of(st.none(), st.integers(1, 50)), st.booleans(), st.booleans())
def test_it_fits_any_terminal(busy, width, height, blocks, footer):
    lines = picture_lines(
        busy, "runs/next", NOW_S, width, height, blocks=blocks, footer="Ctrl-C ends this" if footer else ""
    )
    assert height is None or len(lines) <= height
    assert all(cell_len(line.plain) <= width for line in lines)
    if not blocks and height is None:
        assert not set("".join(line.plain for line in lines)) & set("█▏▁▇")


@pytest.fixture(scope="module")
def busy(tmp_path_factory) -> RunSummary:
    """A run with much to show, some of it of double width."""
    run = run_at(tmp_path_factory.mktemp("busy") / "run")
    advances = {f"stage-{n}-\u65e5\u672c\u8a9e": 0.001 * n for n in range(30)}
    for n in range(40):
        of = verdict(20 + 10 * n, ("suspect", "healthy", "needs_evidence")[n % 3], advances=advances)
        run.decide(of, "throttle", "cooldown of rule slow-rank " * 5)
    captured = verdict(500, "suspect", advances=advances)
    run.decide(captured, "capture", "rule", requests=tuple(request_of(f"c-{n}") for n in range(30)))
    return shown(run)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24)])
def test_on_a_small_terminal_every_part_is_visible(busy, run, width, height):
    waiting = " ".join(text(RunSummary(View("none")), width, height).split())
    assert waiting.endswith("Waiting for a run Watching starts when the run begins: runs/next")
    written = text(busy, width, height, footer="Ctrl-C")
    for title in ("Slow, captured", "Frontier", "Suspects", "Decisions", "Captures", "Telemetry", "Ctrl-C"):
        assert title in written
    # AND the rest is counted or merged
    assert "others" in written
    assert "more" in written
    # AND the resolution of a hold-off is visible
    run.decide(verdict(20, "needs_evidence", reasons=("co_critical",)), "hold", "captures_left")
    assert "Next: Request fewer" in text(shown(run), width, 12)


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
    written = text(RunSummary(view), 2000, place=nasty)
    lines = "\n".join([opening(view, nasty), *RunNews().lines(view, NOW_S)])
    for shown_text in (written.replace("\n", ""), lines.replace("\n", "")):
        # THEN everything in it is text, and harmless text is unchanged
        assert clean(shown_text) == shown_text
        shown_text.encode()
        assert harmless in shown_text


def test_a_window_that_differs_gets_a_line_and_every_window_an_event(run):
    # GIVEN a run whose news have all been read
    run.decide(verdict(20))
    news, listed = RunNews(run.source.view()), RunNews()
    assert [(value["type"], value["first_step"]) for value in listed.values(run.source.view())] == [("window", 20)]
    # WHEN windows come in
    run.decide(verdict(30))
    run.decide(verdict(40, "suspect"), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    run.decide(verdict(50, "suspect"), "throttle", "captures_left")
    run.decide(verdict(60, "suspect"), "throttle", "captures_left")
    run.decide(verdict(70, "suspect", rank=3), "throttle", "captures_left")
    run.ended(CaptureResult("c-1", 2, "failed", "no space"))
    lines = news.lines(run.source.view(), NOW_S)
    # THEN there is a line for each that differs
    assert [line[21:].partition(":")[0] for line in lines] == [
        "Rank 2 is slow in data",
        "Rank 2 is slow in data",
        "Rank 3 is slow in data",
        "No trace of rank 2",
    ]
    assert lines[0].endswith("Capturing rank 2 (c-1).")
    assert lines[1].endswith("requested, ? left. To resolve it: Request fewer, or raise the policy's limits.")
    assert lines[0].startswith("2027-01-15 08:01:29  ")
    # AND each window and each end of a capture is an event
    values = listed.values(run.source.view())
    assert [value["type"] for value in values] == ["window"] * 5 + ["capture"]
    assert values[1]["decision"]["captures"][0]["capture_id"] == "c-1"
    assert (values[-1]["state"], values[-1]["detail"]) == ("failed", "no space")
    # AND nothing is repeated
    assert news.lines(run.source.view(), NOW_S) == listed.values(run.source.view()) == []
    assert closing(run.source.view()) == "The run has ended: 6 windows judged, 0 captures stored."
    # AND a restarted journal is read again
    run.directory.decisions.unlink()
    run.decide(verdict(20, "suspect"), "hold", "pending")
    assert len(news.lines(run.source.view(), NOW_S)) == 1


def test_remedies_and_causes_are_values(run):
    # GIVEN a run whose news have all been read, a remedy on trial, and causes, one of them unknown
    news = RunNews(run.source.view())
    of = {"attempt": 0, "remedy": "stragglar", "rank": 2, "who": "rank 2", "where": "data", "time_s": NOW_S}
    run.record_events(
        RemedyChanged(**of, step=69, state="trying", reason="worthwhile", numbers={"expected_s": 0.05}),
        CauseFound(NOW_S, "c-1", 2, "unknown", True, "It is not known why."),
        CauseFound(NOW_S, "c-1", 2, "sleep", False, "It sleeps.", Place("load", "/job/data.py", 57), 3, "Look there."),
    )
    # WHEN programs read them THEN each is there once
    remedy, *causes = news.values(run.source.view())
    assert (remedy["state"], [one["code"] for one in causes]) == ("trying", ["unknown", "sleep"])
    assert causes[1]["place"] == {"function": "load", "file": "/job/data.py", "line": 57}
    assert (causes[1]["capture_id"], causes[1]["next_step"]) == ("c-1", "Look there.")
    assert news.values(run.source.view()) == []


@pytest.fixture
def hangs(tmp_path):
    """A run that hangs, and whose capture says why."""
    run = run_at(tmp_path / "run")
    run.decide(verdict(10))
    run.decide(replace(verdict(60, "stalled", reasons=("in_sync",)), last_step=60), "capture", requests=(WHOLE_JOB,))
    run.record_events(FOUND, CaptureChanged(1.0, CaptureResult("c-9", 2, "stored", "", 60, 60)))
    return run


def test_GIVEN_a_hang_THEN_every_view_begins_with_its_reason(hangs):
    assert opening(hangs.source.view(), "runs/r") == f"Watching resnet, run run-1. {SENTENCE}"
    picture = text(shown(hangs), width=400)
    assert picture.count(SENTENCE) == 1
    assert f"Next: {NEXT_STEP}" in picture
    lines = RunNews().lines(hangs.source.view(), NOW_S)
    assert any(line.endswith("Capturing every rank (c-9).") for line in lines)
    assert any("Captured where the ranks are in step 60 (0 B): sftriage traces show c-9" in line for line in lines)
    assert lines[-1].endswith(f"{SENTENCE} {NEXT_STEP}")


def test_GIVEN_a_hang_THEN_commands_and_assistants_say_why(hangs, sftriage, tmp_path):
    explained = sftriage("explain", "60", "--run", hangs.directory.path)
    assert explained.out.splitlines()[0] == f"{SENTENCE} {NEXT_STEP}"
    assert "What would resolve it" not in explained.out
    assert sftriage("explain", "60", "--run", hangs.directory.path, "--json").json["hang"]["code"] == FOUND.code
    assert sftriage("explain", "20", "--run", hangs.directory.path, "--json").json["hang"] is None
    picture = sftriage("watch", "--run", hangs.directory.path, "--once", "--json").json
    assert (SENTENCE in picture["sentence"], picture["cause"]["place"]["line"]) == (True, 52)
    answers = Answers(tmp_path)
    health = answers.run_health()
    assert (SENTENCE in health["says"], health["cause"]) == (True, SENTENCE)
    assert answers.explain_window("60")["lines"][0] == f"{SENTENCE} {NEXT_STEP}"


def test_GIVEN_a_recording_that_ends_in_a_hang_THEN_its_analysis_ends_with_the_reason(hangs, sftriage):
    hangs.record(4, range(100), slow_loader)
    hangs.directory.policy_file.write_text(find("default").read_text())
    code, out, _ = sftriage("analyze", hangs.directory.path)
    assert code == 0
    assert " ".join(out.split()).endswith(f"{SENTENCE} {NEXT_STEP}")


def test_once_shows_a_run_that_has_ended(sftriage, tmp_path):
    run = run_at(tmp_path / "run")
    run.decide(verdict(20))
    code, out, _ = sftriage("watch", "--run", run.directory.path, "--once")
    assert code == 0
    assert "Healthy" in out
    values = sftriage("watch", "--run", run.directory.path, "--once", "--json").json
    assert (values["state"], values["windows"]) == ("ended", 1)
    # AND without a terminal and without --once, the state of an ended run is all
    assert "the run has ended" in sftriage("watch", "--run", run.directory.path).out
    lines = sftriage("watch", "--run", run.directory.path, "--json").out.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["window", "ended"]


def test_a_directory_without_a_run_is_an_error(sftriage, tmp_path):
    assert sftriage("watch", "--run", tmp_path / "none", "--once").code == 2
    assert sftriage("watch", "--once").code == 2
    (tmp_path / "run.json").write_text('{"version": 99}')
    code, out, err = sftriage("watch", "--run", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "newer" in err
    assert "not a directory" in sftriage("watch", "--run", tmp_path / "run.json").err
    # AND watch does not wait for a directory that holds something else
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert "not a run directory" in sftriage("watch", "--run", tmp_path / "other").err
