"""Training with Hugging Face's Trainer, Lightning and Accelerate: unedited, with a line of ours, and with both."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sftriage.runs.recordings import load_recording
from tests.integration.processes import FORKED, TORCHRUN, slowed
from tests.integration.runs import named, verdicts
from tests.integration.test_auto_seams import POLICY

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
STEPS, SLOW_FROM = 150, 60
STAGES = ("data", "forward", "backward", "exchange", "optimizer", "other")


BLOCK_BYTES, HEADER_BYTES = 32768, 7


def _tensorboard(directory: Path) -> dict[str, dict[int, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {file.parent for file in directory.rglob("events.out.*")}
    found = EventAccumulator(str(place), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    scalars = {name: {one.step: one.value for one in found.Scalars(name)} for name in found.Tags()["scalars"]}
    texts = {
        name.removesuffix("/text_summary"): {
            one.step: one.tensor_proto.string_val[0].decode() for one in found.Tensors(name)
        }
        for name in found.Tags()["tensors"]
    }
    return scalars | texts


def _wandb(directory: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2 as proto

    (file,) = directory.rglob("offline-run-*/*.wandb")
    rows = []
    for content in _records(file.read_bytes()):
        record = proto.Record()
        record.ParseFromString(content)
        if record.HasField("history"):
            items = record.history.item
            rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    return rows


def _records(content: bytes) -> Iterator[bytes]:
    """Those of a log as LevelDB writes it, after a header of W&B's own: in blocks, a record in one part or more."""
    at, parts = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(content):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < HEADER_BYTES:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


def _mlflow(directory: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=directory.as_uri())
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    names = run.data.metrics
    history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return {name: {one.step: one.value for one in values} for name, values in history.items()}, run.data.tags


class Framework(NamedTuple):
    """How an example trains.

    ``a_step`` is how many samples a rank takes for a step. ``first`` is the number under which the framework logs its
    first step, ``evaluated`` and ``saved`` are after how many steps it does so. ``trackers`` is what is put in
    the place of what, so that it logs to all trackers.
    """

    script: str
    a_step: int
    first: int
    evaluated: tuple[int, ...]
    saved: tuple[int, ...]
    trackers: tuple[str, str]


FRAMEWORKS = {
    "huggingface": Framework(
        "huggingface.py",
        8,
        1,
        (40, 80, 120),
        (60, 120),
        ('report_to="tensorboard"', 'report_to=["tensorboard", "wandb", "mlflow"]'),
    ),
    "lightning": Framework(
        "lightning_fit.py",
        16,
        0,
        (40, 80, 120),
        (60, 120),
        (
            "logger=TensorBoardLogger(directory)",
            "logger=[TensorBoardLogger(directory), WandbLogger(save_dir=directory), MLFlowLogger()]",
        ),
    ),
    "accelerate": Framework(
        "accelerate_loop.py",
        16,
        0,
        (),
        (60, 120),
        ('log_with="tensorboard"', 'log_with=["tensorboard", "wandb", "mlflow"]'),
    ),
}


def suspects(start, directory: Path, variables: dict[str, str], *job: object) -> set[tuple[int, str] | None]:
    """Run a job of options, a launcher and a script; whom its windows name, and None for those that name nobody."""
    policy, run = directory / "policy.yaml", directory / "run"
    policy.write_text(POLICY)
    job = start("run", "--policy", policy, "--out", run, *job, env=variables, cwd=directory)
    _, told = job.communicate(timeout=400)
    assert job.returncode == 0, told
    found = {named(verdict) for verdict in verdicts(run)}
    assert found - {None}, told
    return found


@pytest.fixture
def train(start, environment, tmp_path):
    """Train by a script's text, rank 1 slow in its data set from some step on; the run."""
    out = tmp_path / "out"
    out.mkdir()

    def train(framework: Framework, text: str, *auto: str, launcher=FORKED, ranks: int = 2) -> Path:
        (tmp_path / framework.script).write_text(text)
        trackers = {
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(out),
            "MLFLOW_TRACKING_URI": (out / "mlflow").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        variables = environment | slowed(1, framework.a_step, SLOW_FROM) | trackers
        job = (*auto, "--", *launcher, ranks, HERE / "slowed.py", tmp_path / framework.script, out)
        assert suspects(start, tmp_path, variables, *job) <= {None, (1, "data")}
        return tmp_path / "run"

    return train


def without_us(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if "sftriage" not in line.lower())


def kinds(framework: Framework, next_step: int) -> dict[int, str]:
    """Which steps are of a kind of their own, where those that do it after so many steps have the next one's number."""
    both = sorted({*framework.evaluated, *framework.saved})
    return {
        step + next_step: "eval+checkpoint"
        if step in framework.evaluated and step in framework.saved
        else "evaluation"
        if step in framework.evaluated
        else "checkpoint"
        for step in both
    }


def check_steps(run: Path, framework: Framework, first: int, ranks: int) -> None:
    """Each rank has recorded every step once, from the third one on, with these stages."""
    (recorded,) = load_recording(run).ranks.values()
    assert sorted(recorded) == list(range(ranks))
    for rank in recorded.values():
        records = [record for steps in rank.steps(4096) for record in steps.records()]
        schema = rank.info.schema
        assert (schema.stages, set(schema.sync)) == (STAGES, {"exchange", "backward"})
        assert [one.step for one in records] == list(range(first + 2, first + STEPS))
        found = {one.step: one.kind for one in records if one.kind}
        assert {step: kind for step, kind in kinds(framework, first).items() if found.get(step) != kind} == {}
        assert all(one.ready_ns is not None for one in records[20:])
        # (a stage that were counted twice would leave less than nothing for the others)
        shares = [min(one.durations_ns) >= 0 and all(one.durations_ns[:5]) for one in records if not one.kind]
        assert all(shares)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_unedited_a_slowed_rank_is_named_by_auto(train, name):
    framework = FRAMEWORKS[name]
    run = train(
        framework,
        without_us((EXAMPLES / framework.script).read_text()),
        ranks=3 if name == "accelerate" else 2,
    )
    # (what only the rank that writes it sees is of that rank alone)
    (recorded,) = load_recording(run).ranks.values()
    schema = recorded[0].info.schema
    assert (schema.stages, set(schema.sync)) == (STAGES, {"exchange", "backward"})
    records = [record for steps in recorded[0].steps(4096) for record in steps.records()]
    assert [one.step for one in records] == list(range(2, STEPS))
    assert {one.step: one.kind for one in records if one.kind} == kinds(framework, 0)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_with_a_line_of_ours_it_is_named_under_the_frameworks_own_step_numbers_and_beside_its_metrics(
    train, name, tmp_path
):
    # GIVEN an example that logs to all trackers WHEN it trains
    framework = FRAMEWORKS[name]
    text = (EXAMPLES / framework.script).read_text().replace(*framework.trackers)
    text = text.replace("import TensorBoardLogger", "import MLFlowLogger, TensorBoardLogger, WandbLogger")
    # (three trackers at work on one of two ranks are a role of its own in a small step: a wider model takes longer)
    text = text.replace("512", "1024")
    # (under torchrun: the other launcher's ranks end at once, and what W&B has not written by then is lost)
    run = train(framework, text, "--no-auto", launcher=TORCHRUN)
    # THEN its steps are there once, numbered as it logs them
    check_steps(run, framework, framework.first, 2)
    # AND what was found stands beside the loss, at the steps at which it was
    judged = {one["last_step"]: one for one in verdicts(run)}
    with_suspect = {step for step, one in judged.items() if named(one)}
    step_s = {step: one["numbers"].get("typical_step_s", one["exposed_s"]) for step, one in judged.items()}
    board = _tensorboard(tmp_path / "out")
    assert any("loss" in metric for metric in board)
    assert board["sftriage/step_time_s"] == pytest.approx(step_s)
    assert board["sftriage/exposed_s/data"].keys() == judged.keys()
    assert {step for step, rank in board["sftriage/suspect_rank"].items() if rank == 1} == with_suspect
    assert any("Rank 1 is slow in data" in text for text in board["sftriage/verdict"].values())
    assert set(board["sftriage/captured_rank"].values()) == {1}
    rows = _wandb(tmp_path / "out")
    ours = {row["sftriage/step"]: row["sftriage/step_time_s"] for row in rows if "sftriage/step_time_s" in row}
    assert ours == pytest.approx(step_s)
    # (no row of the script's own went missing for ours)
    losses = sum(
        any("loss" in metric and "eval" not in metric and "val" not in metric for metric in row) for row in rows
    )
    assert losses >= (STEPS if name == "accelerate" else STEPS // 10)
    metrics, tags = _mlflow(tmp_path / "out" / "mlflow")
    assert metrics["sftriage/step_time_s"] == pytest.approx(board["sftriage/step_time_s"])
    assert "slow in data" in tags["sftriage.cause"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_with_a_line_of_ours_and_auto_nothing_is_counted_twice(train, name):
    framework = FRAMEWORKS[name]
    run = train(framework, (EXAMPLES / framework.script).read_text())
    check_steps(run, framework, framework.first, 2)


@pytest.mark.parametrize(
    ("script", "ranks", "slow", "a_step"), [("torchtitan_style", 2, 1, 8), ("megatron_style", 4, 2, 16)]
)
def test_in_a_loop_with_a_monitor_in_it_a_slowed_rank_is_named(
    start, environment, tmp_path, script, ranks, slow, a_step
):
    job = ("--", *FORKED, ranks, HERE / "slowed.py", EXAMPLES / f"{script}.py", tmp_path)
    found = suspects(start, tmp_path, environment | slowed(slow, a_step, SLOW_FROM), *job)
    assert found == {None, (slow, "data")}
