"""How processes of a job note their ends and those of their children, in real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.trainer import ends

BEGIN = "import sys, pathlib; from sftriage.trainer import ends; rings = pathlib.Path(sys.argv[1])\n"
RANK = BEGIN + "ends.enrol(rings, 2, 1, 4)\n"
RAISES = """
def load(name):
    raise KeyError(name)

def main():
    with monitor.step(), monitor.stage("data"):
        with monitor.stage("read"):
            pass
        try:
            open("/nowhere")
        except OSError:
            load("x")

class monitor:
    from contextlib import nullcontext
    step, stage = nullcontext, staticmethod(lambda name, held=nullcontext(): held)

main()
"""
PARENT = (
    BEGIN
    + """
import multiprocessing, subprocess, time
ends.watch(rings)
def rank(code):
    return subprocess.Popen([sys.executable, "-c", pathlib.Path(sys.argv[2]).read_text() + code, str(rings)], stdout=-1)
exits, waits = rank("sys.exit(3)"), rank("print(flush=True); import time; time.sleep(60)")
other = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(4)"])
waits.stdout.readline()
waits.terminate()
statuses = [child.wait(60) for child in (exits, waits, other)]
print([exits.pid, waits.pid, other.pid], statuses)
"""
)
WORKERS = (
    "import multiprocessing  # (as torch does)\n"
    + RANK
    + """
import os, signal, time
context = multiprocessing.get_context("fork")
def start(function, *args):
    process = context.Process(target=function, args=args)
    process.start()
    return process
killed, ended, well, exits = start(time.sleep, 60), start(time.sleep, 60), start(int), start(os._exit, 7)
os.kill(killed.pid, signal.SIGKILL)
ended.terminate()
for process in (killed, ended, well, exits):
    process.join(60)
print([killed.pid, exits.pid], [process.exitcode for process in (killed, ended, well, exits)])
"""
)


def run(tmp_path: Path, code: str, *more: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    (tmp_path / "rings").mkdir(exist_ok=True)
    words = [sys.executable, str(script), str(tmp_path / "rings"), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def notes(tmp_path: Path, pid: int) -> list[dict]:
    """What a rank's file says, without the times."""
    lines = [json.loads(line) for line in ends.ends_file(tmp_path / "rings", pid).read_text().splitlines()]
    assert sorted(lines, key=lambda line: line["time_s"]) == lines
    return [{name: value for name, value in line.items() if name != "time_s"} for line in lines]


def test_a_rank_notes_its_exception_with_line_and_stage_and_prints_the_same(tmp_path):
    # GIVEN a script that raises, with and without notes (a comment keeps its lines)
    alone = run(tmp_path, BEGIN + "# alone\n" + RAISES)
    assert not [*(tmp_path / "rings").iterdir()]
    noting = run(tmp_path, RANK + RAISES)
    # THEN it ends in the same way
    assert (noting.returncode, noting.stdout, noting.stderr) == (1, "", alone.stderr)
    # AND its file has the exception, the one before it, and the innermost line of the script and its stage
    (path,) = (tmp_path / "rings").iterdir()
    begun, raised, stage = notes(tmp_path, int(path.suffix[1:]))
    assert begun.pop("ticks") > 0  # (when the kernel started it)
    assert begun == {"rank": 2, "attempt": 1, "world_size": 4}
    assert (raised["error"], raised["message"]) == ("KeyError", "'x'")
    assert raised["chain"] == ["FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'"]
    assert raised["place"] == ["load", str(tmp_path / "script.py"), 5]
    assert stage == {"stage": "data"}


def test_a_parent_notes_the_exit_statuses_of_ranks_and_the_signals_that_it_sends_them(tmp_path):
    # GIVEN a launcher of two ranks, one of which exits, and one is ended, and of another program
    (tmp_path / "rank.py").write_text(RANK)
    launched = run(tmp_path, PARENT, str(tmp_path / "rank.py"))
    pids, statuses = (json.loads(f"[{text}]") for text in launched.stdout.strip().strip("[]").split("] ["))
    # THEN it gets their statuses, and notes those of the ranks
    assert statuses == [3, -15, 4], launched.stderr
    assert notes(tmp_path, pids[0])[1:] == [{"status": 3}]
    assert notes(tmp_path, pids[1])[1:] == [{"sent": 15}, {"status": -15}]
    # AND nothing of itself and of the other program
    assert {path.name for path in (tmp_path / "rings").iterdir()} == {f"rank-ends.{pid}" for pid in pids[:2]}


def test_a_rank_notes_which_of_its_workers_died_but_not_those_that_it_has_ended(tmp_path):
    found = run(tmp_path, WORKERS)
    pids, statuses = (json.loads(f"[{text}]") for text in found.stdout.strip().strip("[]").split("] ["))
    assert statuses == [-9, -15, 0, 7], found.stderr
    (path,) = (tmp_path / "rings").iterdir()
    lines = notes(tmp_path, int(path.suffix[1:]))[1:]
    assert lines == [{"worker": pids[0], "status": -9}, {"worker": pids[1], "status": 7}]


def test_an_exception_that_a_signal_handler_raises_meanwhile_is_noted_with_the_first(tmp_path):
    # GIVEN an exception, and another one that is raised while its text is made, as DataLoader does when a worker dies
    interrupted = """
class Error(Exception):
    reported = []
    def __str__(self):
        if not self.reported:
            self.reported.append(1)
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        return "text"
raise Error
"""
    assert run(tmp_path, RANK + interrupted).returncode == 1
    (path,) = (tmp_path / "rings").iterdir()
    _, raised = notes(tmp_path, int(path.suffix[1:]))
    assert (raised["error"], raised["message"]) == ("Error", "text")
    assert raised["chain"] == ["RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."]


def test_a_rank_whose_notes_cannot_be_written_runs_on(tmp_path):
    (tmp_path / "rings").write_text("not a directory")
    script = tmp_path / "script.py"
    script.write_text(RANK + "import subprocess\nsys.exit(subprocess.run(['false']).returncode + 4)")
    found = subprocess.run([sys.executable, script, tmp_path / "rings"], capture_output=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (5, b"", b"")


@pytest.mark.parametrize(
    ("environment", "enrolled"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, [{"rank": 3, "attempt": 0, "world_size": 4}]),
        ({"RANK": "x"}, []),
        ({}, []),
    ],
)
def test_a_process_is_a_rank_by_its_launchers_variables(tmp_path, monkeypatch, environment, enrolled):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(tmp_path, BEGIN + "ends.watch(rings)").returncode == 0
    paths = (tmp_path / "rings").iterdir()
    lines = [line for path in paths for line in notes(tmp_path, int(path.suffix[1:]))]
    assert all(line.pop("ticks") > 0 for line in lines)
    assert lines == enrolled
