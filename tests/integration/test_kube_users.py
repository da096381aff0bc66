"""An injected pod's commands as they stand, by users as pods have them: the agent's is not the trainers'."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftriage.fleet.hub import AGENTS_FILE
from sftriage.kube.injecting import POD_UID, InjectionSettings, injection, pod_parts
from sftriage.kube.jobs import JobRef
from sftriage.runtime.hub_server import HubServer, make_secret
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore
from tests import needs
from tests.integration.pods import Image, Objects, Place, missing, running
from tests.integration.processes import UNEDITED, ended, free_port
from tests.unit.kube.pods import pod

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

JOB, OURS = JobRef("pod", "resnet", "ml"), "sftriage:1"
TRAIN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(UNEDITED)!r})
from ddp import main
main(Path(sys.argv[1]), epochs=100_000)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="sftriage-users-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@contextlib.contextmanager
def captured(folder: Path, user: int, annotations: dict[str, str], *options: str) -> Iterator[Manifest]:
    """The capture of a rank on request, in a pod whose trainers' files are theirs alone."""
    port = free_port()
    work, secret, run = folder / "work", folder / "secret", folder / "run"
    work.mkdir()
    os.chown(work, user, user)
    (work / "train.py").write_text(TRAIN)
    make_secret(secret)
    settings = InjectionSettings(image=OURS, nats=f"nats://127.0.0.1:{port}")
    body = pod(name="resnet", annotations=annotations, securityContext={"runAsUser": 0})
    (trains,) = body["spec"]["containers"]
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "/out/train.py", "/out"]
    trains |= {
        "command": ["sh", "-c", 'umask 077; exec "$@"', "sh", *command],
        "volumeMounts": [{"name": "work", "mountPath": "/out"}],
        "securityContext": {"runAsUser": user, "runAsGroup": user},
    }
    body["spec"]["volumes"] = [{"name": "work", "hostPath": {"path": str(work)}}]
    body = injection(body, JOB, settings, (1, 31)).pod
    objects = Objects(
        images={OURS: Image(("sftriage",), user=POD_UID)},
        secrets={settings.nats_secret: {AGENTS_FILE: secret.read_bytes()}},
    )
    asks = [sys.executable, "-m", "sftriage", "capture", "--run", str(run), "--rank", "1", "--reason", "look"]
    where = ["--job-id", JOB.job_id, "--nats", f"nats://127.0.0.1:{port}", "--creds", str(secret), "--out", str(run)]
    controls = [sys.executable, "-m", "sftriage", "controller", *where]
    with (
        contextlib.closing(HubServer(("127.0.0.1", port), folder / "nats", secret)),
        subprocess.Popen(controls) as controller,
        ended(controller),
        running(body, folder / "pod", objects=objects, place=Place("node-7")) as trained,
    ):

        def asked() -> bool:
            return subprocess.run([*asks, *options], capture_output=True, timeout=120, check=False).returncode == 0

        trained.until(asked, 180)
        # (a policy may have captured too)
        manifests = LocalStore(run).manifests().manifests
        yield next(manifest for manifest in manifests if manifest.capture_id.startswith("asked"))
        # AND no user was kept from the files of another
        assert "ermission" not in trained.said


@pytest.mark.parametrize("user", [0, 1000])
def test_trainers_and_agent_may_be_different_users(folder, user):
    """GIVEN trainers of root's or somebody's, whose files are theirs alone WHEN a trace is asked for THEN it comes."""
    with captured(folder, user, {}) as manifest:
        assert {one.name for one in manifest.artefacts} >= {"trace.json.gz", "stacks.speedscope.json"}
        assert manifest.capture.host == "node-7"


@needs.nsys
def test_a_rank_under_nsys_captures_itself(folder):
    """GIVEN a pod that is annotated WHEN a report is asked for THEN the rank opens its range, and the agent has it."""
    with captured(folder, 1000, {"sftriage.dev/nsys": "example.com/nsys:1"}, "--profiler", "nsys") as manifest:
        assert "trace.nsys-rep" in {one.name for one in manifest.artefacts}


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
