"""The Grafana dashboard and docs/metrics.md name the metrics that `METRICS` declares, with their labels."""

import json
import re
from itertools import chain, product
from pathlib import Path

import pytest

from sftriage.sinks.metrics import METRICS

HOME = Path(__file__).parent.parent.parent
DASHBOARD = json.loads((HOME / "k8s" / "dashboards" / "sftriage.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
DOCUMENT = (HOME / "docs" / "metrics.md").read_text(encoding="utf-8")

_NAME = re.compile(r"\bsftriage_[a-z_]+")
DECLARED = {}
"""Labels by name, as exposed."""
for key in chain.from_iterable(METRICS.values()):
    kind, name, *labels = re.findall(r"\w+", key)
    DECLARED[f"sftriage_{name}" + ("_total" if kind == "counter" else "")] = set(labels)
SERIES = {*DECLARED, *(f"sftriage_step_exposed_seconds_{part}" for part in ("bucket", "count", "sum"))}


def targets() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("title", "expression"), targets())
def test_a_panel_names_only_declared_metrics(title, expression):
    names = set(_NAME.findall(expression))
    assert names, title
    assert names <= SERIES


def test_there_is_a_panel_for_each_question():
    shown = {name for _, expression in targets() for name in _NAME.findall(expression)}
    assert shown >= {
        "sftriage_exposed_seconds_total",
        "sftriage_verdict",
        "sftriage_suspect_gain_seconds",
        "sftriage_decisions_total",
        "sftriage_captures_total",
        "sftriage_capture_cost_seconds_total",
        "sftriage_coverage_ratio",
        "sftriage_telemetry_lag_seconds",
    }
    # AND the panels that lead to captures show exemplars
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


def test_the_page_about_metrics_names_them_all_with_their_labels():
    named = set(_NAME.findall(DOCUMENT))
    assert set(DECLARED) <= named <= SERIES
    rows = re.findall(r"^\| (`sftriage_.*?) \| (.*?) ?\| ", DOCUMENT, re.MULTILINE)
    for names, labels in rows:
        expected = set().union(*(DECLARED[name] for name in _NAME.findall(names)))
        assert set(re.findall(r"`(\w+)`", labels)) == expected, names
    assert len(rows) > 20
