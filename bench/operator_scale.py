"""What the operator takes in a large cluster: a real API server with its etcd, the real operator, and no nodes.

begun      the operator begins beside all pods of all jobs, as after a restart without controllers: seconds until each
           job has a report and each namespace has what runs them, processor time, and most memory.
again      it begins once more, with all of that in place: until nothing is left to do, and what it takes at rest.
new job    from a job's first pod to its report with the label, of jobs that come one by one beside the others.

Pods are as the webhook leaves them; all but the first of a job are copies in etcd. The API server shares the machine.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.processes import Use
from bench.runner import say
from sftriage.kube.client import ClusterObjects, path_of
from sftriage.kube.controllers import NAME, WATCH_LABEL
from sftriage.kube.injecting import InjectionSettings, injection
from sftriage.kube.jobs import JobRef
from sftriage.kube.objects import API_VERSION, REPORTS
from tests.integration.kube import OWN, Operators, OwnCluster
from tests.integration.processes import ended

CLIENTS, PATIENCE_S, REST_S = 8, 1800.0, 20.0
QUICK = {"jobs": 20, "pods": 5, "namespaces": 2, "samples": 3}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=100, help="of each job")
    parser.add_argument("--namespaces", type=int, default=10)
    parser.add_argument("--samples", type=int, default=20, help="new jobs")
    parser.add_argument("--programs", default=os.environ.get(OWN), help="folder with kube-apiserver and etcd")


class Load:
    """A cluster that fills up with jobs, each with ``pods`` pods."""

    def __init__(self, cluster: OwnCluster, options: argparse.Namespace) -> None:
        self._etcd, self._options, self._own = cluster.etcd, options, threading.local()
        for number in range(options.namespaces):
            self.objects.request("POST", "/api/v1/namespaces", {"metadata": {"name": f"team-{number:03}"}})

    @property
    def objects(self) -> ClusterObjects:
        """A client of this thread's own."""
        if not hasattr(self._own, "objects"):
            self._own.objects = ClusterObjects.connect()
        found: ClusterObjects = self._own.objects
        return found

    def add(self, number: int, pods: int | None = None) -> JobRef:
        job = JobRef("job", f"train-{number:05}", f"team-{number % self._options.namespaces:03}")
        container = {"name": "train", "image": "train:1", "command": ["torchrun", "train.py"]}
        labels = {"batch.kubernetes.io/job-name": job.name, "sftriage.dev/inject": "enabled"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "restartPolicy": "Never"}}
        about = {"apiVersion": "batch/v1", "kind": "Job"}
        body = {**about, "metadata": {"name": job.name}, "spec": {"parallelism": 0, "template": template}}
        made = self.objects.request("POST", path_of("batch/v1", "jobs", job.namespace), body)
        owner = {**about, "name": job.name, "uid": made["metadata"]["uid"], "controller": True}
        pod = dict(injection(template, job, InjectionSettings(), (1, 30)).pod)
        pod["metadata"] |= {"name": f"{job.name}-000", "ownerReferences": [owner]}
        made = self.objects.request("POST", path_of("v1", "pods", job.namespace), pod)
        self._copy(job, made["metadata"]["uid"], self._options.pods if pods is None else pods)
        return job

    def _copy(self, job: JobRef, uid: str, pods: int) -> None:
        """Copy a pod in etcd, as the server stored it: names and uids of one length keep its encoding valid."""
        key = f"/registry/pods/{job.namespace}/{job.name}-000".encode()
        (found,) = self._etcd_answer("range", {"key": _text(key)})["kvs"]
        value, puts = base64.b64decode(found["value"]), []
        for index in range(1, pods):
            name, other = f"{job.name}-{index:03}".encode(), str(uuid.uuid4()).encode()
            copied = value.replace(f"{job.name}-000".encode(), name).replace(uid.encode(), other)
            puts.append({"requestPut": {"key": _text(key[:-3] + name[-3:]), "value": _text(copied)}})
        for first in range(0, len(puts), 100):
            self._etcd_answer("txn", {"success": puts[first : first + 100]})

    def _etcd_answer(self, what: str, body: Any) -> Any:
        request = urllib.request.Request(f"{self._etcd}/v3/kv/{what}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def fill(self) -> float:
        """Add all jobs; seconds that took."""
        began_s = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(self.add, range(self._options.jobs)))
        return time.monotonic() - began_s

    def watched(self) -> int:
        return len(
            self.objects.request("GET", path_of(API_VERSION, REPORTS.plural), labelSelector=WATCH_LABEL)["items"]
        )

    def watches(self, jobs: int) -> bool:
        return self.watched() == jobs

    def deployed(self) -> int:
        found = self.objects.request("GET", path_of("apps/v1", "deployments"), fieldSelector=f"metadata.name={NAME}")
        return len(found["items"])


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def until(true: Callable[[], object], every_s: float = 0.5) -> float:
    """Seconds until something is true."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() < began_s + PATIENCE_S, true
        time.sleep(every_s)
    return time.monotonic() - began_s


@contextlib.contextmanager
def operating(cluster: OwnCluster, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Run the operator; yield what it has taken so far."""
    operators = Operators(cluster, folder, "", InjectionSettings())
    process, began_s = operators.start("operator", everywhere=True), time.monotonic()

    def taken() -> dict[str, Any]:
        use = Use.of(process.pid)
        return {
            "seconds": round(time.monotonic() - began_s, 1),
            "cpu_s": round(use.cpu_s, 1),
            "peak_mib": round(use.peak_bytes / 2**20),
        }

    with contextlib.closing(operators), ended(process):
        yield taken


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if not options.programs:
        raise SystemExit(f"name a folder with kube-apiserver and etcd: --programs, or {OWN}")
    found: dict[str, Any] = {"jobs": options.jobs, "pods": options.pods, "namespaces": options.namespaces}
    with tempfile.TemporaryDirectory() as name, contextlib.closing(OwnCluster(Path(options.programs))) as cluster:
        folder = Path(name)
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        cluster.prepare("crds", "rbac")
        load = Load(cluster, options)
        found["filled_s"] = round(load.fill(), 1)
        say(f"operator_scale: filled, {found['filled_s']} s")
        with operating(cluster, folder) as taken:
            until(lambda: load.watched() == options.jobs and load.deployed() == min(options.namespaces, options.jobs))
            found["begun"] = taken()
            say(f"operator_scale: begun, {found['begun']}")
        with operating(cluster, folder) as taken:
            before, quiet = taken(), 0
            while quiet < 3:
                time.sleep(1.0)
                now = taken()
                quiet, before = quiet + 1 if now["cpu_s"] - before["cpu_s"] < 0.1 else 0, now
            found["again"] = now
            time.sleep(REST_S)
            rest = taken()
            found["at_rest_cores"] = round((rest["cpu_s"] - now["cpu_s"]) / (rest["seconds"] - now["seconds"]), 4)
            waits_s = list[float]()
            for number in range(options.jobs, options.jobs + options.samples):
                load.add(number, pods=1)
                waits_s.append(until(partial(load.watches, number + 1), 0.02))
            found["new_job_s"] = {"p50": round(statistics.median(waits_s), 2), "max": round(max(waits_s), 2)}
    return found
