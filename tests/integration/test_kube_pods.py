"""A labelled training job, from its pods as the webhook has them to its trace on a laptop.

The API server, the operator, the store and the job are real; the pods are run by `pods`, on "nodes" that are
network namespaces. Nobody edits the training script, and nobody tells it anything of sftriage.
"""

import asyncio
import base64
import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.kube.injecting import InjectionSettings, injection
from sftriage.kube.jobs import job_of
from tests.integration.kube import ANY, K8S, SYSTEM, Laptop, Operators, OwnCluster, stored_trace
from tests.integration.kube import captured as with_trace
from tests.integration.namespaces import Hosts, hosts_of
from tests.integration.pods import Image, Objects, Place, Pod, running
from tests.integration.pods import missing as no_containers
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.s3 import BUCKET, environment_of, served
from tests.integration.test_auto_seams import POLICY
from tests.unit.kube.pods import JOBSET, pod

_WHY = no_containers() or (f"something runs in the cluster of {ANY}" if ANY in os.environ else "")
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)
pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")

SCRIPT = Path(__file__).parent / "jobs" / "unedited" / "ddp.py"
SLOW, A_STEP, SLOW_FROM, SLOW_S = 3, 8, 30, 0.2
STORE, CREDENTIALS = f"s3://{BUCKET}/jobs", "store-credentials"
OURS, TRAINS = "sftriage:1", "example.com/train:1"
IMAGES = {OURS: Image(("sftriage",), user=65532), TRAINS: Image()}
SETTINGS = InjectionSettings(image=OURS, store=STORE, store_secret=CREDENTIALS)
VERSION = (1, 31)
HEAD = "resnet-workers-0-0.resnet"


class Forwarded:
    """What listens on this machine alone, at an address that others reach too."""

    def __init__(self, address: str) -> None:
        self._address, self._loop = address, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def port(self, port: int) -> int:
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


class Platform:
    """A cluster with nodes, a store, and an operator, and nobody who runs pods but the test."""

    def __init__(self, server: OwnCluster, namespace: str, hosts: Hosts, folder: Path, api: tuple[str, int]) -> None:
        self.server, self.namespace, self.hosts, self.folder = server, namespace, hosts, folder
        self._address, port = api
        self._certificate = (server.folder / "certs" / "apiserver.crt").read_bytes()
        self.variables = {"KUBERNETES_SERVICE_HOST": "kubernetes.default.svc", "KUBERNETES_SERVICE_PORT": str(port)}

    def objects(self, names: Mapping[str, str], account: str | None = None, namespace: str = "") -> Objects:
        """What a pod of a namespace finds in the cluster; with the token of a service account, where it has one."""
        namespace = namespace or self.namespace
        found = Objects(images=IMAGES, variables=self.variables)
        found.names.update({"kubernetes.default.svc": self._address, **names})
        for one in self.server.get("secrets", namespace=namespace)["items"]:
            data = {name: base64.b64decode(value) for name, value in one.get("data", {}).items()}
            found.secrets[one["metadata"]["name"]] = data
        for one in self.server.get("configmaps", namespace=namespace)["items"]:
            data = {name: value.encode() for name, value in one.get("data", {}).items()}
            found.config_maps[one["metadata"]["name"]] = data
        if account is None:
            return found
        token = self.server.kubectl("create", "token", "-n", namespace, account).stdout.strip()
        mounted = {"token": token.encode(), "ca.crt": self._certificate, "namespace": namespace.encode()}
        return replace(found, account=mounted)

    def place(self, number: int) -> Place:
        return Place(f"node-{'abc'[number]}", self.hosts.addresses[number], self.hosts.names[number])

    def run(self, body: Mapping[str, Any], number: int, objects: Objects) -> contextlib.AbstractContextManager[Pod]:
        folder = self.folder / str(body["metadata"]["name"])
        return running(body, folder, objects=objects, place=self.place(number))

    def operator(self, environment: Mapping[str, str]) -> contextlib.AbstractContextManager[object]:
        operators = Operators(self.server, self.folder, self.namespace, SETTINGS)
        operators.environment |= environment
        return operators.running()


@pytest.fixture
def platform(server, tmp_path) -> Iterator[tuple[Platform, dict[str, str]]]:
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


def trainer(number: int, namespace: str, labels: Mapping[str, str], variables: Mapping[str, object]) -> dict[str, Any]:
    """A pod of a job, as a person wrote it and as its controllers made it: torchrun reads what they set."""
    about = {**labels, "batch.kubernetes.io/job-completion-index": str(number)}
    slow = {"SLOW_RANK": SLOW, "SLOW_AFTER": A_STEP * SLOW_FROM, "SLOW_S": SLOW_S / A_STEP, "OMP_NUM_THREADS": 1}
    told = {name: str(value) for name, value in {**slow, **variables, "PET_NODE_RANK": number}.items()}
    made = pod(about, told, name=f"resnet-workers-0-{number}", owner="Job")
    (container,) = made["spec"]["containers"]
    container |= {"image": TRAINS, "command": ["torchrun", str(SCRIPT), "/out"]}
    container["volumeMounts"] = [{"name": "out", "mountPath": "/out"}]
    made["spec"]["volumes"] = [{"name": "out", "emptyDir": {}}]
    made["metadata"]["namespace"] = namespace
    return made


def injected(body: dict[str, Any]) -> dict[str, Any]:
    found = job_of(body)
    assert found is not None
    done = injection(body, found, SETTINGS, VERSION).pod
    assert injection(done, found, SETTINGS, VERSION).patch == ()
    return done


class Started:
    def __init__(self, cluster: Platform, bodies: list[dict[str, Any]], pods: contextlib.ExitStack) -> None:
        server, namespace = cluster.server, cluster.namespace
        name = bodies[0]["metadata"]["labels"]["sftriage.dev/job"]
        # Its pods are in the cluster, but for the sidecar's restart policy, for which the server is too old.
        for body in bodies:
            arguments = ("create", "-n", namespace, "--validate=false", "-f", "-")
            server.kubectl(*arguments, text=json.dumps(body))
        # The operator wants a controller, and the node's kubelet runs it.
        deployment = wait_until(lambda: deployed(server, namespace, name), 60)
        template = deployment["spec"]["template"]  # type: ignore[index]  # it is an object
        about = {"name": f"{name}-7d", "namespace": namespace, **template["metadata"]}
        addresses = cluster.hosts.addresses
        names = {f"{name}.{namespace}.svc": addresses[2], HEAD: addresses[0]}
        self._cluster, self._pods = cluster, pods
        self._controller = {"metadata": about, "spec": template["spec"]}
        self._ours = cluster.objects(names, account=name)
        self.controls = self.control()
        self.trains = [
            pods.enter_context(cluster.run(body, number, cluster.objects(names))) for number, body in enumerate(bodies)
        ]

    def control(self, name: str = "") -> Pod:
        """Run a pod of the controller, and wait until it is at work."""
        body = {**self._controller, "metadata": {**self._controller["metadata"], **({"name": name} if name else {})}}
        one = self._pods.enter_context(self._cluster.run(body, 2, self._ours))
        one.until(lambda: "the job under policy" in one.said, 120)
        return one

    @property
    def said(self) -> str:
        return "\n".join(one.said for one in (*self.trains, self.controls))

    def ends(self) -> None:
        assert [one.wait(DEADLINE_S) for one in self.trains] == ["Succeeded"] * len(self.trains), self.said

    def capture(self, cluster: Platform) -> Any:
        """The object of the capture of the slow rank, once its trace is in the store."""
        try:
            return wait_until(lambda: captured(cluster.server, cluster.namespace), 120)[0]  # type: ignore[index]
        except AssertionError:
            pytest.fail(self.said)


def deployed(server: OwnCluster, namespace: str, name: str) -> Any:
    found = server.kubectl("get", "deployment", name, "-n", namespace, "-o", "json", check=False)
    return json.loads(found.stdout) if found.returncode == 0 else None


def captured(server: OwnCluster, namespace: str) -> list[Any]:
    items = server.get("tracecaptures", namespace=namespace)["items"]
    return [one for one in items if "stored" in one.get("status", {}) and one["spec"]["rank"] == SLOW]


TRAINJOB = {
    **JOBSET,
    "jobset.sigs.k8s.io/replicatedjob-name": "node",
    "trainer.kubeflow.org/trainjob-ancestor-step": "trainer",
}
TWO_NODES = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 2, "PET_MASTER_ADDR": HEAD, "PET_MASTER_PORT": 29513}
JOBS = {
    "a JobSet as root": (JOBSET, {}),
    "a TrainJob as any user": (TRAINJOB, {"runAsUser": 12345, "runAsGroup": 23456}),
    "a JobSet as the restricted standard has it": (
        JOBSET,
        {"runAsUser": 12345, "runAsNonRoot": True, "fsGroup": 34567, "seccompProfile": {"type": "RuntimeDefault"}},
    ),
}


@pytest.mark.parametrize(("labels", "security"), JOBS.values(), ids=JOBS)
def test_a_labelled_job_s_slow_step_explains_itself(platform, tmp_path, labels, security):
    """GIVEN a labelled job on two nodes, one of whose ranks becomes slow THEN its trace comes to a laptop"""
    cluster, credentials = platform
    server, namespace = cluster.server, cluster.namespace
    server.create(yaml.safe_load(POLICY), namespace)
    bodies = []
    for number in range(2):
        body = trainer(number, namespace, labels, TWO_NODES)
        body["spec"]["securityContext"] = security
        if "fsGroup" in security:
            strict = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            (train,) = body["spec"]["containers"]
            # (and nobody else may read what it writes)
            train |= {
                "securityContext": strict,
                "command": ["sh", "-c", 'umask 077; exec "$@"', "sh", *train["command"]],
            }
        bodies.append(injected(body))
    with cluster.operator(credentials), contextlib.ExitStack() as pods:
        # WHEN all of it runs THEN the job ends well, and a trace of the slow rank is in the store
        job = Started(cluster, bodies, pods)
        job.ends()
        assert all(one.containers["sftriage-agent"].restarts == 0 for one in job.trains), job.said
        stored = job.capture(cluster)
    assert stored["status"]["host"]
    # AND one command brings it to the laptop, and another one says why it was made
    laptop = Laptop(server.kubeconfig, tmp_path, namespace)
    laptop.environment |= credentials
    fetched = laptop.json("get", "--job", "resnet", "--rank", SLOW)
    assert (tmp_path / fetched["path"]).stat().st_size == fetched["size_bytes"] > 0
    assert fetched["capture"]["stage"] == "data"
    (report,) = laptop.json("status", "resnet")
    assert report["captures"] >= 1
    assert laptop.json("list", "--job", "resnet")["captures"]


FAILS_ONCE = 'if mkdir /out/failed 2>/dev/null; then timeout -s KILL 15 "$@"; exit 1; fi; exec "$@"'


def test_restarted_containers_lose_nothing(platform):
    """GIVEN trainers that fail once, and then an agent and a controller that are killed THEN the trace is there"""
    cluster, credentials = platform
    cluster.server.create(yaml.safe_load(POLICY), cluster.namespace)
    one_node = {"PET_NNODES": 1, "PET_NPROC_PER_NODE": 4, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": 29513}
    body = trainer(0, cluster.namespace, JOBSET, one_node)
    body["spec"] |= {"restartPolicy": "OnFailure", "securityContext": {"runAsUser": 12345}}
    (train,) = body["spec"]["containers"]
    train["command"] = ["sh", "-c", FAILS_ONCE, "sh", *train["command"]]
    with cluster.operator(credentials), contextlib.ExitStack() as pods:
        job = Started(cluster, [injected(body)], pods)
        (trains,) = job.trains
        agent = trains.containers["sftriage-agent"]
        trains.until(lambda: trains.containers["train"].restarts == 1)
        for one, container in ((trains, agent), (job.controls, job.controls.containers["controller"])):
            container.kill()
            one.until(lambda container=container: container.restarts == 1 and container.running)
        job.ends()
        stored = job.capture(cluster)
    assert stored["spec"]["trigger"]["stage"] == "data"
    assert trains.containers["train"].restarts == 1


def test_a_controller_moves_to_another_node(platform):
    """GIVEN a controller whose pod goes, and all of its files with it, WHEN another comes THEN the trace is there"""
    cluster, credentials = platform
    # (the script takes 60 steps, of which those are lost that the first one had)
    short = POLICY.replace("window_steps: 30, stride_steps: 5, warmup_steps: 10", "window_steps: 10, warmup_steps: 5")
    cluster.server.create(yaml.safe_load(short), cluster.namespace)
    slow = {**TWO_NODES, "SLOW_AFTER": 0, "SLOW_S": 1.0 / A_STEP}
    bodies = [trainer(number, cluster.namespace, JOBSET, slow) for number in range(2)]
    with cluster.operator(credentials), contextlib.ExitStack() as pods:
        job = Started(cluster, [injected(body) for body in bodies], pods)
        rings = job.trains[1].volume("sftriage-rings")
        job.trains[1].until(lambda: rings.exists() and any(rings.iterdir()))
        job.controls.delete()
        job.controls = job.control("another")
        job.ends()
        stored = job.capture(cluster)
    assert stored["spec"]["trigger"]["stage"] == "data"


def test_the_operator_s_manifest_passes_store_credentials(platform, monkeypatch):
    """GIVEN the operator's own pod, and a store with credentials, WHEN a capture is deleted THEN so is its trace"""
    cluster, credentials = platform
    server, namespace = cluster.server, cluster.namespace
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)
    store, manifest = stored_trace(cluster.folder, STORE)
    kept = f"{manifest.job}/{manifest.run}/{manifest.capture_id}"
    assert kept in store.ids()
    settings = {"settings.yaml": yaml.safe_dump(SETTINGS.plain())}
    there = server.get("secret", CREDENTIALS, namespace=namespace)["data"]
    for body in (
        {"kind": "ConfigMap", "metadata": {"name": "sftriage-injection"}, "data": settings},
        {"kind": "Secret", "metadata": {"name": "sftriage-store"}, "data": there},
    ):
        server.kubectl("apply", "-n", SYSTEM, "-f", "-", text=json.dumps({"apiVersion": "v1", **body}))
    template = next(yaml.safe_load_all((K8S / "operator" / "deployment.yaml").read_text()))["spec"]["template"]
    body = {"metadata": {"name": "operator", "namespace": SYSTEM, **template["metadata"]}, "spec": template["spec"]}
    body["spec"]["containers"][0]["image"] = OURS
    objects = cluster.objects({}, "sftriage-operator", SYSTEM)
    with cluster.run(body, 2, objects) as pod:
        with_trace(server, namespace, store, manifest)
        pod.until(lambda: server.get("tracecapture", "c", namespace=namespace)["metadata"].get("finalizers"), 60)
        server.kubectl("delete", "tracecapture", "c", "-n", namespace, "--wait=false")
        pod.until(lambda: not server.get("tracecaptures", namespace=namespace)["items"], 60)
    # (what other tests have stored stays)
    assert kept not in store.ids()
