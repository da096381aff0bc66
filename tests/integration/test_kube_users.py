"""An injected pod's commands as they stand, by users as pods have them: the agent's is not the trainers'."""

from __future__ import annotations

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
from sftriage.kube.settings import InjectionSettings
from sftriage.kube.sidecar import POD_UID
from sftriage.runtime.hub_server import HubServer, make_secret
from sftriage.traces.store import LocalStore
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

    def __init__(self, folder: Path, user: int, port: int) -> None:
        self.folder, self.user = folder, user
        self.held = contextlib.ExitStack()
        body = pod(name="resnet", securityContext={"runAsUser": 0})
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

    def ours(self, index: int) -> subprocess.Popen[bytes]:
        """Start one of our containers."""
        container = self.body["spec"]["initContainers"][index]
        assert container["securityContext"]["runAsUser"] == POD_UID
        command = [self.placed(word).replace("$(SFTRIAGE_POD)", "resnet") for word in container["command"][1:]]
        return self.start(POD_UID, [sys.executable, "-m", "sftriage", *command], container, 0o022)

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
        """A Python that the trainers' user may start; the one of this test may lie in somebody's home."""
        copied = self.folder / "python"
        shutil.copy(Path(sys.executable).resolve(), copied)
        found = {"PYTHON_EXEC": str(copied), "PYTHONHOME": sys.base_prefix}
        who = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "sh", "-c"]
        tried = subprocess.run([*who, f"{copied} -c 'import ssl'"], env={**os.environ, **found}, check=False)
        if tried.returncode != 0:
            pytest.skip(f"user {self.user} can start no Python here")
        return found

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()


@pytest.fixture
def folder() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="sftriage-users-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@pytest.mark.parametrize("user", [0, 1000])
def test_a_trainer_of_any_user_is_watched_and_captured_by_an_agent_of_another(folder, user):
    """GIVEN trainers of root's or somebody's, whose files are theirs alone WHEN a trace is asked for THEN it comes."""
    (port,) = _free_ports(1)
    of_pod = PodOfUsers(folder, user, port)
    secret = folder / "secret"
    make_secret(secret)
    shutil.copy(secret, folder / "sftriage-hub" / "agents.nk")
    (folder / "sftriage-hub" / "agents.nk").chmod(0o644)
    with of_pod.held:
        hub = HubServer(("127.0.0.1", port), folder / "nats", secret)
        of_pod.held.callback(hub.close)
        carried = of_pod.ours(0)
        assert carried.wait(60) == 0, of_pod.said
        run = folder / "run"
        where = ["--job-id", JOB.job_id, "--nats", f"nats://127.0.0.1:{port}", "--creds", str(secret)]
        ours = {"env": [{"name": "PYTHONPATH", "value": ""}]}
        of_pod.start(0, [sys.executable, "-m", "sftriage", "controller", *where, "--out", str(run)], ours, 0o022)
        of_pod.ours(1)
        trainers = of_pod.train()
        asks = [sys.executable, "-m", "sftriage", "capture", "--run", str(run), "--rank", "1", "--reason", "look"]

        def captured() -> bool:
            assert trainers.poll() is None, of_pod.said
            done = subprocess.run(asks, capture_output=True, text=True, timeout=120, check=False)
            (folder / "asked").write_text(done.stdout + done.stderr)
            return done.returncode == 0

        wait_until(captured, 180)
        (manifest,) = LocalStore(run).manifests().manifests
        assert {one.name for one in manifest.artefacts} >= {"trace.json.gz", "stacks.speedscope.json"}
        assert manifest.capture.host == "node-7"
        # AND what trainers and agent have left behind is what others may not have kept them from
        assert "ermission" not in of_pod.said
