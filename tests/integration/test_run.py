"""`sftriage run` beside a launcher: it watches, and otherwise the job is what it would be without it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.base.process import start_ticks
from tests.integration.policies import policy
from tests.integration.processes import LOOP, descendants, wait_until
from tests.integration.terminals import terminals


def launcher(steps: int = 300, status: int = 0, ranks: int = 2) -> list[str]:
    return ["--", sys.executable, str(LOOP), str(ranks), str(steps), str(status)]


@pytest.fixture
def steady(tmp_path) -> Path:
    """A policy with windows of so many steps, however long these take."""
    rule = "name: slow, match: {scope: [rank]}, capture: {profiler: torch, steps: 3}"
    (tmp_path / "steady.yaml").write_text(policy(rule, steps=(50, 10, 20)), encoding="utf-8")
    return tmp_path / "steady.yaml"


def test_the_job_is_recorded_judged_and_can_be_analysed_afterwards(start, sftriage, tmp_path, steady, monkeypatch):
    # GIVEN a healthy job of two ranks
    run = start("run", "--policy", steady, "--out", tmp_path / "run", *launcher(steps=200))
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (0, "started\n"), err
    # THEN its windows have been decided, one every 10 steps from the 20th on
    decided = sftriage("decisions", "--run", tmp_path / "run", "--json").json
    assert [d["first_step"] for d in decided] == list(range(20, 151, 10))
    # AND its rings are gone
    assert not Path(json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["rings"]).exists()
    # AND analysing the run offline gives the same windows and verdicts
    lines = sftriage("analyze", tmp_path / "run", "--json").out.splitlines()
    offline = [json.loads(line) for line in lines]
    assert [(w["first_step"], w["label"]) for w in offline] == [(d["first_step"], d["label"]) for d in decided]
    # AND the newest run here is found without naming it
    monkeypatch.chdir(tmp_path)
    newest = sftriage("decisions", "--json").json
    assert newest == decided


def test_a_job_longer_than_its_steps_are_kept_for_is_judged_to_its_end_and_says_what_is_left(
    start, sftriage, tmp_path, steady
):
    # GIVEN a job of eight ranks, of which steps of 1 MiB are kept
    out = tmp_path / "run"
    run = start("run", "--policy", steady, "--keep-steps", "1Mi", "--out", out, *launcher(steps=900, ranks=8))
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    # THEN no more than that is there, of every rank the newest steps
    sizes = [path.stat().st_size for path in (out / "steps").iterdir()]
    assert sum(sizes) <= 1 << 20
    # AND its windows have been decided from the first one to the last
    decided = sftriage("decisions", "--run", out, "--json").json
    assert [d["first_step"] for d in decided] == list(range(20, 851, 10))
    # AND analysing it says which steps are left, and judges these
    _, lines, said = sftriage("analyze", out, "--json")
    assert "the first 128 of every 1,024 are kept" in said
    judged = [json.loads(line)["first_step"] for line in lines.splitlines()]
    assert judged == [d["first_step"] for d in decided][-len(judged) :]
    assert 1 < len(judged) < len(decided)


def test_a_job_killed_by_a_signal_ends_as_a_shell_would_say(start, tmp_path):
    run = start("run", "--out", tmp_path / "run", "--", "sh", "-c", "kill -9 $$")
    run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGKILL


def test_a_job_without_the_monitor_just_runs_and_it_is_said(start, tmp_path):
    run = start("run", "--out", tmp_path / "run", "--", "echo", "hello")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, "hello\n")
    assert "nothing was recorded: no process of the job on this host imported torch" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_us_reaches_the_job_and_everything_is_kept(start, sftriage, tmp_path, signum):
    # GIVEN a job that would go on for long
    run = start("run", "--out", tmp_path / "run", *launcher(steps=1_000_000))
    steps = wait_until(lambda: list((tmp_path / "run" / "steps").glob("*.steps")))
    wait_until(lambda: all(path.stat().st_size > 20_000 for path in steps))
    below = descendants(run.pid)
    # WHEN we get a signal
    run.send_signal(signum)
    out, err = run.communicate(timeout=60)
    # THEN the job got it (on SIGINT it tidies up and exits 7), and nothing of it is left
    assert run.returncode == (7 if signum == signal.SIGINT else 128 + signal.SIGTERM), err
    assert ("interrupted" in out) == (signum == signal.SIGINT)
    wait_until(lambda: not any(map(start_ticks, below)))
    # AND what was recorded can be read
    lines = sftriage("analyze", tmp_path / "run", "--json").out.splitlines()
    assert lines


def test_if_we_are_killed_the_job_goes_on_and_its_steps_stay_readable(start, sftriage, tmp_path):
    # GIVEN a job under way
    done = tmp_path / "done"
    script = f"{sys.executable} {LOOP} 2 1500 0 && touch {done}"
    run = start("run", "--out", tmp_path / "run", "--", "sh", "-c", script, stdout=subprocess.DEVNULL)
    logs = tmp_path / "run" / "steps"
    wait_until(lambda: sum(path.stat().st_size > 20_000 for path in logs.glob("*.steps")) == 2)
    # WHEN sftriage is killed
    run.kill()
    run.wait(timeout=60)
    # THEN the job ends as it would have
    wait_until(done.exists)
    # AND all its steps can be analysed: those in the log, and those that were still in the rings
    shown = sftriage("analyze", tmp_path / "run", "--json", "--window", 1000, "--stride", 100)
    windows = [json.loads(line) for line in shown.out.splitlines()]
    assert [w["last_step"] for w in windows][-1] >= 1400, shown.err
    assert all(w["numbers"]["coverage"] == 1.0 for w in windows)


@pytest.fixture
def from_terminal(environment, tmp_path):
    """Starts a run from a terminal, of a script of the shell."""
    with terminals(environment) as open_one:
        command = (sys.executable, "-m", "sftriage", "run", "--out", tmp_path / "run", "--", "sh", "-c")
        yield lambda script: open_one(*command, script)


def test_on_a_terminal_the_job_has_it_and_ctrl_c_reaches_the_job(from_terminal):
    # GIVEN a run started from a terminal, with a job that reads from it
    run = from_terminal("read word; echo got $word; exec sleep 600")
    # WHEN something is typed THEN the job has read it
    run.type(b"hello\n")
    run.wait_for("got hello")
    # WHEN Ctrl-C is typed THEN the job ends by it, and so do we, with its status
    run.type(b"\x03")
    assert run.wait_for_end() == 128 + signal.SIGINT


def test_ctrl_z_stops_the_job_and_us_and_a_shell_can_go_on_with_both(from_terminal):
    # GIVEN a run started from a terminal
    run = from_terminal("echo ready; read word; exit 9")
    run.wait_for("ready")
    # WHEN Ctrl-Z is typed THEN we are stopped, as a shell would see it
    run.type(b"\x1a")
    assert os.WIFSTOPPED(wait_until(lambda: os.waitpid(run.process.pid, os.WNOHANG | os.WUNTRACED)[1]))
    # WHEN the shell lets us go on, and the job gets its line THEN it ends as it would have
    run.process.send_signal(signal.SIGCONT)
    run.type(b"hello\n")
    assert run.wait_for_end() == 9


def test_without_sftriage_run_the_trainer_just_trains(environment, tmp_path):
    # GIVEN the same script, started without us
    before = set(tmp_path.rglob("*"))
    plain = subprocess.run(
        [sys.executable, str(LOOP), "2", "20", "0"], env=environment, cwd=tmp_path, capture_output=True, timeout=60
    )
    # THEN it trains, says nothing and leaves nothing
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, b"started\n", b"")
    assert set(tmp_path.rglob("*")) == before
