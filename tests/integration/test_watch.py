"""`sftriage watch` in a real terminal, and in none, about runs that go on meanwhile."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sftriage.traces.store import LocalStore
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, FORKED, IN_TURN, wait_until
from tests.integration.runs import verdicts
from tests.integration.terminals import GIVEN_BACK, TAKEN, Terminal, terminals
from tests.scenario import Run, request_of, run_at, verdict

RULE = 'name: slow-rank, match: {scope: [rank], stage: [data], gain: ">= 50ms"}, capture: {profiler: torch, steps: 3}'
POLICY = policy(RULE, steps=(20, 20, 20))


@pytest.fixture
def watch(environment) -> Iterator[Callable[..., Terminal]]:
    with terminals(environment) as open_one:
        yield lambda *arguments, **size: open_one(sys.executable, "-m", "sftriage", "watch", *arguments, **size)


@pytest.fixture
def run(tmp_path) -> Run:
    """A run that goes on until its ``rings`` are gone."""
    made = run_at(tmp_path / "run")
    (tmp_path / "run" / "rings").mkdir()
    return made


def end(run: Run) -> None:
    (run.directory.path / "rings").rmdir()


def test_a_real_job_from_before_it_begins_until_after_its_end(start, watch, tmp_path):
    # GIVEN somebody who watches in a terminal, a log and a program that do without, and no run yet
    path = tmp_path / "run"
    terminal = watch("--run", path)
    log, program = start("watch", "--run", path), start("watch", "--run", path, "--json")
    terminal.wait_for("Waiting for a run")
    assert log.stdout.readline().startswith("Waiting for a run")
    # WHEN a job of two ranks is run, one of which becomes slow
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    options = ["--policy", tmp_path / "policy.yaml", "--out", path]
    job = start("run", *options, "--", *FORKED, 2, IN_TURN, tmp_path, "data:1")
    # THEN the terminal follows it
    terminal.wait_for("Warming up", "2 of 2 ranks are recording")
    terminal.wait_for("Frontier", "backward", "Telemetry")
    (tmp_path / "next-0").touch()
    seen = terminal.wait_for("Slow", "rank 1, data", "Captures")
    assert len(seen) == 24
    wait_until(lambda: LocalStore(path).manifests().manifests)
    (tmp_path / "next-1").touch()
    assert job.wait(DEADLINE_S) == 0
    # AND ends with the run, which has left its last picture on the screen that was there before
    assert terminal.wait_for_end() == 0
    assert terminal.raw.count(TAKEN) == terminal.raw.count(GIVEN_BACK) == 1
    left = terminal.raw.rpartition(GIVEN_BACK)[2].decode()
    for words in ("the run has ended", "rank 1", "stored"):
        assert words in left
    # AND the log has a line for each change, and nothing that does something to a terminal
    lines = log.communicate(timeout=DEADLINE_S)[0].splitlines()
    (manifest,) = LocalStore(path).manifests().manifests
    assert lines[-1].startswith("The run has ended: ")
    assert any("Rank 1 is slow in data" in line and "Capturing rank 1" in line for line in lines)
    assert any(f"traces show {manifest.capture_id}" in line for line in lines)
    assert not any("\x1b" in line for line in lines)
    # AND the program has every window that was decided, once, each exact
    entries = [json.loads(line) for line in program.communicate(timeout=DEADLINE_S)[0].splitlines()]
    windows = [entry for entry in entries if entry["type"] == "window"]
    journal = verdicts(path)
    assert [one["first_step"] for one in windows] == [one["first_step"] for one in journal]
    for one in windows:
        assert sum(one["advances_s"].values()) == pytest.approx(one["exposed_s"], rel=1e-9)
    assert [entry["state"] for entry in entries if entry["type"] == "capture"] == ["stored"]
    assert entries[-1] == {"type": "ended", "windows": len(windows), "captures": 1}
    assert (log.returncode, program.returncode) == (0, 0)


def test_it_follows_what_is_written_and_the_size_of_the_terminal(watch, run):
    # GIVEN a healthy run on a terminal of 80 by 24
    run.decide(verdict(20))
    terminal = watch("--run", run.directory.path)
    terminal.wait_for("Healthy", "since step 20", "none", "Ctrl-C or q")
    # WHEN a window comes in that is not, and its capture begins
    run.decide(verdict(70, "suspect", onset=90), "capture", "rule slow-rank", requests=(request_of("c-1"),))
    # THEN it is there, with all of its parts
    terminal.wait_for("Slow, captured", "since step 90", "rank 2, data", "running", "c-1", "Decisions", "Telemetry")
    # WHEN the terminal becomes narrow THEN nothing is cut that has to be there, and nothing wraps
    terminal.resize(40, 20)
    terminal.wait_for("rank 2, data", "Captures", "Ctrl-C or q")
    wait_until(lambda: terminal.lines()[19].startswith("Ctrl-C or q"))
    wait_until(lambda: sum("Frontier" in line for line in terminal.lines()) == 1)
    # WHEN it becomes large THEN there is room for more
    terminal.resize(120, 40)
    terminal.wait_for("(20%)  in 90% of steps  chronic since step 90")
    end(run)
    assert terminal.wait_for_end() == 0


@pytest.mark.parametrize(("keys", "status"), [(b"\x03", 0), (b"q", 0), (None, 143)])
def test_it_ends_cleanly_and_gives_the_terminal_back(watch, run, keys, status):
    # GIVEN somebody who watches, and has typed something meanwhile, which is not shown
    run.decide(verdict(20))
    terminal = watch("--run", run.directory.path)
    terminal.wait_for("Healthy")
    assert not terminal.echoes
    terminal.type(b"xyz")
    # WHEN they have seen enough, or somebody else ends it
    if keys is None:
        terminal.process.send_signal(signal.SIGTERM)
    else:
        terminal.type(keys)
    # THEN it ends without a word of complaint, and the terminal is as it was
    assert terminal.wait_for_end() == status
    assert terminal.echoes
    assert terminal.raw.count(TAKEN) == terminal.raw.count(GIVEN_BACK) == 1
    assert b"Traceback" not in terminal.raw
    assert b"xyz" not in terminal.raw
    assert (b"Healthy" in terminal.raw.rpartition(GIVEN_BACK)[2]) is (status == 0)


def test_it_can_be_put_aside_and_taken_up_again(environment, run):
    # GIVEN a shell in which somebody watches
    run.decide(verdict(20))
    with terminals({**environment, "PS1": "$ "}) as open_one:
        shell = open_one("bash", "--norc", "--noprofile", "--noediting", "-i")
        shell.type(f"{sys.executable} -m sftriage watch --run {run.directory.path}\n".encode())
        shell.wait_for("Healthy", "Ctrl-C or q")
        # WHEN they put it aside THEN the shell has its screen back
        shell.type(b"\x1a")
        wait_until(lambda: shell.lines() and b"Stopped" in shell.raw.rpartition(GIVEN_BACK)[2])
        # WHEN they take it up again THEN it shows what has come in meanwhile
        run.decide(verdict(70, "suspect"), "throttle", "cooldown")
        shell.type(b"fg\n")
        shell.wait_for("Slow, capture throttled")
        assert shell.raw.count(TAKEN) == 2
        shell.type(b"\x03")
        wait_until(lambda: shell.lines() and shell.raw.count(GIVEN_BACK) == 2)


def test_what_was_read_is_not_read_again(watch, run):
    # GIVEN a run with a journal of some megabytes
    for n in range(500):
        run.decide(verdict(20 + 10 * n), reason="x" * 3000)
    size_bytes = run.directory.decisions.stat().st_size
    terminal = watch("--run", run.directory.path)
    terminal.wait_for("Healthy", "500 windows")
    before = _read_bytes(terminal.process.pid)
    # WHEN it is looked at again and again, and goes on
    for n in range(500, 504):
        run.decide(verdict(20 + 10 * n))
        terminal.wait_for(f"{n + 1} windows")
    # THEN only what is new is read
    assert _read_bytes(terminal.process.pid) - before < size_bytes / 4


def _read_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def test_it_ends_when_nobody_reads_any_more(start, run):
    run.decide(verdict(20))
    process = start("watch", "--run", run.directory.path, "--json")
    assert json.loads(process.stdout.readline())["first_step"] == 20
    # WHEN whoever reads goes away THEN it ends with the next line, and without a word
    process.stdout.close()
    run.decide(verdict(30))
    process.wait(DEADLINE_S)
    assert process.stderr.read() == ""
