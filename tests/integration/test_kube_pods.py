"""A labelled training job, from its pods as the webhook has them to its trace on a laptop.

The API server, the operator, the store and the job are real; the pods are run by `pod_runner`, on "nodes" that are
network namespaces. Nobody edits the training script, and nobody tells it anything of sftriage.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.kube.injecting import applied, injection
from sftriage.kube.jobs import job_of
from sftriage.kube.settings import InjectionSettings
from tests.integration.kube import OWN, OwnCluster, missing
from tests.integration.namespaces import Hosts, hosts_of
from tests.integration.pod_container import missing as no_containers
from tests.integration.pod_runner import Pod, running
from tests.integration.pod_spec import Image, Objects, Place
from tests.integration.processes import DEADLINE_S, ended, wait_until
from tests.integration.s3 import BUCKET, environment_of, served
from tests.integration.test_auto_seams import POLICY
from tests.unit.kube.pods import JOBSET, pod

_WHY = missing() or no_containers() or ("" if os.environ.get(OWN) else f"{OWN} names no programs of an API server")
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)
pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "jobs" / "unedited" / "ddp.py"
SLOW, A_STEP, SLOW_FROM, SLOW_S = 3, 8, 30, 0.2
STORE, CREDENTIALS = f"s3://{BUCKET}/jobs", "store-credentials"
OURS, TRAINS = "sftriage:1", "example.com/train:1"
IMAGES = {OURS: Image(("sftriage",), user=65532), TRAINS: Image()}
VERSION = (1, 31)
HEAD = "resnet-workers-0-0.resnet"


class Forwarded:
    """What listens on this machine alone, at an address that others reach too."""

    def __init__(self, address: str) -> None:
        self._address, self._loop = address, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def port(self, port: int) -> int:
        """The port there of a port here."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

        async def listen() -> int:
            server = await asyncio.start_server(connected, self._address, 0)
            return int(server.sockets[0].getsockname()[1])

        return asyncio.run_coroutine_threadsafe(listen(), self._loop).result(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[OwnCluster]:
    with contextlib.closing(OwnCluster(Path(os.environ[OWN]))) as one:
        one.kubectl("apply", "-f", str(REPOSITORY / "k8s" / "crds"), "-f", str(REPOSITORY / "k8s" / "rbac"))
        one.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        yield one


class Platform:
    """A cluster with nodes, a store, and an operator, and nobody who runs pods but the test."""

    def __init__(self, server: OwnCluster, namespace: str, hosts: Hosts, folder: Path, api: tuple[str, int]) -> None:
        self.server, self.namespace, self.hosts, self.folder = server, namespace, hosts, folder
        self._address, port = api
        self._certificate = (server.folder / "certs" / "apiserver.crt").read_bytes()
        self.variables = {"KUBERNETES_SERVICE_HOST": "kubernetes.default.svc", "KUBERNETES_SERVICE_PORT": str(port)}

    def objects(self, names: Mapping[str, str], account: str | None = None) -> Objects:
        """What a pod finds in the cluster; with the token of a service account, where it has one."""
        found = Objects(images=IMAGES, variables=self.variables)
        found.names.update({"kubernetes.default.svc": self._address, **names})
        self.refresh(found)
        if account is None:
            return found
        token = self.server.kubectl("create", "token", "-n", self.namespace, account).stdout.strip()
        mounted = {"token": token.encode(), "ca.crt": self._certificate, "namespace": self.namespace.encode()}
        return Objects(found.secrets, found.config_maps, found.images, {}, mounted, found.names, self.variables)

    def refresh(self, objects: Objects) -> None:
        """See what is in the cluster now."""
        for one in self.server.get("secrets", namespace=self.namespace)["items"]:
            data = {name: base64.b64decode(value) for name, value in one.get("data", {}).items()}
            objects.secrets[one["metadata"]["name"]] = data
        for one in self.server.get("configmaps", namespace=self.namespace)["items"]:
            data = {name: value.encode() for name, value in one.get("data", {}).items()}
            objects.config_maps[one["metadata"]["name"]] = data

    def place(self, number: int) -> Place:
        return Place(f"node-{'abc'[number]}", self.hosts.addresses[number])

    @contextlib.contextmanager
    def run(self, body: Mapping[str, Any], number: int, objects: Objects) -> Iterator[Pod]:
        """Run a pod on a node."""
        folder = self.folder / str(body["metadata"]["name"])
        network = self.hosts.names[number]
        with running(body, folder, objects=objects, place=self.place(number), network=network) as one:
            yield one

    @contextlib.contextmanager
    def operator(self, environment: Mapping[str, str]) -> Iterator[Path]:
        """The operator, as its own service account; where it says what it does."""
        command = [sys.executable, "-m", "sftriage", "operator", "--namespace", self.namespace, "--image", OURS]
        command += ["--job-store", STORE, "--job-store-secret", CREDENTIALS]
        own = {**os.environ, **environment, "KUBECONFIG": str(self.server.as_operator(self.folder))}
        path = self.folder / "operator.log"
        with (
            path.open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, env=own) as process,
            ended(process),
        ):
            yield path
            assert process.poll() is None, path.read_text()


@pytest.fixture
def platform(server, tmp_path) -> Iterator[tuple[Platform, dict[str, str]]]:
    """It, and what opens its store from this machine."""
    with (
        served() as store,
        hosts_of(3) as hosts,
        hosts.reaching_us() as address,
        contextlib.closing(Forwarded(address)) as forwarded,
        server.namespace() as namespace,
    ):
        there = environment_of(f"http://{address}:{forwarded.port(store.port)}")
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": CREDENTIALS}, "stringData": there}
        server.create(secret, namespace)
        api = address, forwarded.port(server.port)
        yield Platform(server, namespace, hosts, tmp_path, api), environment_of(store.url)


def trainer(number: int, namespace: str, **security: Any) -> dict[str, Any]:
    """A pod of a JobSet of two nodes, as a person wrote it and as its controllers made it."""
    labels = {**JOBSET, "batch.kubernetes.io/job-completion-index": str(number)}
    made = pod(labels, {"PET_NNODES": "2"}, name=f"resnet-workers-0-{number}", owner="Job")
    torchrun = ["torchrun", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2"]
    command = [*torchrun, "--master-addr", HEAD, "--master-port", "29513", str(SCRIPT), "/out"]
    slow = {"SLOW_RANK": SLOW, "SLOW_AFTER": A_STEP * SLOW_FROM, "SLOW_S": SLOW_S / A_STEP, "OMP_NUM_THREADS": 1}
    (container,) = made["spec"]["containers"]
    container |= {"image": TRAINS, "command": command, "volumeMounts": [{"name": "out", "mountPath": "/out"}]}
    container["env"] += [{"name": name, "value": str(value)} for name, value in slow.items()]
    made["spec"] |= {"volumes": [{"name": "out", "emptyDir": {}}], "securityContext": security}
    made["metadata"]["namespace"] = namespace
    return made


def injected(body: dict[str, Any]) -> dict[str, Any]:
    """A pod as the webhook has it, which changes nothing the second time."""
    settings = InjectionSettings(image=OURS, store=STORE, store_secret=CREDENTIALS)
    found = job_of(body)
    assert found is not None
    done = applied(body, injection(body, found.job, settings, VERSION).patch)
    assert injection(done, found.job, settings, VERSION).patch == ()
    return done


USERS = {"as root": {}, "as any user": {"runAsUser": 12345, "runAsGroup": 23456}}


@pytest.mark.parametrize("security", USERS.values(), ids=USERS)
def test_a_labelled_job_s_slow_step_explains_itself(platform, tmp_path, security):
    """GIVEN a labelled job on two nodes, one of whose ranks becomes slow THEN its trace comes to a laptop"""
    cluster, credentials = platform
    server, namespace = cluster.server, cluster.namespace
    server.create(yaml.safe_load(POLICY), namespace)
    bodies = [injected(trainer(number, namespace, **security)) for number in range(2)]
    name = bodies[0]["metadata"]["labels"]["sftriage.dev/job"]
    addresses = cluster.hosts.addresses
    names = {f"{name}.{namespace}.svc": addresses[2], HEAD: addresses[0]}
    with cluster.operator(credentials), contextlib.ExitStack() as pods:
        # WHEN its pods are there, of which the server has all but the sidecar's restart policy (it is too old)
        for body in bodies:
            arguments = ("create", "-n", namespace, "--validate=false", "-f", "-")
            server.kubectl(*arguments, text=json.dumps(body))
        # THEN the operator wants a controller
        deployment = wait_until(lambda: deployed(server, namespace, name), 60)
        template = deployment["spec"]["template"]
        about = {"name": f"{name}-7d", "namespace": namespace, **template["metadata"]}
        controller = {"metadata": about, "spec": template["spec"]}
        ours = cluster.objects(names, account=name)
        controls = pods.enter_context(cluster.run(controller, 2, ours))
        controls.until(lambda: "the job under policy" in controls.said, 120)
        # WHEN all of it runs
        trains = [
            pods.enter_context(cluster.run(body, number, cluster.objects(names))) for number, body in enumerate(bodies)
        ]
        said = [one.wait(DEADLINE_S) for one in trains]
        # THEN the job has ended well, whatever its sidecars did
        assert said == ["Succeeded", "Succeeded"], "\n".join(one.said for one in (*trains, controls))
        assert all(one.containers["sftriage-agent"].restarts == 0 for one in trains), trains[0].said
        # AND a trace of the slow rank is in the store, with an object that says so
        try:
            stored = wait_until(lambda: captured(server, namespace), 120)
        except AssertionError:
            pytest.fail("\n".join(one.said for one in (*trains, controls)))
    assert stored[0]["spec"]["rank"] == SLOW
    assert stored[0]["status"]["host"]
    # AND one command brings it to the laptop, and another one says why it was made
    laptop = {**os.environ, **credentials, "KUBECONFIG": str(server.kubeconfig), "XDG_CACHE_HOME": str(tmp_path / "c")}

    def asked(*arguments: str) -> Any:
        command = [sys.executable, "-m", "sftriage", "kube", *arguments, "-n", namespace, "--json"]
        done = subprocess.run(
            command, env=laptop, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    fetched = asked("get", "--job", "resnet", "--rank", str(SLOW))
    assert (tmp_path / fetched["path"]).stat().st_size == fetched["size_bytes"] > 0
    assert fetched["capture"]["stage"] == "data"
    (report,) = asked("status", "resnet")
    assert report["captures"] >= 1
    assert asked("traces", "resnet")["captures"]


def deployed(server: OwnCluster, namespace: str, name: str) -> Any:
    found = server.kubectl("get", "deployment", name, "-n", namespace, "-o", "json", check=False)
    return json.loads(found.stdout) if found.returncode == 0 else None


def captured(server: OwnCluster, namespace: str) -> list[Any]:
    items = server.get("tracecaptures", namespace=namespace)["items"]
    return [one for one in items if "stored" in one.get("status", {}) and one["spec"]["rank"] == SLOW]
