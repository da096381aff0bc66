"""Nsight Systems on its way from an image into a pod."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sftriage.kube.injecting import InjectionSettings, pod_parts
from sftriage.kube.jobs import JobRef


@pytest.mark.parametrize("there", [True, False])
def test_nsight_systems_is_copied_from_its_image(tmp_path, there):
    """GIVEN an image in which `nsys` is a link, as its package has it THEN it runs from the volume, and never fails."""
    image, volume = tmp_path / "opt" / "nsight-systems" / "2025.1", tmp_path / "volume"
    program = image / "target-linux-x64" / "nsys"
    program.parent.mkdir(parents=True)
    (image / "beside").write_text("it")
    program.write_text('#!/bin/sh\ncat "$(dirname "$0")/../beside"; echo "$@"\n')
    program.chmod(0o755)
    (tmp_path / "bin").mkdir()
    if there:
        (tmp_path / "bin" / "nsys").symlink_to(program)
    volume.mkdir()
    parts = pod_parts(JobRef("job", "resnet", "ml"), InjectionSettings(), nsys="example.com/nsys:1")
    made = parts["initContainers"][0]["command"]
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin" if there else str(_without_nsys(tmp_path))
    done = subprocess.run([*made[:3], str(volume)], env={"PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert ("no Nsight Systems in this image" in done.stderr) is not there
    if there:
        shutil.rmtree(image)
        said = subprocess.run([volume / "run" / "nsys", "a b", "c"], capture_output=True, text=True, check=True).stdout
        assert said == "ita b c\n"


def _without_nsys(folder: Path) -> Path:
    bare = folder / "bare"
    bare.mkdir()
    for name in ("sh", "readlink", "dirname", "basename", "cp", "mkdir", "chmod"):
        (bare / name).symlink_to(shutil.which(name) or "")
    return bare
