"""What the operator and the webhook take in a large cluster, on a real API server with its etcd, and no nodes.

    SFTRIAGE_TEST_KUBE_BIN=DIR python bench/operator_scale.py [--jobs 1000] [--pods 100] [--json]

begun      the operator begins beside all pods of all jobs, as after a restart, and before that beside a tenth of the
           jobs: seconds until each job has its controller's Deployment, processor time, and the most memory.
again      it begins once more, with all of that there: until it has seen all, and what it takes when nothing happens.
new job    from a job's first pod to its Deployment, of jobs that come one by one while the others are there.
injected   a pod created with the webhook asked, over one created without, in turns: milliseconds at the server.
captured   from a decision in a run's journal to its TraceCapture at the server, by a controller's mirror.

Pods that fill the cluster are created as the webhook leaves them. What nobody here is: a kubelet, and a controller of
the jobs themselves. The API server shares the machine, and takes most of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from sftriage.kube.client import ClusterObjects, path_of
from sftriage.kube.injecting import applied, injection
from sftriage.kube.jobs import JobRef, job_of
from sftriage.kube.mirroring import Mirror
from sftriage.kube.settings import InjectionSettings
from tests.integration.kube import OWN, OwnCluster
from tests.integration.test_kube_webhook import Webhook
from tests.unit.kube.pods import pod
from tests.unit.recorded import request_of, run_at, verdict

REPOSITORY = Path(__file__).parents[1]
NAMESPACES, CLIENTS = 10, 8
PATIENCE_S, LOOK_S = 3600.0, 0.5
AT_REST_S = 30.0
DEPLOYMENTS = path_of("apps/v1", "deployments")
OURS = "sftriage.dev/job,app.kubernetes.io/component=controller"
TICKS = os.sysconf("SC_CLK_TCK")


class Load:
    """A cluster that fills up with jobs.

    Args:
        cluster: the server.
        pods: of each job.
    """

    def __init__(self, cluster: OwnCluster, pods: int) -> None:
        self.cluster, self._pods, self.jobs = cluster, pods, 0
        self._own = threading.local()
        for number in range(NAMESPACES):
            self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": f"team-{number}"}})

    @property
    def objects(self) -> ClusterObjects:
        """A client of this thread's own."""
        if not hasattr(self._own, "objects"):
            self._own.objects = ClusterObjects.connect()
        found: ClusterObjects = self._own.objects
        return found

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        return self.objects.ask(method, path, body, **query)

    def job(self, number: int, pods: int | None = None) -> JobRef:
        """A Job, and its pods as the webhook leaves them."""
        name, namespace = f"train-{number}", f"team-{number % NAMESPACES}"
        template = pod({"batch.kubernetes.io/job-name": name})
        template["metadata"].pop("generateName")
        about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
        inner = {name: template[name] for name in ("metadata", "spec")}
        made = self.ask(
            "POST", path_of("batch/v1", "jobs", namespace), {**about, "spec": {"parallelism": 0, "template": inner}}
        )
        owner = {**about, "name": name, "uid": made["metadata"]["uid"], "controller": True}
        owner.pop("metadata")
        found = job_of(template, namespace)
        assert found is not None
        whole = applied(template, injection(template, found.job, InjectionSettings(), (1, 30)).patch)
        for index in range(self._pods if pods is None else pods):
            body = {**whole, "metadata": {**whole["metadata"], "name": f"{name}-{index}", "ownerReferences": [owner]}}
            self.ask("POST", path_of("v1", "pods", namespace), body)
        return found.job

    def grow(self, jobs: int) -> float:
        """Fill it up to so many jobs; seconds that took."""
        began_s = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(self.job, range(self.jobs, jobs)))
        self.jobs = jobs
        return time.monotonic() - began_s

    def deployed(self) -> int:
        """How many jobs have a controller."""
        return len(self.ask("GET", DEPLOYMENTS, labelSelector=OURS)["items"])


class Operator:
    """`sftriage operator` as its own account, and what it takes."""

    def __init__(self, cluster: OwnCluster, folder: Path) -> None:
        settings = folder / "settings.yaml"
        settings.write_text(yaml.safe_dump({"image": "registry.example/sftriage:1"}))
        environment = {**os.environ, "KUBECONFIG": str(cluster.as_operator(folder))}
        command = [sys.executable, "-m", "sftriage", "operator", "--settings", str(settings)]
        self.log = folder / "operator.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._began_s = time.monotonic()

    @property
    def cpu_s(self) -> float:
        user, system = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS

    @property
    def took(self) -> dict[str, float]:
        """Since it began."""
        status = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (peak,) = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
        seconds = time.monotonic() - self._began_s
        return {"seconds": round(seconds, 1), "cpu_s": round(self.cpu_s, 1), "peak_mib": round(peak / 1024)}

    def rested(self) -> dict[str, float]:
        """What it takes once nothing happens any more: processor time as a share of a core."""
        before_s, quiet = self.cpu_s, 0
        while quiet < 3:
            time.sleep(1.0)
            now_s = self.cpu_s
            quiet, before_s = quiet + 1 if now_s - before_s < 0.05 else 0, now_s
            assert time.monotonic() < self._began_s + PATIENCE_S, self.log.read_text()[-2000:]
        found, began_s = self.took, self.cpu_s
        time.sleep(AT_REST_S)
        return {**found, "at_rest_cores": round((self.cpu_s - began_s) / AT_REST_S, 4)}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def until(what: Callable[[], object], every_s: float = LOOK_S) -> float:
    """Seconds until something is so."""
    began_s = time.monotonic()
    while not what():
        assert time.monotonic() < began_s + PATIENCE_S, what
        time.sleep(every_s)
    return time.monotonic() - began_s


@contextlib.contextmanager
def operating(load: Load, folder: Path) -> Iterator[Operator]:
    with contextlib.closing(Operator(load.cluster, folder)) as operator:
        yield operator


def begun(load: Load, folder: Path) -> dict[str, float]:
    with operating(load, folder) as operator:
        until(lambda: load.deployed() >= load.jobs)
        return {"jobs": load.jobs, **operator.took}


def new_jobs(load: Load, count: int) -> list[float]:
    """Seconds from the first pod of a new job to its Deployment."""
    found = []
    for number in range(load.jobs, load.jobs + count):
        job = load.job(number, pods=1)
        found.append(until(lambda job=job: _there(load, job), 0.01))
    load.jobs += count
    return found


def _there(load: Load, job: JobRef) -> bool:
    selector = f"sftriage.dev/job={job.object_name},app.kubernetes.io/component=controller"
    return bool(load.ask("GET", path_of("apps/v1", "deployments", job.namespace), labelSelector=selector)["items"])


def injected(load: Load, folder: Path, count: int) -> dict[str, list[float]]:
    """Milliseconds to create a pod, with the webhook asked and without, in turns."""
    webhook = Webhook(load.cluster, folder)
    webhook.certify()
    took: dict[str, list[float]] = {"with": [], "without": []}
    with webhook.running("--server-version", "1.31"):
        until(lambda: _created(load, "probe")[1], 0.2)
        for number in range(count):
            for which in ("with", "without"):
                ms, changed = _created(load, f"one-{number}", labelled=which == "with")
                assert changed == (which == "with")
                took[which].append(ms)
    return took


def _created(load: Load, name: str, *, labelled: bool = True) -> tuple[float, bool]:
    body = pod({"sftriage.dev/job-name": name})
    if not labelled:
        del body["metadata"]["labels"]["sftriage.dev/inject"]
    began_s = time.perf_counter()
    made = load.ask("POST", path_of("v1", "pods", "default"), body)
    ms = (time.perf_counter() - began_s) * 1e3
    load.ask("DELETE", path_of("v1", "pods", "default", made["metadata"]["name"]), gracePeriodSeconds=0)
    return ms, len(made["spec"].get("initContainers", ())) > 0


def captured(load: Load, folder: Path, count: int) -> list[float]:
    """Seconds from a decision to its TraceCapture."""
    job = JobRef("job", "train-0", "team-0")
    run, mirror = run_at(folder / "run"), Mirror(ClusterObjects.connect(), job)
    mirror.follow(run.directory)
    mirror.begin()
    run.record(4, range(10), lambda rank, step: {"data": 10.0})
    where, found = path_of("sftriage.dev/v1alpha1", "tracecaptures", "team-0"), []
    for number in range(count):
        one = verdict(100 + 50 * number, "suspect", onset=120)
        run.decide(one, "capture", "rule_matched", requests=(request_of(f"c-{number}"),))
        found.append(until(lambda number=number: len(load.ask("GET", where)["items"]) > number, 0.02))
    assert mirror.finish(60.0)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Half of them, and 99 in 100, are no more."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3), "count": len(values)}


def measure(options: argparse.Namespace, folder: Path, cluster: OwnCluster) -> dict[str, Any]:
    def told(name: str, found: Any) -> Any:
        print(f"operator_scale: {name}: {found}", file=sys.stderr, flush=True)
        return found

    cluster.kubectl("apply", *(word for name in ("crds", "rbac") for word in ("-f", str(REPOSITORY / "k8s" / name))))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    load, sizes = Load(cluster, options.pods), (max(1, options.jobs // 10), options.jobs)
    found: dict[str, Any] = {"pods_a_job": options.pods, "load_before": round(os.getloadavg()[0], 1), "begun": []}
    for jobs in sizes:
        told(f"{jobs} jobs created, seconds", round(load.grow(jobs), 1))
        found["begun"].append(told("begun", begun(load, folder)))
    with operating(load, folder) as operator:
        found["again"] = told("again", operator.rested())
        found["new_job_s"] = told("new job, seconds", spread(new_jobs(load, options.samples)))
        found["captured_s"] = told("captured, seconds", spread(captured(load, folder, options.samples)))
    took = injected(load, folder, 10 * options.samples)
    found["injected_ms"] = told("injected, ms", {which: spread(ms) for which, ms in took.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=100, help="of each job")
    parser.add_argument("--samples", type=int, default=20, help="new jobs, and captures; ten times as many pods")
    options = parser.parse_args()
    if not os.environ.get(OWN):
        parser.error(f"{OWN} has to name a directory with kube-apiserver and etcd")
    with tempfile.TemporaryDirectory() as folder:
        cluster = OwnCluster(Path(os.environ[OWN]))
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        try:
            found = measure(options, Path(folder), cluster)
        finally:
            cluster.close()
    print(json.dumps(found, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
