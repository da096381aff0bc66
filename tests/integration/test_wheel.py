"""What is installed is what is here: the wheel runs the demo outside the checkout."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.integration.processes import output_of

CHECKOUT = Path(__file__).resolve().parents[2]


def build(to: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(to), str(CHECKOUT)]
    subprocess.run(command, check=True, timeout=280, env={**os.environ, **environment})
    (built,) = to.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


def test_it_has_the_writer_in_c_for_every_python_from_3_10_on(wheel):
    assert "-cp310-abi3-linux_" in wheel.name
    assert "sftriage/trainer/_moments.abi3.so" in zipfile.ZipFile(wheel).namelist()


def test_without_a_compiler_it_is_built_all_the_same_and_runs_anywhere(tmp_path):
    # GIVEN a machine whose compiler is not there
    built = build(tmp_path, CC="/no/compiler")
    # THEN the wheel is one for any machine, and the recorder says why it is not in C
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
    code = f"import sys; sys.path.insert(0, {str(built)!r}); from sftriage.trainer import moments as m; "
    code += "print(m.FORM.name, m.WHY_NOT_C)"
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.startswith("Python the form in C is missing: ")


def test_two_builds_are_equal_byte_by_byte(wheel, tmp_path):
    # GIVEN a second build, in another place and with other permissions of new files
    before = os.umask(0o077)
    try:
        again = build(tmp_path)
    finally:
        os.umask(before)
    # THEN it is the same file (`make wheels` compares all that a release uploads)
    assert (again.name, again.read_bytes()) == (wheel.name, wheel.read_bytes())


def test_it_holds_the_package_the_policies_and_the_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "sftriage/policies/default.yaml",
        "sftriage/crds/triagepolicies.yaml",
        "sftriage/py.typed",
        "sftriage/demo/train.py",
    } <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"sftriage", wheel.name.rsplit("-", 3)[0] + ".dist-info"}


def test_installed_from_the_wheel_the_demo_runs_elsewhere(wheel, environment, tmp_path):
    # GIVEN the wheel, unpacked where the checkout is not
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    environment = {**environment, "PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import sftriage; print(sftriage.__file__)"]
    found = subprocess.run(where, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.startswith(str(site))
    # WHEN the demo is run with it, in another folder
    demo = [sys.executable, "-m", "sftriage", "demo", "--json", "--ranks", "2", "--steps", "80", "--fault", "none"]
    said = output_of(*demo, env=environment, cwd=tmp_path, timeout=280)
    # THEN its windows are judged, under the policy that came with the wheel, and told to a program
    outcome = json.loads(said.splitlines()[-1])
    assert [one["first_step"] for one in outcome["windows"]] == [20, 30]
    assert [one["first_step"] for one in outcome["decisions"]] == [20, 30]
    assert (outcome["faults"], outcome["step_time_s"]["before_fault"] > 0) == ([], True)
    assert Path(outcome["run_dir"]).is_relative_to(tmp_path / "sftriage-runs")
