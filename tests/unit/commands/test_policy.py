"""`sftriage policy`: policies checked, shown and tried out, for people and for programs."""

import pytest
import yaml

from sftriage.policy.in_force import shipped
from sftriage.policy.parsing import parse
from tests.unit.commands.test_analyze import recorded

POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: mine}
spec:
  detection: {window_steps: 20, stride_steps: 10, warmup_steps: 10}
  rules: [{name: slow-input, match: {stage: [data], gain: ">= 10%"}, capture: {steps: 3}, cooldown: 10m}]
"""


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(POLICY, encoding="utf-8")
    return path


@pytest.fixture
def job(tmp_path):
    """A job of 100 ms steps; from step 60 of 120 on rank 2 is 30 ms late in data."""
    return recorded(tmp_path / "job.npz", 0.03, steps=120, first=60)


def test_a_saved_outcome_is_compared_and_a_difference_shown(sftriage, policy, job, tmp_path):
    saved = tmp_path / "expected.txt"
    assert sftriage("policy", "test", policy, "--on", job, "--save", saved).code == 0
    assert sftriage("policy", "test", policy, "--on", job, "--expect", saved).code == 0
    # WHEN the policy changes and no longer captures
    policy.write_text(POLICY.replace("[data]", "[forward]"), encoding="utf-8")
    outcome = sftriage("policy", "test", policy, "--on", job, "--expect", saved)
    # THEN the command fails with a unified diff
    assert outcome.code == 1
    assert outcome.out.startswith("--- expected\n+++ replayed\n@@")
    assert "\n-| capture | 1 | rule slow-input (1) |\n" in outcome.out
    assert "\n+| capture | 0 |  |\n" in outcome.out


def test_the_outcome_does_not_depend_on_place_width_or_time_zone(sftriage, policy, job, tmp_path, monkeypatch):
    first = sftriage("policy", "test", policy, "--on", job).out
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for path in (policy, job):
        path.rename(elsewhere / path.name)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert sftriage("policy", "test", "mine.yaml", "--on", "job.npz").out == first


def test_the_clock_starts_at_start(sftriage, policy, job):
    policy.write_text(POLICY + "  active: {cron: '* 20 * * *'}\n", encoding="utf-8")
    outcome = sftriage("policy", "test", policy, "--on", job, "--start", "2026-07-01T08:00:00")
    assert "active: captures are not allowed until 2026-07-01T20:00:00Z" in outcome.out


@pytest.mark.parametrize("name", sorted(shipped()))
def test_show_prints_a_complete_policy(sftriage, tmp_path, name):
    shown = sftriage("policy", "show", name).out
    again = parse(shown, "shown.yaml").policy
    assert again.filled() == yaml.safe_load(shown)
    assert sftriage("policy", "show", name, "--json").json == yaml.safe_load(shown)
