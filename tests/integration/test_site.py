"""The folder that is first on a job's PYTHONPATH: in Pythons that have sftriage, and in others that do not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sftriage.runtime.carrying import carry, under_seams
from sftriage.trainer import moments
from sftriage.trainer.layout import find_rings
from sftriage.windows.rings import Ring


def pythons(*versions):
    found = {sys.executable, *filter(None, (shutil.which(f"python{version}") for version in versions))}
    # (a name may be that of a version that is not chosen here)
    return [path for path in sorted(found) if not subprocess.run([path, "-c", ""], capture_output=True).returncode]


TRAIN = """
import torch
import torch.nn as nn
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
import sftriage
print(sftriage.__file__)
"""


@pytest.fixture
def environment(tmp_path):
    """That of a job that is recorded, with the folder for its PYTHONPATH."""
    (tmp_path / "rings").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    return kept | {"SFTRIAGE_RINGS": str(tmp_path / "rings")}


@pytest.fixture
def site(tmp_path):
    """The entry for a PYTHONPATH, in the folder."""
    return carry(tmp_path / "auto")


def output(command, environment):
    # (not in the checkout, whose modules come first on the path)
    done = subprocess.run(
        command, env=environment, cwd=environment["SFTRIAGE_RINGS"], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_python_without_sftriage_uses_the_carried_one(tmp_path, environment, site):
    # GIVEN the folder, and a Python that has all that this one has, but for sftriage
    (packages := tmp_path / "packages").mkdir()
    for installed in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "sftriage" not in installed.name:
            (packages / installed.name).symlink_to(installed)
    start = f"import sys; sys.path[:0] = [{str(site)!r}]; sys.path.append({str(packages)!r}); import sitecustomize\n"
    # WHEN a script trains there, and imports sftriage afterwards
    printed = output([sys.executable, "-S", "-c", start + TRAIN], environment)
    # THEN the carried recorder has recorded it
    assert Path(printed.strip()) == tmp_path / "auto" / "sftriage" / "__init__.py"
    with Ring(tmp_path / "rings" / "rank-0.0.ring") as ring:
        assert [record.step for record in ring.read().steps.records()] == [2, 3, 4, 5]
        assert ring.info.writer == moments.FORM.name


def test_the_folder_of_an_installed_sftriage_records_trainers_of_any_launcher(tmp_path, environment):
    # GIVEN the folder that docs/slurm.md puts on the PYTHONPATH of trainers that `sftriage run` does not start
    environment["PYTHONPATH"] = output([sys.executable, "-m", "sftriage.trainer.seams"], environment).strip()
    output([sys.executable, "-c", TRAIN], environment)
    with Ring(tmp_path / "rings" / "rank-0.0.ring") as ring:
        assert [record.step for record in ring.read().steps.records()] == [2, 3, 4, 5]


def test_the_carried_modules_replace_those_of_a_sftriage_without_seams(tmp_path, environment, site):
    # GIVEN an earlier version in a job's Python
    (earlier := tmp_path / "earlier" / "sftriage").mkdir(parents=True)
    (earlier / "__init__.py").write_text("")
    (earlier / "theirs.py").write_text("FOUND = True\n")
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{earlier.parent}"
    script = f"{TRAIN}\nimport sftriage.theirs\nassert sftriage.theirs.FOUND"
    assert Path(output([sys.executable, "-c", script], environment).strip()).is_relative_to(tmp_path / "auto")
    assert (tmp_path / "rings" / "rank-0.0.ring").exists()


@pytest.mark.parametrize("python", pythons(*(f"3.{minor}" for minor in range(10, 16))))
def test_the_carried_recorder_needs_only_the_standard_library(tmp_path, environment, site, python):
    # GIVEN the folder in a Python that has nothing else
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "auto")!r})
from sftriage.trainer import moments
from sftriage.trainer.monitor import Monitor
import sftriage.trainer.seams.patches
with Monitor(("work",), ()) as monitor:
    with monitor.step(), monitor.stage("work"):
        pass
print(moments.FORM.name, moments.WHY_NOT_C)
"""
    writer, _, why = output([python, "-I", "-S", "-c", script], environment).strip().partition(" ")
    # THEN it records, by the binary where there is one
    with Ring(tmp_path / "rings" / "rank-0.0.ring") as ring:
        assert (len(ring.read().steps), ring.info.writer) == (1, writer)
    assert writer == "C" or moments.FORM.name != "C" or "free-threaded" in why


def test_a_binary_of_another_architecture_is_left_alone(tmp_path, environment, site):
    found = next((tmp_path / "auto" / "sftriage" / "trainer").glob("*.so"), None)
    if found is None:
        pytest.skip(moments.WHY_NOT_C)
    found.write_bytes(b"\x7fELF of another machine")
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'auto')!r})\nfrom sftriage.trainer import moments\n"
    printed = output([sys.executable, "-I", "-S", "-c", f"{script}print(moments.FORM.name)"], environment)
    assert printed == "Python\n"


def test_the_displaced_sitecustomize_is_imported_under_its_name(tmp_path, environment, site):
    # GIVEN one that is on the path already
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__\n")
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{theirs}"
    code = "import json, sys, sitecustomize; print(json.dumps([sys.theirs, sitecustomize.__file__, sys.path]))"
    file, named, path = json.loads(output([sys.executable, "-c", code], environment))
    # THEN it is there as if there were no other, and so is the path
    assert file == named == str(theirs / "sitecustomize.py")
    environment["PYTHONPATH"] = str(theirs)
    assert json.loads(output([sys.executable, "-c", code], environment)) == [file, named, path]


def test_a_process_that_does_not_train_imports_nothing_of_ours(environment, site):
    code = "; import sys; print([name for name in sys.modules if name.startswith('sftriage')])"
    plain = [sys.executable, "-c", f"import json{code}"]
    looking = [sys.executable, "-c", f"from importlib.util import find_spec; find_spec('torch'){code}"]
    importing = [sys.executable, "-c", f"import torch{code}"]
    environment["PYTHONPATH"] = str(site)
    before = eval(output(plain, {**environment, "PYTHONPATH": ""}))
    assert eval(output(plain, environment)) == before
    assert eval(output(looking, environment)) == before
    # (an import of torch takes a second; these are a few milliseconds of it)
    names = ("hooks", "models", "patches", "steps")
    seams = {"sftriage", "sftriage.errors", "sftriage.log", "sftriage.trainer", "sftriage.trainer.ends"}
    seams |= {"sftriage.trainer.seams", *(f"sftriage.trainer.seams.{name}" for name in names)}
    assert set(eval(output(importing, environment))) - set(before) == seams - set(before)
    assert set(eval(output(importing, {**environment, "SFTRIAGE_SEAMS": "off"}))) == set(before)


@pytest.mark.parametrize("python", pythons("2.7", *(f"3.{minor}" for minor in range(6, 16))))
def test_any_python_runs_as_without_the_folder(environment, site, python):
    # GIVEN a Python that may be too old to record WHEN a job uses it THEN it prints nothing else
    environment["PYTHONPATH"] = str(site)
    assert output([python, "-c", "import json; print(json.dumps(1))"], environment) == "1\n"


def test_the_folder_lasts_as_long_as_the_job_and_extends_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/one{os.pathsep}/two")
    with under_seams(tmp_path, tmp_path) as environment:
        first, *others = environment["PYTHONPATH"].split(os.pathsep)
        assert (Path(first) / "sitecustomize.py").is_file()
        assert others == ["/one", "/two"]
    assert not (tmp_path / "auto").exists()
    monkeypatch.delenv("PYTHONPATH")
    with under_seams(tmp_path, tmp_path) as environment:
        assert os.pathsep not in environment["PYTHONPATH"]


ENDS = """
import os, sys, torch, torch._dynamo
from torch import nn
def train(how):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1_000_000):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 40:
            os.write(1, f"{how} {os.getpid()}\\n".encode())
            if how == "os._exit":
                os._exit(7)
            if how == "a raise":
                raise ValueError("of the script's own")
for rank, how in enumerate(sys.argv[1:]):
    pid = os.fork()
    if not pid:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(sys.argv) - 1)}
        train(how)
for _ in sys.argv[1:]:
    print(*os.wait(), flush=True)
"""
STATUSES = {"os._exit": 7, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL, "a raise": 1}


def test_a_ring_is_readable_to_the_last_step_after_any_end(tmp_path, environment):
    # GIVEN processes that train, each of which ends in its own way or somebody else's
    rings = Path(environment["SFTRIAGE_RINGS"])
    with under_seams(tmp_path, rings) as added:
        command = [sys.executable, "-c", ENDS, *STATUSES]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment | added, cwd=rings, **pipes)
        ended = {}
        while len(ended) < len(STATUSES):
            first, _, second = process.stdout.readline().rpartition(" ")
            if first.isdecimal():
                ended[int(first)] = os.waitstatus_to_exitcode(int(second))
            elif STATUSES[first] < 0:
                # WHEN it trains
                os.kill(int(second), -STATUSES[first])
        _, log = process.communicate(timeout=60)
    # THEN it ends as it would have, and says nothing of us
    assert sorted(ended.values()) == sorted(STATUSES.values()), log
    assert "sftriage" not in log
    # AND every step that it has taken is there
    paths = find_rings(rings)
    assert len(paths) == len(STATUSES)
    for path in paths:
        with Ring(path) as ring:
            steps = [record.step for record in ring.read().steps.records()]
        assert steps == list(range(2, 2 + len(steps)))
        assert len(steps) >= 38


COMPILED = """
import sys, torch
from sftriage.trainer.seams.patches import Seams
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
if "remaps first" in sys.argv:
    import torch.distributed._functional_collectives
seams = Seams()
seams.install()
if "remaps later" in sys.argv:
    import torch.distributed._functional_collectives
    seams.exchanges.remaps()

def doubled(x):
    torch.distributed.all_reduce(x)
    return x * 2

for again in range(2):
    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    seams.stop()
    torch.compiler.reset()
"""


@pytest.mark.parametrize("remaps", ["remaps first", "remaps later"])
def test_a_function_with_a_collective_is_compiled_whole(remaps, tmp_path):
    # GIVEN a process that imports the compiler's table of collectives before the seams, or afterwards
    # WHEN a function with one in it is compiled, with the seams in and without them
    done = subprocess.run([sys.executable, "-c", COMPILED, remaps], cwd=tmp_path, capture_output=True, text=True)
    # THEN it needs no break
    assert done.returncode == 0, done.stderr[-2000:]
