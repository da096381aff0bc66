"""The Grafana dashboard and the alerts in docs/metrics.md ask for what there is."""

import json
import re
from itertools import product
from pathlib import Path

import pytest

from .sinks.test_metrics import everything

HOME = Path(__file__).parent.parent.parent
DASHBOARD = json.loads((HOME / "k8s" / "dashboards" / "sftriage.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
DOCUMENT = (HOME / "docs" / "metrics.md").read_text(encoding="utf-8")

_NAME = re.compile(r"\bsftriage_[a-z_]+")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def exposed() -> set[str]:
    """The names of all series there can be."""
    families = everything(per_rank=True).registry.collect()
    return {family.name + suffix for family in families for suffix in _SUFFIXES[family.type]}


def targets() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("title", "expression"), targets())
def test_a_panel_names_only_metrics_that_there_are(title, expression):
    names = set(_NAME.findall(expression))
    assert names, title
    assert names <= exposed()


def test_there_is_a_panel_for_whatever_somebody_asks():
    asked = {name for _, expression in targets() for name in _NAME.findall(expression)}
    assert asked >= {
        "sftriage_exposed_seconds_total",
        "sftriage_verdict",
        "sftriage_suspect_gain_seconds",
        "sftriage_decisions_total",
        "sftriage_captures_total",
        "sftriage_capture_cost_seconds_total",
        "sftriage_coverage_ratio",
        "sftriage_telemetry_lag_seconds",
    }
    # AND those that captures are found from ask for exemplars
    with_exemplars = {t["expr"] for panel in PANELS for t in panel["targets"] if t["exemplar"]}
    assert any("sftriage_captures_total" in one for one in with_exemplars)
    assert any("sftriage_step_exposed_seconds_bucket" in one for one in with_exemplars)


def test_the_panels_are_whole_and_none_lies_on_another():
    taken = set()
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, rows = (range(place[at], place[at] + place[of]) for at, of in ("xw", "yh"))
        cells = set(product(columns, rows))
        assert not cells & taken, panel["title"]
        taken |= cells
        # Whoever imports it has a data source of another name.
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    assert {one["name"] for one in DASHBOARD["templating"]["list"]} == {"datasource", "job"}


def test_the_page_about_metrics_names_what_there_is_and_all_of_it():
    # A counter is said as it is exposed; the parts of the histogram go without saying.
    families = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in everything(per_rank=True).registry.collect()
    }
    named = set(_NAME.findall(DOCUMENT))
    assert families - named == set()
    assert named - families - exposed() == set()
