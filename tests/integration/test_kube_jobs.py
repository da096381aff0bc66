"""The operator and training jobs, on a real API server: a namespace's controllers come, follow, and go.

Nothing runs in such a cluster, so its pods stay as they were created; `test_kube_controllers` has a job that trains.
"""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.kube.injecting import InjectionSettings, injection
from sftriage.kube.jobs import HUB_ANNOTATION, OWNERS, JobRef, job_of
from sftriage.policy.in_force import find
from sftriage.policy.parsing import parse
from tests.integration.kube import ANY, K8S, OWN, Cluster, Operators, OwnCluster, definition_of_any, made
from tests.integration.processes import DEADLINE_S, wait_until
from tests.unit.kube.pods import TRAINERS

pytestmark = pytest.mark.skipif(ANY in os.environ, reason="a cluster in which something runs makes pods of its own")

SOON_S = 60.0
LEASE = "sftriage-system/sftriage-operator"
DEFAULTS = InjectionSettings()
OBJECTS = ("serviceaccount", "rolebinding", "configmap", "service", "networkpolicy", "secret", "deployment")


SETTINGS = InjectionSettings(image="registry.example/sftriage@sha256:12")


@pytest.fixture
def operators(server, tmp_path, namespace) -> Iterator[Operators]:
    with contextlib.closing(Operators(server, tmp_path, namespace, SETTINGS)) as found:
        yield found


class TrainingJob:
    """A Job, and the pods that its controller would make, as they come out of the webhook, or past it."""

    def __init__(
        self, server: Cluster, namespace: str, name: str = "pretraining", *, labelled: bool = True, **spec: Any
    ) -> None:
        self.server, self.ref = server, JobRef("job", name, namespace)
        container = {"name": "train", "image": "train:1", "command": ["torchrun", "train.py"]}
        labels = {"batch.kubernetes.io/job-name": name, **({"sftriage.dev/inject": "enabled"} if labelled else {})}
        spec |= {"containers": [container], "restartPolicy": "Never"}
        self._template = {"metadata": {"labels": labels}, "spec": spec}
        about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
        server.create({**about, "spec": {"parallelism": 0, "template": self._template}}, namespace)
        self.uid = server.get("job", name, namespace=namespace)["metadata"]["uid"]

    def add_pod(
        self, number: int, settings: InjectionSettings = DEFAULTS, *, injected: bool = True, hub: bool = True
    ) -> None:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.ref.name, "uid": self.uid, "controller": True}
        about = {"name": f"{self.ref.name}-{number}", "namespace": self.ref.namespace, "ownerReferences": [owner]}
        pod = {"apiVersion": "v1", "kind": "Pod", **json.loads(json.dumps(self._template))}
        pod["metadata"] |= about
        if injected:
            found = job_of(pod)
            assert found == self.ref
            pod = injection(pod, found, settings, (1, 30)).pod
            if not hub:
                # (as version 0.1.0 left it)
                del pod["metadata"]["annotations"][HUB_ANNOTATION]
        self.pod = pod
        # (a server before 1.28 does not know native sidecars, which is nothing here)
        where = ("-n", self.ref.namespace)
        self.server.kubectl("create", *where, "--validate=false", "-f", "-", text=json.dumps(pod))

    def end_pod(self, number: int, phase: str = "Succeeded") -> None:
        path = f"/api/v1/namespaces/{self.ref.namespace}/pods/{self.ref.name}-{number}"
        body = {**json.loads(self.server.kubectl("get", "--raw", path).stdout), "status": {"phase": phase}}
        self.server.kubectl("replace", "--raw", f"{path}/status", "-f", "-", text=json.dumps(body))

    def objects(self) -> dict[str, Any]:
        """Those of the controllers of its namespace."""
        found, selector = {}, "sftriage.dev/component=controller"
        for kind in OBJECTS:
            items = self.server.get(kind, "-l", selector, namespace=self.ref.namespace)["items"]
            if items:
                found[kind] = items[0]
        return found

    def policies(self) -> list[str]:
        data = self.objects().get("configmap", {}).get("data", {})
        return [parse(text, name).policy.metadata.name for name, text in sorted(data.items())]

    def report(self) -> dict[str, Any]:
        found = self.server.kubectl(
            *("get", "trep", self.ref.object_name, "-n", self.ref.namespace, "-o", "json"), check=False
        )
        return dict(json.loads(found.stdout or "{}"))

    def has_controller(self) -> bool:
        """Whether its report has the label of watched jobs, and the objects of its namespace's controllers exist."""
        labels = self.report().get("metadata", {}).get("labels", {})
        return labels.get("sftriage.dev/watch") == "true" and len(self.objects()) == len(OBJECTS)

    def condition(self, kind: str = "Injected") -> tuple[str, str]:
        conditions = self.report().get("status", {}).get("conditions", ())
        one = next((one for one in conditions if one["type"] == kind), None)
        return ("", "") if one is None else (f"{one['status']} {one['reason']}", one["message"])


OF_OTHERS = {job.system: (body, job) for body, job in reversed(TRAINERS.values()) if job.system not in ("job", "pod")}


def test_an_object_of_any_kind_owns_the_report_of_its_job(server, namespace, operators):
    """GIVEN pods of each kind, and the object that made them THEN that owns the report of its job."""
    owners = {}
    for system, (version, kind) in OWNERS.items():
        if system in OF_OTHERS:
            server.kubectl("apply", "-f", "-", text=json.dumps(definition_of_any(version, kind)))
    server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    for body, job in OF_OTHERS.values():
        ref = JobRef(job.system, job.name, namespace)
        version, kind, name = ref.owner or ("", "", "")
        server.create({"apiVersion": version, "kind": kind, "metadata": {"name": name}}, namespace)
        pod = injection(body, ref, SETTINGS, (1, 30)).pod
        server.kubectl("create", "-n", namespace, "--validate=false", "-f", "-", text=json.dumps(pod))
        owners[ref.object_name] = [(version, kind, name)]
    operators.start()

    def found() -> dict[str, Any]:
        reports = [one["metadata"] for one in server.get("trep", namespace=namespace)["items"]]
        return {
            one["name"]: [(by["apiVersion"], by["kind"], by["name"]) for by in one.get("ownerReferences", ())]
            for one in reports
        }

    wait_until(lambda: found() == owners, SOON_S)


def policy(name: str) -> dict[str, Any]:
    default = yaml.safe_load(find("default").read_text())
    return {**default, "metadata": {"name": name}, "spec": {"rules": [{"name": f"rule-{name}", "match": {}}]}}


def test_controllers_follow_policies_and_go_with_the_pods(server, namespace, operators):
    operators.start()
    # WHEN a job's pods come THEN its namespace has controllers, and its report belongs to the job
    job = TrainingJob(server, namespace)
    for number in range(2):
        job.add_pod(number)
    wait_until(job.has_controller, SOON_S)
    found = job.objects()
    assert [(one["kind"], one["uid"]) for one in job.report()["metadata"]["ownerReferences"]] == [("Job", job.uid)]
    (container,) = found["deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/sftriage@sha256:12"
    assert container["command"][:5] == ["sftriage", "kube", "controller", "--namespace", namespace]
    assert found["rolebinding"]["roleRef"]["name"] == "sftriage-controller"
    # AND it has the policy that ships, for there is no other
    assert job.policies() == ["default"]
    # AND the report says that sftriage is in all of its pods
    wait_until(lambda: job.condition()[0] == "True Injected", SOON_S)
    # WHEN policies come, change and go THEN it has those that are in force, the oldest first; nothing else changes
    password, template = found["secret"]["data"], found["deployment"]["spec"]["template"]
    server.create(policy("b"), namespace)
    wait_until(lambda: job.policies() == ["b"], SOON_S)
    server.let_age("triagepolicies", namespace)
    server.create(policy("a"), namespace)
    wait_until(lambda: job.policies() == ["b", "a"], SOON_S)
    server.kubectl("delete", "tpol", "b", "-n", namespace)
    wait_until(lambda: job.policies() == ["a"], SOON_S)
    found = job.objects()
    assert (found["secret"]["data"], found["deployment"]["spec"]["template"]) == (password, template)
    # WHEN somebody deletes its Deployment THEN it is there again
    server.kubectl("delete", "deployment", "sftriage", "-n", namespace, "--wait=true")
    wait_until(lambda: "deployment" in job.objects(), SOON_S)
    # WHEN there is another job, and the pods of the first one end or are deleted THEN only that has no controller
    other = TrainingJob(server, namespace, "other")
    other.add_pod(0)
    wait_until(other.has_controller, SOON_S)
    job.end_pod(0)
    server.kubectl("delete", "pod", "pretraining-1", "-n", namespace, "--force")
    wait_until(lambda: not job.has_controller(), SOON_S)
    assert other.has_controller()
    # WHEN the last pod of the namespace has ended THEN all of it goes
    other.end_pod(0)
    wait_until(lambda: not job.objects(), SOON_S)
    assert "Traceback" not in operators.said()


def test_a_job_of_an_earlier_version_keeps_its_controller(server, namespace, operators):
    """GIVEN a job with a controller of its own, from before an upgrade THEN it stays, until its pods are gone"""
    job = TrainingJob(server, namespace)
    job.add_pod(0, hub=False)
    about = {"labels": {"sftriage.dev/job": job.ref.object_name, "app.kubernetes.io/component": "controller"}}
    about |= {"name": job.ref.object_name, "annotations": {"sftriage.dev/job-id": job.ref.job_id}}
    template = {"metadata": {"labels": about["labels"]}, "spec": {"containers": [{"name": "c", "image": "old:1"}]}}
    spec = {"selector": {"matchLabels": about["labels"]}, "template": template}
    server.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": spec}, namespace)
    server.create({"apiVersion": "v1", "kind": "Secret", "metadata": about}, namespace)

    def own() -> str:
        return server.kubectl("get", "deploy,secret", "-n", namespace, "-l", "sftriage.dev/job", "-o", "name").stdout

    operators.start()
    wait_until(lambda: job.condition()[0] == "True Injected", SOON_S)
    assert len(own().split()) == 2
    assert not job.objects()
    # WHEN a pod of this version comes, too THEN there is a controller that finds it
    job.add_pod(1)
    wait_until(job.has_controller, SOON_S)
    assert len(own().split()) == 2
    # WHEN the old one is gone THEN so is its controller
    server.kubectl("delete", "pod", "pretraining-0", "-n", namespace, "--force")
    wait_until(lambda: not own(), SOON_S)
    assert job.has_controller()
    # WHEN there is an old pod alone, whose controller is gone THEN its report says what to do
    job.add_pod(2, hub=False)
    server.kubectl("delete", "pod", "pretraining-1", "-n", namespace, "--force")
    wait_until(lambda: job.condition("Watched")[0] == "False OldPods", SOON_S)


def test_labelled_but_not_injected_pods_are_reported(server, namespace, operators):
    """GIVEN a webhook that was away THEN the report names the pods that it missed, until they are others."""
    operators.start()
    job = TrainingJob(server, namespace)
    job.add_pod(0, injected=False)
    job.add_pod(1, injected=False)
    wait_until(lambda: job.condition()[0] == "False NotInjected", SOON_S)
    assert "2 of its 2 pods" in job.condition()[1]
    assert "pretraining-0, pretraining-1" in job.condition()[1]
    # THEN nothing is started that would watch nobody
    assert not job.objects()
    # WHEN one of them is made anew
    server.kubectl("delete", "pod", "pretraining-1", "-n", namespace, "--force")
    job.add_pod(1)
    wait_until(lambda: job.condition()[0] == "False PartlyInjected", SOON_S)
    wait_until(job.has_controller, SOON_S)
    server.kubectl("delete", "pod", "pretraining-0", "-n", namespace, "--force")
    wait_until(lambda: job.condition()[0] == "True Injected", SOON_S)


def test_missed_pods_of_a_labelled_namespace_are_reported(server, namespace, operators):
    """GIVEN a job without a label WHEN its namespace gets one THEN its pods that lack sftriage are said."""
    operators.start(everywhere=True)
    job, other = TrainingJob(server, namespace, labelled=False), TrainingJob(server, namespace, "other")
    job.add_pod(0, injected=False)
    other.add_pod(0, injected=False)
    wait_until(lambda: other.condition()[0] == "False NotInjected", SOON_S)
    assert job.condition() == ("", "")
    server.kubectl("label", "namespace", namespace, "sftriage.dev/inject=enabled")
    wait_until(lambda: job.condition()[0] == "False NotInjected", SOON_S)
    job.add_pod(1)
    wait_until(lambda: job.condition()[0] == "False PartlyInjected", SOON_S)
    # WHEN the namespace is labelled no more THEN nobody misses anything there
    server.kubectl("label", "namespace", namespace, "sftriage.dev/inject-")
    wait_until(lambda: job.condition()[0] == "True Injected", SOON_S)


def test_the_operator_catches_up_after_downtime(server, namespace, operators):
    process = operators.start()
    gone, stays = TrainingJob(server, namespace, "gone"), TrainingJob(server, namespace, "stays")
    for job in (gone, stays):
        job.add_pod(0)
    wait_until(lambda: gone.has_controller() and stays.has_controller(), SOON_S)
    process.kill()
    process.wait(DEADLINE_S)
    server.kubectl("delete", "pod", "gone-0", "-n", namespace, "--force")
    server.create(policy("new"), namespace)
    late = TrainingJob(server, namespace, "late")
    late.add_pod(0)
    operators.start("second")
    wait_until(lambda: late.has_controller() and not gone.has_controller(), SOON_S)
    wait_until(lambda: stays.policies() == ["new"], SOON_S)


def test_old_reports_of_plain_pods_are_removed(server, namespace, operators):
    """GIVEN reports without news WHEN an operator looks THEN of those that no object owns none stays"""
    job = TrainingJob(server, namespace)
    job.add_pod(0)
    plain, owner = JobRef("pod", "plain", namespace), [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "7d"}]
    for one, owners in ((plain, []), (job.ref, []), (JobRef("job", "gone", namespace), owner)):
        server.create(one.report(owners), namespace)
    operators.start("operator", "--report-days", "0")

    def left() -> set[str]:
        return {one["spec"]["job"] for one in server.get("triagereports", namespace=namespace)["items"]}

    # (a server that collects what has no owner any more may be quicker)
    wait_until(lambda: left() - {"gone"} == {job.ref.name}, SOON_S)
    wait_until(lambda: job.condition()[0] == "True Injected", SOON_S)


def test_a_person_s_capture_reaches_its_job_s_controller(server, namespace, operators):
    """GIVEN a capture of a job that there is, and of one that comes later THEN each has the label of its job."""
    operators.start()
    job = TrainingJob(server, namespace)
    job.add_pod(0)
    for name in ("pretraining", "later"):
        server.create(made("TraceCapture", name, {"job": name, "rank": 0, "reason": "why?"}), namespace)

    def label(name: str) -> str:
        labels = server.get("tracecapture", name, namespace=namespace)["metadata"].get("labels", {})
        return str(labels.get("sftriage.dev/job", ""))

    wait_until(lambda: label("pretraining") == job.ref.object_name, SOON_S)
    assert label("later") == ""
    later = TrainingJob(server, namespace, "later")
    later.add_pod(0)
    wait_until(lambda: label("later") == later.ref.object_name, SOON_S)


def test_a_second_operator_takes_over(server, namespace, operators):
    # GIVEN two operators with one lease
    first = operators.start("first", "--lease", LEASE)
    wait_until(lambda: "leading as" in operators.said("first"), SOON_S)
    second = operators.start("second", "--lease", LEASE)
    wait_until(lambda: "waiting for the lease" in operators.said("second"), SOON_S)
    job = TrainingJob(server, namespace)
    job.add_pod(0)
    wait_until(job.has_controller, SOON_S)
    assert "controller" not in operators.said("second")
    # WHEN the one that works is killed THEN the other one does
    first.kill()
    first.wait(DEADLINE_S)
    other = TrainingJob(server, namespace, "other")
    other.add_pod(0)
    wait_until(other.has_controller, SOON_S)
    assert "other: has a controller" in operators.said("second")
    # WHEN one ends that is told to THEN nobody waits for its lease to go by itself
    third = operators.start("third", "--lease", LEASE)
    wait_until(lambda: "waiting for the lease" in operators.said("third"), SOON_S)
    second.terminate()
    assert second.wait(DEADLINE_S) == 0, operators.said("second")
    namespaced, _, name = LEASE.partition("/")
    holder = server.get("lease", name, namespace=namespaced)["spec"]["holderIdentity"]
    assert holder in ("", *operators.said("third").split())
    wait_until(lambda: "leading as" in operators.said("third"), SOON_S)
    # WHEN its lease is taken THEN it ends
    lease = {"spec": {"holderIdentity": "somebody-else", "renewTime": "2100-01-01T00:00:00.000000Z"}}
    server.kubectl("patch", "lease", name, "-n", namespaced, "--type=merge", "-p", json.dumps(lease))
    assert third.wait(DEADLINE_S) == 1
    assert "the operator has stopped: another replica leads" in operators.said("third")


@pytest.mark.skipif(OWN not in os.environ, reason="a cluster that others use is not uninstalled from")
def test_uninstalling_as_documented_leaves_nothing_behind(tmp_path):
    """GIVEN an installation with a job and a capture WHEN the documented lines run, while the operator still does, THEN
    nothing of sftriage is left but its namespace, which has an end."""
    page = (K8S.parent / "docs" / "kubernetes.md").read_text()
    (lines,) = re.findall(r"### Uninstall\n.*?```\n(.*?)```", page, re.DOTALL)
    with contextlib.ExitStack() as held:
        server = held.enter_context(contextlib.closing(OwnCluster(Path(os.environ[OWN]))))
        server.kubectl("apply", "-k", str(K8S), check=False)  # (an old server has no policy/v1, and takes the rest)
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        server.kubectl("create", "namespace", "ml")
        # (without a webhook that answers there are no captures)
        server.kubectl("delete", "mutatingwebhookconfiguration", "sftriage")
        server.create(made("TraceCapture", "c", {"job": "pretraining", "rank": 0, "reason": "why?"}), "ml")
        server.kubectl("apply", "-f", str(K8S / "webhook" / "webhook.yaml"))
        operators = held.enter_context(contextlib.closing(Operators(server, tmp_path, "ml", SETTINGS)))
        operators.start(everywhere=True)
        job = TrainingJob(server, "ml")
        job.add_pod(0)
        wait_until(job.has_controller, SOON_S)
        wait_until(lambda: server.get("tcap", "c", namespace="ml")["metadata"].get("finalizers"), SOON_S)
        # (without a controller of namespaces, theirs never end)
        script = lines.replace("delete --ignore-not-found", "delete --wait=false --ignore-not-found")
        about = {"env": {**os.environ, "KUBECONFIG": str(server.kubeconfig)}, "cwd": K8S.parent}
        done = subprocess.run(["bash", "-c", script], **about, capture_output=True, text=True, timeout=120, check=False)
        wait_until(lambda: not server.kubectl("get", "crd", "-o", "name").stdout, SOON_S)
        kinds = ",".join(server.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split())
        found = json.loads(server.kubectl("get", kinds, "-A", "-o", "json").stdout)["items"]
        left = {
            f"{one['kind']} {one['metadata']['name']}" for one in found if "sftriage" in json.dumps(one["metadata"])
        }
        assert left == {"Namespace sftriage-system", "Job pretraining", "Pod pretraining-0"}, done.stderr
