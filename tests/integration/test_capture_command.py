"""`sftriage capture`: a person asks for a capture of a job that runs."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.liveness import trainers_alive, watcher_of
from tests.integration.conftest import own_environment
from tests.integration.killing import POLICY
from tests.integration.processes import (
    DEADLINE_S,
    LOOP,
    descendants,
    ended,
    kill,
    output_of,
    sftriage_process,
    wait_until,
)
from tests.integration.runs import captures, on_record
from tests.unit.conftest import run_going_on


@contextlib.contextmanager
def watched(directory: Path, environment: dict[str, str], policy: str) -> Iterator[Path]:
    """A healthy job of two ranks under watch that goes on until this ends; its run directory."""
    (directory / "policy.yaml").write_text(policy, encoding="utf-8")
    job = [sys.executable, LOOP, 2, 1_000_000, 0, "torch"]
    command = ["run", "--policy", directory / "policy.yaml", "--out", directory / "run", "--", *job]
    run = sftriage_process(*command, env=environment, stdout=subprocess.DEVNULL)
    with ended(run):
        wait_until(lambda: list((directory / "run" / "steps").glob("*.steps")))
        yield directory / "run"
        run.terminate()
        run.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Path]:
    """One job for all who ask: no rule of its policy captures anything, and its limits are wide."""
    directory = tmp_path_factory.mktemp("asked")
    with watched(directory, own_environment(directory), POLICY) as run:
        yield run


@pytest.fixture
def asked(sftriage):
    return partial(sftriage, "capture", "--reason", "a look at the loader", "--run")


@pytest.fixture
def granted(asked):
    """Asks for a capture; the decision, and what came of it."""

    def granted(directory, *options):
        answer = asked(directory, *options, "--json").json
        return answer["decision"], answer["results"]

    return granted


def test_whoever_asks_gets_a_capture_with_the_same_record(granted, sftriage, running):
    decision, (result,) = granted(running, "--rank", 1, "--steps", 3)
    assert (decision["outcome"], decision["label"], result["state"]) == ("capture", "asked", "stored")
    manifest = sftriage("traces", "show", result["capture_id"], "--run", running, "--json").json
    assert manifest["capture"]["rank"] == 1
    assert manifest["capture"]["last_step"] - manifest["capture"]["first_step"] == 2
    # AND its manifest says who asked and why, and that nothing was suspected
    assert manifest["trigger"]["label"] == "asked"
    assert re.fullmatch(r"requested by \S+: a look at the loader", manifest["trigger"]["why"])
    assert manifest["reproduced"] is None
    # AND the decision is among the run's decisions, and the trace can be fetched
    decided = sftriage("decisions", "--run", running, "--json").json
    made = [one for one in decided if result["capture_id"] in [request["capture_id"] for request in one["requests"]]]
    assert [(one["label"], one["outcome"]) for one in made] == [("asked", "capture")]
    got = sftriage("traces", "get", result["capture_id"], "--run", running, "--out", running / "mine.gz", "--json").json
    assert got["sha256"] == manifest["artefacts"][0]["sha256"]


def test_whoever_asks_for_stacks_alone_gets_them_of_the_steps_that_they_asked_for(granted, start, running):
    # GIVEN a rank that takes its steps WHEN its stacks are asked for
    _, (result,) = granted(running, "--rank", 1, "--steps", 3, "--profiler", "stacks")
    # THEN its trainer sampled them over these steps, which say so, and nothing else was started
    assert (result["state"], result["last_step"] - result["first_step"]) == ("stored", 2)
    assert result["timings_s"].keys() == {"start", "run", "export"}
    (manifest,) = [one for one in captures(running) if one.capture_id == result["capture_id"]]
    assert ([one.name for one in manifest.artefacts], manifest.trigger.chosen) == (["stacks.speedscope.json"], "")
    stacks = json.loads((running / "captures" / result["capture_id"] / "stacks.speedscope.json").read_bytes())
    assert set(stacks["sftriage"]["step"]) <= set(range(result["first_step"], result["last_step"] + 1))
    assert any(frame["file"].endswith("loop.py") for frame in stacks["shared"]["frames"])
    # AND they are opened where traces are
    opening = start("traces", "open", result["capture_id"], "--run", running, "--no-browser")
    assert opening.stdout.readline().startswith("https://ui.perfetto.dev/#!/?url=http://127.0.0.1:")
    opening.terminate()
    opening.communicate(timeout=60)


def test_what_cannot_be_asked_for_is_said(asked, sftriage, running):
    assert "rank 7 is not in this job: its ranks are 0 to 1" in asked(running, "--rank", 7).err
    assert "--reason" in sftriage("capture", "--run", running, "--rank", 0).err
    # AND what somebody else left there is removed and not obeyed
    bad = running / "asks" / "0.json"
    bad.write_text('{"request_id": "../../x", "ranks": [0]}')
    wait_until(lambda: not bad.exists())


def test_whoever_stops_waiting_is_told_that_the_capture_goes_on_and_where_to_find_it(start, sftriage, running):
    before = len(on_record(running, "manual_request"))
    waiting = start("capture", "--run", running, "--rank", 1, "--reason", "long", "--steps", 200)
    wait_until(lambda: len(on_record(running, "manual_request")) > before)
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, "")
    found = re.search(r"the capture continues, and is stored when it ends: `sftriage (.+)`", err)
    assert found, err
    wait_until(lambda: [one for one in captures(running) if re.fullmatch(r"requested by \S+: long", one.trigger.why)])
    assert re.search(r"requested by \S+: long", sftriage(*found[1].split()).out)


def test_an_ask_that_nobody_has_answered_is_withdrawn(start, tmp_path):
    # GIVEN a run that goes on, of which nobody knows who watches it, and somebody who waits for an answer
    directory = run_going_on(tmp_path / "run")
    waiting = start("capture", "--run", directory.path, "--rank", 0, "--reason", "a look")
    wait_until(lambda: list(directory.requests.glob("*.json")))
    # WHEN they press Ctrl-C THEN nothing is asked for any more
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, "")
    assert "withdrawn before an answer" in err
    assert not list(directory.requests.iterdir())


def test_the_limits_hold_for_people_too_and_where_nobody_watches_they_are_told_so(
    asked, granted, tmp_path, environment
):
    # GIVEN a policy that allows one capture an hour
    policy = POLICY.replace("captures_per_hour: 100", "captures_per_hour: 1")
    with watched(tmp_path, environment, policy) as directory, contextlib.ExitStack() as ending:
        granted(directory, "--rank", 0, "--steps", 1)
        # WHEN a second one is asked for THEN it is refused with the limit, and nothing is captured
        status, out, err = asked(directory, "--rank", 1)
        assert (status, out) == (1, "")
        assert "not captured: captures_per_hour: 1 of 1" in err
        assert len(list((directory / "captures").glob("asked-*"))) == 1
        # WHEN the job's sftriage is killed, so that nobody would ever answer, and somebody asks
        watching, rings = int((directory / ".lock").read_text(encoding="ascii")), rings_of(directory)
        job = descendants(watching)
        ending.callback(kill, *job)
        kill(watching)
        wait_until(lambda: watcher_of(RunDirectory(directory), rings).state == "unwatched")
        status, out, err = asked(directory, "--rank", 0)
        # THEN they are told who could answer, and not that nobody did
        assert (status, out) == (2, "")
        assert re.search(r"is not being watched, as its sftriage ended; take over with `sftriage attach --run .*`", err)
        assert not list((directory / "asks").iterdir())
        # AND the same, once the job has ended too, and another has swept what its trainers have left in memory
        kill(*job)
        wait_until(lambda: not trainers_alive(rings))
        for _ in range(2):
            status, _, err = asked(directory, "--rank", 0)
            assert (status, "is not being watched, and its job has ended" in err) == (2, True), err
            shutil.rmtree(rings, ignore_errors=True)


def rings_of(directory):
    return Path(read_info(RunDirectory(directory)).rings)


def test_a_run_is_captured_from_another_host_that_shares_its_directory(running, environment):
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a memory of its own wants root and unshare")
    elsewhere = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
    elsewhere += ['mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh", sys.executable, "-m", "sftriage", "capture"]
    command = [*elsewhere, "--run", running, "--rank", 1, "--steps", 2, "--reason", "from there", "--json"]
    (result,) = json.loads(output_of(*command, env=environment, timeout=120))["results"]
    assert (result["rank"], result["state"]) == (1, "stored")


def test_ranks_that_are_captured_together_are_so_in_the_same_steps(granted, running):
    _, (first, second) = granted(running, "--rank", 0, "--rank", 1, "--steps", 4)
    assert (first["first_step"], first["last_step"]) == (second["first_step"], second["last_step"])
