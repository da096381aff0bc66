"""`sftriage report`: one file to hand on, which says what was found, and nothing that is nobody's business."""

import re

import numpy as np
import pytest

from sftriage.runs.lateness import UNKNOWN, HeatMap
from sftriage.traces.manifest import CauseInfo, Findings, ReproducedInfo, StageProfile
from sftriage.web.report import SHADES, shades_of
from tests.scenario import verdict
from tests.unit.web.asking import NASTY, SHORT_NASTY, Seen

SENTENCE = "Rank 2 is slow in data: 38.0 of 40.0 ms in load (data.py:57), which sleeps."


@pytest.fixture
def reported(sftriage):
    def report(*arguments):
        code, out, problems = sftriage("report", *arguments)
        assert (code, problems) == (0, "")
        return out

    return report


@pytest.fixture
def explained(captured, store):
    """A run whose capture has the fault in it, and a cause."""
    zeros = dict.fromkeys(
        ("working_s", "waiting_s", "device_s", "collective_s", "kernels", "launches", "launch_s"), 0.0
    )
    profile = StageProfile(
        source="t", rank=2, first_step=1, last_step=5, steps=5, step_s=0.1, stage_s=0.04, unseen_s=0.04, **zeros
    )
    cause = CauseInfo(code="sleep", sure=True, sentence=SENTENCE, next_step="Look there.")
    store.note("c-1", ReproducedInfo(answer="yes", steps=5, steps_with=5, over_s=0.04, expected_s=0.04))
    store.note("c-1", Findings(stage="data", suspect=profile, shares=(), summary="data took 40 ms", cause=cause))
    return captured


SAYS = {
    "what was found": "Rank 2 is slow in data",
    "since when": "step 120",
    "how sure": "its trace shows it in 5 of 5 captured steps",
    "what it cost": "of each slow step",
    "what to do": "Look there.",
    "which policy": "of policy default",
    "why": SENTENCE,
    "how to fetch the trace": "sftriage traces get c-1 --run run",
}


@pytest.mark.parametrize("form", ["html", "md"])
def test_a_report_of_a_run_says_all_that_its_reader_asks(explained, reported, form):
    # GIVEN a run with a captured suspect WHEN its report is written
    told = reported(str(explained.directory.path), "--format", form)
    # THEN all of it is there
    told = told.replace("\\", "")
    assert {what for what, words in SAYS.items() if words not in told} == set()
    # AND no path, no process and no command line of the machine that it ran on
    assert str(explained.directory.path.parent) not in told
    assert "rings" not in told


def test_a_report_of_a_capture_has_its_steps_and_its_cause(explained, reported):
    told = reported("c-1", "--run", str(explained.directory.path), "--format", "html")
    # THEN the captured steps are drawn beside those of a control rank
    assert "Mean time of each stage in these steps" in told
    assert SENTENCE in told
    assert str(explained.directory.path.parent) not in told


def test_a_file_of_html_needs_nothing_but_itself(explained, reported, tmp_path):
    # GIVEN a report in a file WHEN it is looked through
    out = tmp_path / "report.html"
    assert reported(str(explained.directory.path), "-o", str(out)).strip().endswith("report.html")
    page = out.read_text()
    seen = Seen(page)
    # THEN there is no script, no link, no form, nothing to fetch, and a browser is told not to
    assert {tag for tag, _ in seen.tags} & {"script", "link", "img", "form", "a", "iframe", "object"} == set()
    assert not re.search(r"url\(|@import|\son\w+=|https?://", page)
    assert "default-src 'none'" in page
    assert len(page) < 2 * 2**20
    # AND what there is to see is drawn
    assert {"stack", "shades", "blocks"} <= {a.get("class") for tag, a in seen.tags if tag == "svg"}


def test_names_are_text_whatever_they_are(captured, reported, store, trace, make_manifest):
    # GIVEN a journal and a manifest whose names are markup
    captured.decide(verdict(110, "suspect", stage=NASTY, advances={NASTY: 0.1}), "throttle", NASTY, rule=NASTY)
    store.put("c-2", trace, lambda artefact: make_manifest("c-2", artefact, stage=SHORT_NASTY, rule=NASTY))
    where = str(captured.directory.path)
    # WHEN they are reported THEN they do nothing, in HTML as in Markdown
    page = Seen(reported(where, "--format", "html"))
    assert all("onclick" not in a and "onerror" not in a for _, a in page.tags)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<img" not in reported(where, "--format", "md").replace("\\<", "")


def test_a_run_that_nobody_has_judged_has_a_report_too(run, reported):
    assert "Warming up" in reported(str(run.directory.path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing-of-that-name", "--run", "{run}"), "nothing-of-that-name"),
        (("{run}", "--run", "{run}"), "name the run directory once"),
        (("{run}", "-o", "{run}/run.json"), "exists already; --force"),
        (("{run}", "-o", "{run}/none/report.md"), "No such file"),
        (("--store", "{run}"), "name a capture"),
    ],
)
def test_a_mistake_is_one_line(captured, sftriage, arguments, said):
    where = str(captured.directory.path)
    code, out, problems = sftriage("report", *(one.replace("{run}", where) for one in arguments))
    assert (code, out, problems.count("\n")) == (2, "", 1)
    assert said in problems


def test_the_picture_of_lateness_has_every_cell_once():
    # GIVEN a map of two ranks: in time, a little late, as late as any, and nothing known
    levels = np.array([[0, 40, 40, 254], [UNKNOWN, 254, 0, 0]], dtype=np.uint8)
    heat = HeatMap(0, 3, 1, 1, 1, 2, levels, 0.1, ())
    # WHEN it is drawn
    shades = shades_of(heat)
    # THEN each run of cells is a rectangle of its shade, and what is in time is the ground
    assert len(shades) == SHADES
    assert shades[0] == "M1 0h2v1h-2z"
    assert shades[-2] == "M3 0h1v1h-1zM1 1h1v1h-1z"
    assert shades[-1] == "M0 1h1v1h-1z"
    assert sum(map(len, shades)) == sum(map(len, (shades[0], shades[-2], shades[-1])))
