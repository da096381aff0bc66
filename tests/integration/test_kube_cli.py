"""`sftriage kube` and `traces --cluster` on a real API server, with objects as kubectl and the operator write them."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kube import CAPTURE_ID, Cluster, captured, made, put_status
from tests.integration.processes import free_port, wait_until

SOON_S = 60.0
REPORT = {
    "observedGeneration": 1,
    "health": "captured",
    "suspect": "rank 2 in data",
    "node": "node-7",
    "pod": "resnet-2",
    "since_step": 100,
    "summary": "Rank 2 is slow in data.",
    "captures_total": 1,
    "cost": {"stragglers_s": 12.5},
}


def reported(server: Cluster, namespace: str) -> None:
    server.create(made("TriageReport", "resnet", {"job": "resnet"}), namespace)
    put_status(server, namespace, "triagereports", "resnet", REPORT)


def cells(table: str) -> list[list[str]]:
    lines = [line.split("│")[1:-1] for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line] for line in lines]


def test_status_lists_jobs(server, namespace, laptop):
    assert "no report on any job in namespace" in laptop("status").stderr
    assert "no report on job x" in laptop("status", "x", code=1).stderr
    reported(server, namespace)
    suspect = "rank 2 in data", "node-7", "resnet-2"
    expected = [namespace, "resnet", "captured", *suspect, "100", "12", "1", "Rank 2 is slow in data."]
    assert cells(laptop("status").stdout) == [expected]
    # AND what somebody wrote there does nothing to a terminal
    put_status(server, namespace, "triagereports", "resnet", {**REPORT, "summary": "\x1b[2J[red]gone"})
    assert cells(laptop("status").stdout)[0][-1] == "?[2J[red]gone"
    (row,) = laptop.json("status", "resnet")
    assert (row["job"], row["suspect"], row["lost_s"], row["watched"]) == ("resnet", "rank 2 in data", 12.5, None)


def test_traces_lists_slow_steps_and_their_traces(server, namespace, laptop, stored):
    """GIVEN a job with a slow rank and its trace THEN one command says both, of all steps or of one."""
    assert "no capture of job resnet" in laptop("list", "--job", "resnet").stderr
    reported(server, namespace)
    captured(server, namespace, *stored)
    for step in ((), ("--step", 120), ("--step", 162), ("--rank", 2)):
        done = laptop("list", "--job", "resnet", *step)
        assert done.stdout.startswith("resnet: rank 2 in data, since step 100. Rank 2 is slow in data.\n")
        row = ["c", "resnet", "2", "node-1", "data", "100 to 149", "160 to 164", "torch", "stored", "yes", ""]
        assert cells(done.stdout) == [row]
        assert f"sftriage traces get NAME --cluster -n {namespace}" in done.stderr
    nearest = laptop("list", "--job", "resnet", "--step", 900)
    assert "No capture of step 900; the nearest is c, rank 2, steps 160 to 164." in nearest.stderr
    for others in (("--rank", 3), ("--stage", "forward"), ("--profiler", "nsys"), ("--reproduced", "no")):
        assert laptop.json("list", "--job", "resnet", *others)["captures"] == []
    assert [row["job"] for row in laptop.json("list")["captures"]] == ["resnet"]
    assert laptop.json("list", "--job", "resnet", "--step", 900)["nearest"][0]["name"] == "c"


def test_a_trace_comes_to_the_laptop_verified(server, namespace, laptop, stored):
    store, manifest = stored
    captured(server, namespace, store, manifest)
    (path,) = laptop("get", "c").stdout.splitlines()
    data = (laptop.home / path).read_bytes()
    assert hashlib.sha256(data).hexdigest() == manifest.artefacts[0].sha256
    # AND by its job, the step that was slow, and its rank
    found = laptop("get", "--job", "resnet", "--step", 120, "--rank", 2, "--out", "trace.json")
    assert "c, rank 2, steps 160 to 164 in data, because of steps 100 to 149" in found.stderr
    assert (laptop.home / "trace.json").read_bytes() == data
    assert "exists already" in laptop("get", "c", "--out", "trace.json", code=2).stderr
    told_by = laptop.json("get", "c", "--out", "trace.json", "--force", "--all")
    assert told_by["sha256"] == manifest.artefacts[0].sha256
    assert told_by["capture"]["reproduced"] == "yes"
    # AND of its files the one that is named
    for command in ("get", "open"):
        assert "nope" in laptop(command, "c", "--artefact", "nope", code=2).stderr


def test_a_tampered_trace_is_refused(server, namespace, laptop, stored, tmp_path):
    """GIVEN a store in which somebody exchanged a trace, or its manifest too THEN either is noticed."""
    store, manifest = stored
    captured(server, namespace, store, manifest)
    file = tmp_path / f"traces/resnet/run-1/{CAPTURE_ID}" / manifest.artefacts[0].name
    file.write_text('{"traceEvents": {}}')
    laptop("get", "c", code=1)
    # (a store that is damaged says so; one that was forged whole is what the cluster's word is for)
    forged = manifest.artefacts[0].model_copy(update={"sha256": hashlib.sha256(file.read_bytes()).hexdigest()})
    store.put_manifest(manifest.model_copy(update={"artefacts": (forged,)}))
    assert "differ from those of the TraceCapture" in laptop("get", "c", code=1).stderr
    assert list(laptop.home.glob("*.json")) == []


def test_a_directory_of_the_cluster_is_reached_by_another_name(server, namespace, laptop, stored):
    captured(server, namespace, *stored, place="file:///not-here/traces")
    assert "no such directory: the store is in the cluster" in laptop("get", "c", code=2).stderr
    assert laptop("get", "c", "--store", stored[0].place).stdout.endswith(".json.gz\n")


WRONG = {
    "neither": ((), "give either a capture or --job"),
    "both": (("c", "--job", "resnet"), "give either a capture or --job"),
    "a step of a capture": (("c", "--step", "1"), "--step and --rank need --job"),
    "one that is not there": (("c",), "no capture c in namespace"),
    "one that is somewhere else": (("a/../b",), "no capture a/../b in namespace"),
    "a job of which there is none": (("--job", "resnet"), "no stored trace"),
    "all and one": (("c", "--all", "--artefact", "x"), "give either --all or --artefact"),
}


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG)
def test_a_trace_that_cannot_be_fetched_is_reported(laptop, arguments, says):
    assert says in laptop("get", *arguments, code=2).stderr


def test_a_capture_without_a_trace_yet(server, namespace, laptop):
    server.create(made("TraceCapture", "c", {"job": "resnet", "rank": 2, "reason": "slow"}), namespace)
    assert "c has no trace in a store: requested. No controller has answered yet." in laptop("get", "c", code=2).stderr


def test_a_trace_is_opened(server, namespace, laptop, stored):
    store, manifest = stored
    captured(server, namespace, store, manifest)
    port = free_port()
    with laptop.running("open", "c", "--no-browser", "--json", "--port", port) as process:
        assert process.stdout is not None
        shown = json.loads(process.stdout.readline())
        with urllib.request.urlopen(shown["file_url"], timeout=30) as answer:
            trace = b"".join(store.content(manifest, manifest.artefacts[0]))
            assert gzip.decompress(answer.read()) == gzip.decompress(trace)
        assert process.wait(60) == 0
    # AND on a machine that reaches no other host, or nowhere if nothing fetches it in time
    with laptop.running("open", "c", "--no-browser", "--json", "--offline") as process:
        assert process.stdout is not None
        page = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(page, timeout=30) as answer:
            assert answer.headers.get_content_type() == "text/html"
    assert laptop("open", "c", "--no-browser", "--json", "--port", port, "--wait", 1, code=1)


def the_one(server: Cluster, namespace: str) -> Any:
    return wait_until(lambda: server.get("tracecaptures", namespace=namespace)["items"], SOON_S)[0]  # type: ignore[index]


ENDS = {"stored": 0, "failed": 1, "refused": 1, "expired": 1}


@pytest.mark.parametrize(("state", "code"), ENDS.items())
def test_capture_waits_and_reports_the_end(server, namespace, laptop, state, code):
    reported(server, namespace)
    options = ("--rank", 3, "--reason", "why?", "--profiler", "torch", "--steps", 2, "--max-bytes", "64Mi")
    with laptop.running("capture", f"{'resnet'}", *options, "--json") as process:
        made_by = the_one(server, namespace)
        name = made_by["metadata"]["name"]
        spec = {"job": "resnet", "rank": 3, "reason": "why?", "profiler": "torch", "steps": 2, "max_bytes": "64Mi"}
        assert made_by["spec"] == spec
        put_status(server, namespace, "tracecaptures", name, {"state": "running"})
        put_status(server, namespace, "tracecaptures", name, {"state": state, "detail": "that is why"})
        out, err = process.communicate(timeout=SOON_S)
    assert process.returncode == code, err
    found = json.loads(out)
    assert (found["name"], found["state"], found["detail"]) == (name, state, "that is why")
    assert (f"{name} is {state}: that is why" in err) == (code == 1)


def test_capture_without_waiting_prints_the_name(server, namespace, laptop):
    limits = ("--warmup-steps", 2, "--max-seconds", 30)
    done = laptop("capture", "resnet", "--rank", 1, "--reason", "why?", "--no-wait", *limits)
    asked = the_one(server, namespace)
    assert done.stdout == f"{asked['metadata']['name']}\n"
    assert (asked["spec"]["warmup_steps"], asked["spec"]["max_seconds"]) == (2, 30)
    assert "no report on job resnet" in done.stderr
    waited = laptop("capture", "resnet", "--rank", 1, "--reason", "why?", "--timeout", 1, code=1)
    assert "is requested (timed out waiting)" in waited.stderr


def test_an_invalid_capture_is_not_created(server, namespace, laptop):
    done = laptop("capture", "resnet", "--rank", 1, "--reason", "x", "--max-bytes", "3 apples", code=2)
    assert "spec.max_bytes" in done.stderr
    assert server.get("tracecaptures", namespace=namespace)["items"] == []


def test_ctrl_c_ends_only_the_waiting(server, namespace, laptop):
    with laptop.running("capture", "resnet", "--rank", 1, "--reason", "why?") as process:
        name = the_one(server, namespace)["metadata"]["name"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 130
    assert f"{name} continues; cancel it with `kubectl delete tcap {name} -n {namespace}`" in err
    assert the_one(server, namespace)["metadata"]["name"] == name


def test_a_capture_deleted_meanwhile(server, namespace, laptop):
    with laptop.running("capture", "resnet", "--rank", 1, "--reason", "why?") as process:
        server.kubectl("delete", "tcap", the_one(server, namespace)["metadata"]["name"], "-n", namespace)
        _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 1
    assert "The TraceCapture was deleted." in err


def test_kubectl_runs_the_plugin(server, namespace, laptop):
    reported(server, namespace)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**laptop.environment, "PATH": path}
    for words, key in ((["status"], 0), (["list", "--job", "resnet"], "reports")):
        command = ["kubectl", "sftriage", *words, "-n", namespace, "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert "resnet" in json.dumps(json.loads(done.stdout)[key])
