"""The Dockerfile: its stages' commands are run as they stand, each stage in a container whose base is this machine."""

import fnmatch
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.pods import Image, Objects, missing, running
from tests.integration.processes import ROOT

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

BUILD_S = 500.0


@dataclass
class Stage:
    """One stage of a Dockerfile: its instructions in order, each a word and the rest of its line."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [rest for one, rest in self.instructions if one == word]


def stages(text: str) -> list[Stage]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name))
        elif word and found:
            found[-1].instructions.append((word, " ".join(rest.split())))
    return found


HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)
BUILD, FINAL = stages((ROOT / "Dockerfile").read_text())


def test_the_final_image_is_unprivileged_and_has_nothing_of_the_build():
    assert [BUILD.name, FINAL.name] == ["build", ""]
    assert BUILD.base == FINAL.base == "${BASE}"
    assert FINAL.of("USER") == ["65532:65532"]
    assert FINAL.of("ENTRYPOINT") == ['["sftriage"]']
    assert FINAL.of("COPY") == ["--from=build /opt/sftriage /opt/sftriage"]
    assert FINAL.of("RUN") == []


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here: make .venv/.dev")
def test_hadolint_finds_nothing():
    done = subprocess.run([str(HADOLINT), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def ignored(name: str, rules: Sequence[str]) -> bool:
    """Whether a file at the top of the checkout is left out of what an image is built from."""
    out = False
    for rule in rules:
        if fnmatch.fnmatch(name, rule.removeprefix("!")):
            out = not rule.startswith("!")
    return out


def context(folder: Path) -> Path:
    """What `COPY . .` copies."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    folder.mkdir()
    for path in ROOT.iterdir():
        for part in (rule[1:] for rule in rules if rule.startswith(f"!{path.name}/")):
            shutil.copytree(ROOT / part, folder / part)
        if not ignored(path.name, rules) and path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif not ignored(path.name, rules):
            shutil.copy(path, folder)
    return folder


def ran(name: str, script: str, folder: Path, mounts: dict[str, Path], user: int = 0) -> str:
    volumes = [{"name": f"v{number}", "hostPath": {"path": str(path)}} for number, path in enumerate(mounts.values())]
    where = [{"name": f"v{number}", "mountPath": path} for number, path in enumerate(mounts)]
    container = {
        "name": "main",
        # (of two dollars Kubernetes leaves one)
        "command": ["bash", "-ec", script.replace("$$", "$$$$")],
        "volumeMounts": where,
        "securityContext": {"runAsUser": user, "runAsGroup": user, "readOnlyRootFilesystem": user != 0},
    }
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    # (a base image's `python` is that of this machine, and no environment of a test's)
    base = f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"
    with running({"metadata": {"name": name}, "spec": spec}, folder / name, objects=_base(base)) as pod:
        phase = pod.wait(BUILD_S)
        assert phase == "Succeeded", pod.said
        return pod.containers["main"].said


def _base(path: str) -> Objects:
    """An image that is this machine, with what it knows of where packages come from."""
    known = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))}
    return Objects(images={"": Image(environment={**known, "PATH": path})})


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """What the build stage leaves for the final one, by its own commands; but for packages of the system."""
    folder = tmp_path_factory.mktemp("image")
    built = folder / "opt"
    built.mkdir()
    commands = [one for one in BUILD.of("RUN") if not one.startswith("apt-get ")]
    assert len(commands) == len(BUILD.of("RUN")) - 1
    if subprocess.run(["bash", "-c", "command -v gcc"], capture_output=True, check=False).returncode:
        pytest.skip("no gcc here: make test-deps")
    (where,) = BUILD.of("WORKDIR")
    script = "\n".join([f"cd {where}", *BUILD.of("ARG"), *commands])
    ran("build", script, folder, {where: context(folder / "context"), "/opt/sftriage": built})
    return built


def test_the_image_builds_and_runs_unprivileged(installed, tmp_path):
    """GIVEN what the build leaves THEN sftriage runs of it, as a user of no name, on a root that is read only."""
    (carried := tmp_path / "carried").mkdir()
    carried.chmod(0o777)
    (environment,) = FINAL.of("ENV")
    (entrypoint,) = (shlex.join(json.loads(one)) for one in FINAL.of("ENTRYPOINT"))
    commands = [
        f"export {environment}",
        "cd /",
        f"test $(command -v {entrypoint}) = /opt/sftriage/bin/sftriage",
        f"{entrypoint} --version",
        f"{entrypoint} kube carry /sftriage",
        f"{entrypoint} webhook --help > /dev/null",
        f"{entrypoint} kube controller --help > /dev/null",
        "kubectl-sftriage --help > /dev/null",
        "python -c 'import kopf, kubernetes, nats, obstore, cryptography, prometheus_client'",
        "python -c 'import sftriage.trainer.moments as m; print(m.__file__)'",
        'python -c \'from sftriage.kube.injecting import manifest; manifest("pod.yaml"), manifest("controller.yaml")\'',
        "ls /sftriage/sftriage/trainer/*.so",
        "! touch /opt/sftriage/x 2>/dev/null",
        "! python -c 'import torch' 2>/dev/null",
    ]
    said = ran("final", "\n".join(commands), tmp_path, {"/opt/sftriage": installed, "/sftriage": carried}, user=65532)
    assert "/opt/sftriage/lib" in said
    assert list((carried / "sftriage" / "trainer").glob("_moments*.so"))
