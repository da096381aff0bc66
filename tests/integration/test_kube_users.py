"""An injected pod's commands as they stand, by users as pods have them: the agent's is not the trainers'."""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sftriage.kube.injecting import applied, injection
from sftriage.kube.jobs import JobRef
from sftriage.kube.sidecar import POD_UID, InjectionSettings, pod_parts
from sftriage.runtime.hub_server import HubServer, make_secret
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore
from tests import needs
from tests.integration.kube import _free_ports
from tests.integration.processes import TORCHRUN, ended, wait_until
from tests.unit.kube.pods import pod

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="other users' processes are started by root, by setpriv"
)

JOB = JobRef("pod", "resnet", "ml")
UNEDITED = Path(__file__).parent / "jobs" / "unedited"
TRAIN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(UNEDITED)!r})
from ddp import main
main(Path(sys.argv[1]), epochs=100_000)
"""


class PodOfUsers:
    """The volumes of one injected pod as folders, and its containers as processes of different users."""

    def __init__(self, folder: Path, user: int, port: int, annotations: dict[str, str]) -> None:
        self.folder, self.user, self.agent_user = folder, user, POD_UID
        self.held = contextlib.ExitStack()
        body = pod(name="resnet", annotations=annotations, securityContext={"runAsUser": 0})
        settings = InjectionSettings(nats=f"nats://127.0.0.1:{port}")
        self.body = applied(body, injection(body, JOB, settings, (1, 31)).patch)
        for volume in self.body["spec"]["volumes"]:
            # (as a node makes them: root's, and anybody's)
            (folder / volume["name"]).mkdir()
            (folder / volume["name"]).chmod(0o777)

    def placed(self, text: str) -> str:
        """A text with the volumes' places on this machine."""
        return (
            text.replace("/sftriage-", f"{self.folder}/sftriage-").replace("/sftriage/", f"{self.folder}/sftriage/")
            if text != "/sftriage"
            else f"{self.folder}/sftriage"
        )

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        said = {one["name"]: self.placed(one["value"]) for one in container.get("env", ()) if "value" in one}
        return {**os.environ, "SFTRIAGE_HOST": "node-7", "HOME": "/tmp", **said}

    def start(self, user: int, command: list[str], container: dict[str, Any], umask: int) -> subprocess.Popen[bytes]:
        with (self.folder / "said").open("ab") as out:
            process = subprocess.Popen(
                ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command],
                env=self.environment(container),
                umask=umask,
                cwd=self.folder / "sftriage-spool",
                stdout=out,
                stderr=out,
            )
        self.held.enter_context(ended(process))
        return process

    def ours(self, name: str) -> subprocess.Popen[bytes]:
        """Start one of our containers."""
        (container,) = (one for one in self.body["spec"]["initContainers"] if one["name"] == name)
        assert container["securityContext"]["runAsUser"] == POD_UID
        user = self.agent_user if name == "sftriage-agent" else POD_UID
        command = [self.placed(word).replace("$(SFTRIAGE_POD)", "resnet") for word in container["command"][1:]]
        return self.start(user, [sys.executable, "-m", "sftriage", *command], container, 0o022)

    def train(self) -> subprocess.Popen[bytes]:
        """Start the trainers, as somebody whose files are his own."""
        work = self.folder / "work"
        work.mkdir()
        os.chown(work, self.user, self.user)
        script = self.folder / "train.py"
        script.write_text(TRAIN)
        command = [*TORCHRUN, "2", str(script), str(work)]
        container = self.body["spec"]["containers"][0]
        (path,) = (one for one in container["env"] if one["name"] == "PYTHONPATH")
        path["value"] += f":{sysconfig.get_path('purelib')}"
        container["env"] += [{"name": name, "value": value} for name, value in self.interpreter().items()]
        return self.start(self.user, command, container, 0o077)

    def interpreter(self) -> dict[str, str]:
        """A Python of this version that the trainers may start; the one of this test may lie in somebody's home."""
        who = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "sh", "-c"]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for program in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
            tried = subprocess.run([*who, f"{program} -c 'import ssl'"], capture_output=True, check=False)
            if tried.returncode == 0:
                armed = "sftriage.dev/nsys" in self.body["metadata"]["annotations"]
                return {"SFTRIAGE_NSYS_PYTHON" if armed else "PYTHON_EXEC": program}
        pytest.skip(f"user {self.user} can start no {version} here")

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()


@pytest.fixture
def folder() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="sftriage-users-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@contextlib.contextmanager
def captured(folder: Path, user: int, annotations: dict[str, str], *options: str) -> Iterator[Manifest]:
    """The capture of a rank that somebody asks for, in a pod whose trainers' files are theirs alone."""
    (port,) = _free_ports(1)
    of_pod = PodOfUsers(folder, user, port, annotations)
    secret, run = folder / "secret", folder / "run"
    make_secret(secret)
    shutil.copy(secret, folder / "sftriage-hub" / "agents.nk")
    (folder / "sftriage-hub" / "agents.nk").chmod(0o644)
    if annotations:
        # (as if it had been brought here)
        program = folder / "sftriage-nsys" / "run" / "nsys"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\nexec nsys "$@"\n')
        program.chmod(0o755)
        # (it starts this Python, which may lie in somebody's home)
        of_pod.agent_user = 0
    with of_pod.held:
        hub = HubServer(("127.0.0.1", port), folder / "nats", secret)
        of_pod.held.callback(hub.close)
        carried = of_pod.ours("sftriage-carry")
        assert carried.wait(60) == 0, of_pod.said
        where = ["--job-id", JOB.job_id, "--nats", f"nats://127.0.0.1:{port}", "--creds", str(secret)]
        ours = {"env": [{"name": "PYTHONPATH", "value": ""}]}
        of_pod.start(0, [sys.executable, "-m", "sftriage", "controller", *where, "--out", str(run)], ours, 0o022)
        of_pod.ours("sftriage-agent")
        trainers = of_pod.train()
        asks = [sys.executable, "-m", "sftriage", "capture", "--run", str(run), "--rank", "1", "--reason", "look"]

        def asked() -> bool:
            assert trainers.poll() is None, of_pod.said
            done = subprocess.run([*asks, *options], capture_output=True, text=True, timeout=120, check=False)
            (folder / "asked").write_text(done.stdout + done.stderr)
            return done.returncode == 0

        wait_until(asked, 180)
        yield LocalStore(run).manifests().manifests[-1]
        # AND nobody was kept from what is another one's
        assert "ermission" not in of_pod.said


@pytest.mark.parametrize("user", [0, 1000])
def test_a_trainer_of_any_user_is_watched_and_captured_by_an_agent_of_another(folder, user):
    """GIVEN trainers of root's or somebody's, whose files are theirs alone WHEN a trace is asked for THEN it comes."""
    with captured(folder, user, {}) as manifest:
        assert {one.name for one in manifest.artefacts} >= {"trace.json.gz", "stacks.speedscope.json"}
        assert manifest.capture.host == "node-7"


@needs.nsys
def test_a_rank_that_starts_under_nsys_is_captured_by_an_agent_that_cannot_reach_it(folder):
    """GIVEN a pod that is annotated WHEN a report is asked for THEN the rank opens its range, and the agent has it."""
    with captured(folder, 1000, {"sftriage.dev/nsys": "example.com/nsys:1"}, "--profiler", "nsys") as manifest:
        assert "trace.nsys-rep" in {one.name for one in manifest.artefacts}


@pytest.mark.parametrize("there", [True, False])
def test_nsight_systems_is_brought_from_an_image_that_has_it(tmp_path, there):
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
