"""The public surface, used as a stranger uses it: typed, lazily imported, and documented by a page that runs."""

import contextlib
import importlib.util
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import sftriage
from sftriage.errors import InputError
from sftriage.testing import Delay, SyntheticJob, assert_named, assert_none_named, decisions, from_step, save
from sftriage.windows.steplog import StepLog
from tests.scenario import SCHEMA, info_of, slow_loader, steps_of_rank

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "library.md"
SURFACE = Path(__file__).with_name("surface.txt")
MODULES = ("integrations", "integrations.accelerate", "testing")  # (the others import their frameworks)
SLOW = Delay("data", rank=2, seconds=0.03, steps=from_step(80))


def surface() -> str:
    """Every public name with its signature, or its fields."""
    lines = [_line("sftriage", name, getattr(sftriage, name)) for name in sftriage.__all__ if name != "__version__"]
    for module in MODULES:
        path = f"sftriage.{module}"
        named = importlib.import_module(path)
        own = getattr(named, "__all__", None) or [
            name for name, value in vars(named).items() if name[0] != "_" and getattr(value, "__module__", "") == path
        ]
        lines += [_line(path, name, getattr(named, name)) for name in sorted(own)]
    return "\n".join(lines) + "\n"


def _line(path: str, name: str, value: object) -> str:
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return f"{path}.{name}: {', '.join(field for field in fields if field[0] != '_')}"
    try:
        return f"{path}.{name}{inspect.signature(value)}"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{path}.{name}"


def test_the_surface_is_as_recorded():
    """After an intended change: `python -m tests.unit.test_library`, and read the diff."""
    assert surface() == SURFACE.read_text(encoding="utf-8")


def test_the_page_names_every_public_name():
    table = PAGE.read_text(encoding="utf-8").partition("## What is public")[2]
    named = re.findall(r"`([\w.]+)`", table)
    assert set(sftriage.__all__) - {"__version__"} | {f"sftriage.{module}" for module in MODULES} <= set(named)


def test_the_page_runs_and_prints_what_it_shows(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    space: dict[str, object] = {}
    printed, compared = "", 0
    for language, text in re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if language == "text":
            assert printed == text
            compared += 1
        elif "matplotlib" in text and not importlib.util.find_spec("matplotlib"):
            continue  # sftriage does not install it
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(text.replace('"frontier.svg"', repr(str(tmp_path / "frontier.svg"))), space)
            printed = out.getvalue()
    assert compared == 6


def test_a_strangers_script_passes_mypy_strict(tmp_path):
    # GIVEN a script elsewhere that names the type of each result
    script = tmp_path / "theirs.py"
    script.write_text(
        dedent("""
        import numpy as np
        import sftriage
        from sftriage.integrations import VerdictLog, log_verdicts
        from sftriage.testing import Delay, SyntheticJob, assert_named, decisions

        recording: sftriage.RecordedWindows = sftriage.load("run", stride_steps=50)
        windows: list[sftriage.Window] = list(recording)
        accounting: sftriage.Accounting = sftriage.account(windows[0])
        share: float = float(accounting.advances_S[0] / accounting.exposed_s)
        verdicts: list[sftriage.Verdict] = list(sftriage.judge(windows, sftriage.Settings(min_gain_fraction=0.1)))
        named: sftriage.Suspect | None = verdicts[0].named
        sentence: str = sftriage.explain(verdicts[0])
        result: sftriage.WhatIf = sftriage.whatif(windows[0], verdicts[0])
        own = sftriage.Window(sftriage.StageSchema(("data", "backward"), ("backward",)), 0, np.ones((9, 2, 2)))
        job: sftriage.Window = SyntheticJob(n_steps=100).run(Delay("data", 1, 0.05))
        verdict: sftriage.Verdict = assert_named(job, rank=1, stage="data")
        decided: list[sftriage.Decision] = decisions([own], "default")
        log: VerdictLog = log_verdicts()
        with sftriage.Monitor().step(), sftriage.stage("data"):
            pass
        try:
            sftriage.load("nowhere")
        except sftriage.SftriageError as error:
            print(error)
        sftriage.load(3)  # type: ignore[arg-type]
        sftriage.nothing  # type: ignore[attr-defined]
        """),
        encoding="utf-8",
    )
    # (all of torch, of which no public name has a type, takes three quarters of the time)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8")
    # WHEN mypy checks it with sftriage as installed THEN it finds nothing, and both mistakes are errors
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache" / "strangers", script.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr


def test_without_the_functions_nothing_but_the_standard_library_is_loaded():
    code = "import sys, sftriage; sftriage.Monitor, sftriage.stage, sftriage.StageSchema; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_a_saved_recording_is_loaded_as_it_was(tmp_path):
    job = SyntheticJob(n_steps=60, hosts=("a", "a", "b", "b"), kinds=("",) * 59 + ("evaluation",), work=512)
    saved = job.run(SLOW, split=True, first_step=7)
    (loaded,) = sftriage.load(save(saved, tmp_path / "job"), window_steps=60)
    for name in sftriage.Window.__dataclass_fields__:
        before, after = getattr(saved, name), getattr(loaded, name)
        assert (before == after).all() if hasattr(before, "shape") else before == after, name


def test_rings_and_step_logs_are_loaded_without_a_run(tmp_path):
    # GIVEN the rings of two ranks and the step log of another job, beside a directory that holds nothing of the sort
    for name in ("rings", "logs", "empty"):
        (tmp_path / name).mkdir()
    monitors = [sftriage.Monitor(("data",), (), rank=rank, world_size=2, rings=tmp_path / "rings") for rank in (0, 1)]
    for _ in range(60):
        for monitor in monitors:
            with monitor.step(), monitor.stage("data"):
                pass
    # THEN the rings are a recording, and the directory is none
    windows = list(sftriage.load(tmp_path / "rings", window_steps=30, stride_steps=30, warmup_steps=0))
    assert [(window.first_step, window.durations_NRS.shape) for window in windows] == [
        (0, (30, 2, 2)),
        (30, (30, 2, 2)),
    ]
    log = StepLog(tmp_path / "logs", info_of(0, 1))
    log.append(steps_of_rank(0, 1, range(50), slow_loader))
    log.close()
    (window,) = sftriage.load(tmp_path / "logs", warmup_steps=0)
    assert (window.schema, window.durations_NRS.shape) == (SCHEMA, (50, 1, 4))
    with pytest.raises(InputError, match="not a run directory"):
        sftriage.load(tmp_path / "empty")


def test_account_and_judge_agree():
    windows = [SyntheticJob().run(SLOW)]
    (verdict,) = sftriage.judge(iter(windows))
    accounting = sftriage.account(windows[0])
    assert accounting.advances_S.sum() == pytest.approx(accounting.exposed_s, rel=1e-12)
    assert list(verdict.advances_s.values()) == pytest.approx(list(accounting.advances_S / accounting.n_steps))


@pytest.mark.parametrize(
    ("delay", "rank", "stage", "passes"),
    [
        (SLOW, 2, "data", True),
        (SLOW, 1, "data", False),
        (SLOW, 2, "forward", False),
        (Delay("data", 0, 0.0), 0, "data", False),
    ],
)
def test_assert_named(delay, rank, stage, passes):
    recording = SyntheticJob(n_steps=200).run(delay)
    if passes:
        assert assert_named(recording, rank=rank, stage=stage).first_step <= 90
        with pytest.raises(AssertionError, match="expected no suspect; the verdicts:\n"):
            assert_none_named(recording)
    else:
        with pytest.raises(AssertionError, match=f"expected rank {rank} and no other, in {stage}; the verdicts:\n"):
            assert_named(recording, rank=rank, stage=stage)


def test_decisions_are_those_of_the_policies():
    recording = SyntheticJob(n_steps=200).run(SLOW)
    captured = {
        name: [request.rank for one in decisions(recording, name) for request in one.requests]
        for name in ("default", "observe-only")
    }
    assert captured == {"default": [2], "observe-only": []}


if __name__ == "__main__":
    SURFACE.write_text(surface(), encoding="utf-8")
