"""The first tutorial, taken as a reader takes it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import DEADLINE_S, ROOT, ended

pytest.importorskip("torch")
PAGE = (ROOT / "docs" / "laptop.md").read_text(encoding="utf-8")


def test_the_commands_of_the_laptop_page_find_the_slow_line_until_it_is_mended(environment, tmp_path):
    # GIVEN the page's script, and its commands in their order
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    programs = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment = {**environment, "PATH": programs, "COLUMNS": "500"}
    printed = []
    for commands in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        command = ["bash", "-euc", f"exec 2>&1\n{commands}"]
        shell = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        with ended(shell):
            printed.append(shell.communicate(timeout=DEADLINE_S)[0])
        assert shell.returncode == 0, printed
    watched, read, mended = printed
    # THEN they print what the page shows, but for the figures of this machine
    assert "Rank 1 is slow in data" in watched
    line = re.search(r"in Images\.__getitem__ \(train\.py:\d+: time\.sleep\(0\.05\)\)", watched)
    assert line, watched
    assert line[0] in " ".join(PAGE.split())
    assert "time.sleep at train.py" in read
    assert line[0].partition(": ")[2] in (tmp_path / "report.html").read_text(encoding="utf-8")
    # AND no longer, once it is mended (what that won, a busy machine may hide: see test_promises.py)
    assert "time.sleep" not in mended
    assert "Rank 1 is slow in data" not in mended
