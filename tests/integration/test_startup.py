"""What a command imports: a person waits for it each time."""

import json
import subprocess
import sys

import pytest

from tests.integration.processes import DEADLINE_S
from tests.integration.runs import run_with_capture

ASKING = """
import atexit, json, sys
atexit.register(lambda: sys.stderr.write(json.dumps(sorted(sys.modules))))
sys.argv[0] = "sftriage"
from sftriage.commands import main
main()
"""
HEAVY = {
    "numpy",
    "apscheduler",
    "obstore",
    "msgspec",
    "starlette",
    "uvicorn",
    "jinja2",
    "sftriage.controller.controller",
    "sftriage.agent.agent",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_with_capture(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("command", "without"),
    [
        (["--help"], {*HEAVY, "sqlalchemy", "rich", "pydantic", "sftriage.traces"}),
        (["--version"], {*HEAVY, "sqlalchemy", "rich"}),
        (["traces", "--help"], {*HEAVY, "sqlalchemy", "rich"}),
        *(
            ([name, "--help"], {*HEAVY, "sqlalchemy"})
            for name in ("demo", "run", "attach", "capture", "ui", "decisions")
        ),
        (["traces", "list", "--run", "RUN"], {*HEAVY, "sqlalchemy.dialects.postgresql"}),
        (["traces", "list", "--run", "RUN", "--step", "160..170", "--json"], HEAVY - {"msgspec"}),
        (["traces", "show", "c-1", "--run", "RUN"], HEAVY - {"msgspec"}),
        (["traces", "get", "c-1", "--run", "RUN", "--out", "RUN/got", "--force"], HEAVY),
        (["traces", "for-step", "162", "--run", "RUN"], HEAVY - {"msgspec"}),
        (["decisions", "--run", "RUN"], {*HEAVY, "sqlalchemy"} - {"msgspec"}),
        (["run", "--out", "OUT", "--", "true"], {"sqlalchemy", "starlette", "uvicorn", "jinja2"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_no_more_than_it_needs(environment, run, tmp_path, command, without):
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in command]
    # A catalogue is made once, which takes what makes one.
    for _ in range(2 if "RUN" in command else 1):
        done = subprocess.run(
            [sys.executable, "-c", ASKING, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert done.returncode == 0
    assert modules & without == set()
