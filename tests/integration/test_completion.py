"""What a shell asks when somebody presses the tab key."""

import os
import subprocess
import sys

import pytest

from sftriage.traces.store import LocalStore
from tests.integration.processes import DEADLINE_S
from tests.unit.conftest import manifest_of, run_in


@pytest.mark.parametrize("command", ["show", "get", "pin"])
def test_a_shell_completes_the_captures_of_the_run(environment, tmp_path, command):
    # GIVEN a run with captures
    trace = tmp_path / "exported.json"
    trace.write_text("{}")
    store = LocalStore(run_in(tmp_path / "run").path)
    for name in ("w1-a", "w1-b", "w2-c"):
        store.put(name, trace, lambda artefact, it=name: manifest_of(it, artefact))
    # WHEN bash asks how a line may go on
    words = f"sftriage traces {command} --run {tmp_path / 'run'} w1"
    asked = {"_SFTRIAGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    script = "import sys; sys.argv = ['sftriage']; from sftriage.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment, **asked},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    # THEN it is told the captures that begin so
    assert (done.stdout.split(), done.stderr) == (["w1-a", "w1-b"], "")
