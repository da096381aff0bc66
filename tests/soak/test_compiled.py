"""The moment the last gradient is ready in a model that inductor has compiled, and that watching it changes no bit.

`make test` has the same of `aot_eager`, which takes the same graphs and compiles no kernels.
"""

import json

import pytest

from tests.integration.jobs import bits
from tests.integration.trainer.test_ready import check_moments, run_ranks


@pytest.fixture(autouse=True)
def inductor(monkeypatch):
    monkeypatch.setenv("COMPILE_BACKEND", "inductor")


def test_a_rank_that_is_slow_inside_a_compiled_backward_shows_in_its_moment(tmp_path):
    check_moments(tmp_path / "compile", "compile", run_ranks("ready.py", tmp_path, "compile"))


def test_watching_a_compiled_model_changes_no_bit_of_any_gradient(tmp_path):
    for found in map(json.loads, run_ranks("bits.py", tmp_path, "compile").splitlines()):
        if "skip" in found:
            pytest.skip(found["skip"])
        assert (found["differ"], found["ready_watched"]) == (0, bits.STEPS)
