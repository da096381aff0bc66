"""`sftriage report`: one file to share, with the findings and without private paths."""

import re

import numpy as np
import pytest

from sftriage.runs.lateness import UNKNOWN, HeatMap
from sftriage.web.report import SHADES, shades_of
from tests.scenario import verdict
from tests.unit.web.client import NASTY, SHORT_NASTY, Tags
from tests.unit.web.test_charts import findings


@pytest.fixture
def reported(sftriage):
    def report(*arguments):
        code, out, problems = sftriage("report", *arguments)
        assert (code, problems) == (0, "")
        return out

    return report


def test_an_html_report_is_self_contained(captured, store, reported, tmp_path):
    # GIVEN the report of a reduced capture
    store.note("c-1", findings())
    out = tmp_path / "report.html"
    assert reported(str(captured.directory.path), "-o", str(out)).strip().endswith("report.html")
    page = out.read_text()
    tags = Tags(page).tags
    # THEN it has no script, no link, no form and nothing to fetch, and a policy that forbids it
    assert {tag for tag, _ in tags} & {"script", "link", "img", "form", "a", "iframe", "object"} == set()
    assert not re.search(r"url\(|@import|\son\w+=|https?://", page)
    assert "default-src 'none'" in page
    assert len(page) < 2 * 2**20
    # AND no path, no process and no command line of the machine that it ran on
    for text in (page, reported("c-1", "--run", str(captured.directory.path), "--format", "md")):
        assert str(captured.directory.path.parent) not in text
        assert "rings" not in text
    # AND it has the charts
    assert {"stack", "shades", "blocks"} <= {a.get("class") for tag, a in tags if tag == "svg"}


def test_names_are_text_whatever_they_are(captured, reported, store, trace, make_manifest):
    # GIVEN a journal and a manifest whose names are markup
    captured.decide(verdict(110, "suspect", stage=NASTY, advances={NASTY: 0.1}), "throttle", NASTY, rule=NASTY)
    store.put("c-2", trace, lambda artefact: make_manifest("c-2", artefact, stage=SHORT_NASTY, rule=NASTY))
    where = str(captured.directory.path)
    # WHEN they are reported THEN they do nothing, in HTML as in Markdown
    page = Tags(reported(where, "--format", "html"))
    assert all("onclick" not in a and "onerror" not in a for _, a in page.tags)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<img" not in reported(where, "--format", "md").replace("\\<", "")


def test_a_run_without_a_judged_window_has_a_report_too(run, reported):
    assert "Warming up" in reported(str(run.directory.path))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nothing-of-that-name", "--run", "{run}"), "nothing-of-that-name"),
        (("{run}", "--run", "{run}"), "give the run directory only once"),
        (("{run}", "-o", "{run}/run.json"), "exists already; --force"),
        (("{run}", "-o", "{run}/none/report.md"), "No such file"),
        (("--store", "{run}"), "give a capture"),
    ],
)
def test_a_mistake_is_one_line(captured, sftriage, arguments, problem):
    where = str(captured.directory.path)
    code, out, problems = sftriage("report", *(one.replace("{run}", where) for one in arguments))
    assert (code, out, problems.count("\n")) == (2, "", 1)
    assert problem in problems


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
