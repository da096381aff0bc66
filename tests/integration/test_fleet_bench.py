"""The bench of a large job, at a small size: its made-up agents are taken for real ones, and its figures are there."""

import json
import sys

import pytest

from tests.integration.processes import ROOT, output_of

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
SIZE = ("--ranks", 32, "--sizes", 1, "--processes", 2, "--window", 40, "--stride", 20)


def test_a_made_up_job_is_judged_by_the_real_controller(environment):
    # GIVEN four agents of eight ranks each, one of which is slow from the second window on
    command = [sys.executable, "-m", "bench", "fleet", *SIZE, "--steps-per-second", 20, "--seconds", 8, "--json"]
    (found,) = json.loads(output_of(*command, cwd=ROOT, env=environment))["sizes"]
    # THEN that rank is named and nobody else, and what its agents told has all come
    assert found["named"] == [found["planted"]], found["said"]
    assert (found["agents"], found["coverage_min"]) == (4, 1.0)
    # AND its capture, and those of its peers, were asked for once each
    assert found["requests"] == 4
    # AND the controller has ended with the job, by itself
    assert found["controller_ended_with"] == 0, found["said"]
    assert found["windows"] >= found["steps"] // 20 - 4
    assert found["step_to_verdict_p99_s"] >= found["last_step_to_verdict_p50_s"] > 0.0
