"""What was logged, read back from the trackers' own files."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES = 32768, 7


def tensorboard(directory: Path) -> dict[str, dict[int, Any]]:
    """Scalars and texts by name and step."""
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


def wandb(directory: Path) -> list[dict[str, Any]]:
    """The rows of an offline run."""
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


def mlflow(directory: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Metrics by name and step, and tags."""
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=directory.as_uri())
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    names = run.data.metrics
    history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return {name: {one.step: one.value for one in values} for name, values in history.items()}, run.data.tags
