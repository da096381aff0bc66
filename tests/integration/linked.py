"""Captures, the windows that led to them, and what is in their traces."""

import gzip
import hashlib
import json
from pathlib import Path

from sftriage.traces.manifest import Artefact, Manifest
from sftriage.trainer.sampler import NAME as SAMPLES_NAME


def kineto(run: Path, manifest: Manifest) -> dict:
    """The stored trace of a capture, whole and unharmed, with the stacks that were sampled meanwhile."""
    trace, stacks = (_content(run, manifest, one) for one in manifest.artefacts)
    assert manifest.artefacts[1].name == SAMPLES_NAME
    assert json.loads(stacks)["sftriage"]["time_ns"]
    return json.loads(gzip.decompress(trace))


def _content(run: Path, manifest: Manifest, artefact: Artefact) -> bytes:
    content = (run / "captures" / manifest.capture_id / artefact.name).read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (artefact.size_bytes, artefact.sha256)
    return content


def check_linked(run: Path, manifest: Manifest, decisions: list[dict], world_size: int) -> None:
    """A capture was decided on by the window that it names, and its trace has the steps after that it promises."""
    trigger, capture = manifest.trigger, manifest.capture
    (decision,) = [d for d in decisions if manifest.capture_id in [one["capture_id"] for one in d["requests"]]]
    assert (decision["outcome"], decision["label"]) == ("capture", "suspect")
    assert (decision["first_step"], decision["last_step"]) == (trigger.window.first_step, trigger.window.last_step)
    assert [request["rank"] for request in decision["requests"]] == [capture.rank]
    trace = kineto(run, manifest)
    marks = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    assert capture.first_step > trigger.window.last_step
    assert capture.last_step - capture.first_step + 1 == capture.steps
    assert {f"ProfilerStep#{n}" for n in range(capture.first_step, capture.last_step + 1)} <= set(marks)
    assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (capture.rank, world_size)
