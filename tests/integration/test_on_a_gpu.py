"""What only a GPU shows: DDP whose hosts launch ahead, named on the device's clock, with its kernels in the traces.

Where there is none these are skipped. ``make gpu-check`` runs them and all others that want one, and says what it saw.
"""

import json
import sqlite3
import sys

import pytest

from tests import needs
from tests.integration.linked import kineto
from tests.integration.policies import policy
from tests.integration.processes import JOBS
from tests.integration.runs import captures, named, on_record, verdicts

JOB = JOBS / "gpu_ddp.py"
STEPS, SLOW_RANK = 400, 1
WITHIN = {"forward": "Slow", "backward": "SlowBackward"}

pytestmark = needs.gpu


def ran(start, tmp_path, stage, profiler, *options):
    rule = f"name: slow-rank, match: {{scope: [rank]}}, capture: {{profiler: {profiler}, steps: 4}}"
    (tmp_path / "policy.yaml").write_text(policy(rule, steps=(30, 10, 20), limits=""))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    out = tmp_path / "run"
    run = start(
        *("run", *options, "--policy", tmp_path / "policy.yaml", "--out", out),
        *("--", *torchrun, JOB, STEPS, SLOW_RANK, stage),
    )
    _, err = run.communicate(timeout=400)
    assert run.returncode == 0, err
    return out


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_slow_kernels_of_a_rank_are_named_on_the_devices_clock_and_are_in_its_trace(start, tmp_path, stage):
    # GIVEN two ranks of which one has slow kernels from the middle on, also inside the stage in which both wait
    out = ran(start, tmp_path, stage, "torch")
    # THEN that rank and stage are named, on the device's clock, and nobody before that
    suspects = [one for one in verdicts(out) if one["label"] == "suspect"]
    assert {named(one) for one in suspects} == {(SLOW_RANK, stage)}
    assert {one["clock"] for one in suspects} == {"device"}
    # AND the trace of the rank has its kernels
    (manifest,) = captures(out)
    assert manifest.capture.rank == SLOW_RANK
    kernels = [event for event in kineto(out, manifest)["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) >= 4
    # AND the one that holds it up is why, with the function that launches it
    cause = manifest.findings and manifest.findings.cause
    assert cause is not None
    assert (cause.code, cause.sure) == ("kernel", True), cause.sentence
    assert f"spin_kernel ({WITHIN[stage]})" in cause.sentence


@needs.nsys
def test_a_report_of_nsys_has_the_kernels_of_the_captured_steps(start, tmp_path):
    out = ran(start, tmp_path, "forward", "nsys, nsys: {sqlite: true}", "--nsys", "--nsys-trace", "cuda,nvtx")
    said = [entry["result"]["detail"] for entry in on_record(out, "capture")]
    for why in said:
        if "as new as the job's CUDA" in why:
            pytest.skip(why)
    assert captures(out), said
    (manifest,) = captures(out)
    folder = out / "captures" / manifest.capture_id
    (export,) = folder.glob("*.sqlite")
    with sqlite3.connect(f"file:{export}?mode=ro", uri=True) as database:
        (kernels,) = database.execute("select count(*) from CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    assert kernels >= 4
    assert json.loads((folder / "manifest.json").read_text())["capture"]["rank"] == SLOW_RANK
