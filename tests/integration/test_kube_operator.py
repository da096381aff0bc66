"""The operator against a real API server, with the rights of its own token and no more."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.policy.in_force import find
from sftriage.traces.manifest import Manifest
from sftriage.traces.remote import RemoteStore
from tests.integration.kube import ANY, K8S, OWN, Cluster, Operators, OwnCluster, captured, made
from tests.integration.processes import wait_until

DEFAULT = yaml.safe_load(find("default").read_text())
SOON_S = 60.0


@pytest.fixture
def operator(server, tmp_path, namespace) -> Iterator[Operators]:
    with contextlib.closing(Operators(server, tmp_path, namespace)) as found:
        yield found


def policy(name: str, **spec: Any) -> dict[str, Any]:
    rules = DEFAULT["spec"]["rules"][:1]
    return {**DEFAULT, "metadata": {"name": name}, "spec": {**DEFAULT["spec"], "rules": rules, **spec}}


def standing(server: Cluster, namespace: str) -> dict[str, tuple[str, ...]]:
    found = server.get("triagepolicies", namespace=namespace)["items"]
    return {
        one["metadata"]["name"]: tuple(
            f"{each['status']} {each['reason']}" for each in one.get("status", {}).get("conditions", ())
        )
        for one in found
        if one.get("status", {}).get("observedGeneration") == one["metadata"]["generation"]
    }


def becomes(server: Cluster, namespace: str, expected: dict[str, tuple[str, ...]]) -> None:
    wait_until(lambda: standing(server, namespace) == expected, SOON_S)


FINE, CONFLICT = ("True Valid", "False InForce"), ("True Valid", "True Conflicts")
INVALID = ("False Invalid", "Unknown Invalid")


def test_policies_get_conditions(server, namespace, operator):
    """GIVEN policies that are valid, or not, or not together THEN each is told so, and again when that changes."""
    server.create(policy("a"), namespace)
    with operator.running():
        becomes(server, namespace, {"a": FINE})
        # WHEN one comes that has a rule of the same name, and one that is not valid
        server.let_age("triagepolicies", namespace)
        server.create(policy("b"), namespace)
        server.create(policy("c", active={"cron": "never"}), namespace)
        becomes(server, namespace, {"a": FINE, "b": CONFLICT, "c": INVALID})
        # WHEN they are mended
        server.kubectl("delete", "triagepolicy", "a", "-n", namespace)
        patch = json.dumps(
            [
                {"op": "remove", "path": "/spec/active"},
                {"op": "replace", "path": "/spec/rules/0/name", "value": "other"},
            ]
        )
        server.kubectl("patch", "triagepolicy", "c", "-n", namespace, "--type=json", "-p", patch)
        becomes(server, namespace, {"b": FINE, "c": FINE})
    # THEN a person sees it at a glance
    columns = [line.split()[:4] for line in server.kubectl("get", "tpol", "-n", namespace).stdout.splitlines()[1:]]
    assert columns == [["b", "True", "False", "1"], ["c", "True", "False", "1"]]
    # AND nothing of the operator is left on a policy: no finalizer, no annotation
    for one in server.get("triagepolicies", namespace=namespace)["items"]:
        assert "finalizers" not in one["metadata"]
        assert "annotations" not in one["metadata"]


@pytest.mark.skipif(OWN not in os.environ or ANY in os.environ, reason="a server of others is not ended here")
def test_the_operator_survives_a_server_restart(tmp_path):
    """GIVEN a server that soon forgets WHEN it ends and comes back, and watches expire THEN nothing is missed."""
    rules, audit = tmp_path / "audit.yaml", tmp_path / "audit.log"
    rules.write_text(
        yaml.safe_dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]})
    )
    flags = ["--watch-cache=false", "--etcd-compaction-interval=1s"]
    flags += [f"--audit-policy-file={rules}", f"--audit-log-path={audit}"]
    own = OwnCluster(Path(os.environ[OWN]), *flags)
    with contextlib.closing(own), own.namespace() as namespace:
        own.prepare("crds", "rbac")
        operator = Operators(own, tmp_path, namespace)
        with operator.running("--watch-seconds", "2"):
            own.create(policy("a"), namespace)
            becomes(own, namespace, {"a": FINE})
            own.stop()
            own.start()
            own.create(policy("b", rules=[{"name": "other", "match": {}}]), namespace)
            becomes(own, namespace, {"a": FINE, "b": FINE})
            # WHEN the server has forgotten what it was when a policy changed last, so that it has to be asked anew
            lists = listed(audit)
            for number in range(3):
                own.kubectl("create", "configmap", f"c{number}", "-n", namespace)
            wait_until(lambda: listed(audit) > lists, SOON_S)
            own.create(policy("c", rules=[{"name": "third", "match": {}}]), namespace)
            becomes(own, namespace, {"a": FINE, "b": FINE, "c": FINE})


def listed(audit: Path) -> int:
    """How often whoever watches policies has asked for all of them, which it does where its watch cannot go on."""
    requests = [json.loads(line) for line in audit.read_text().splitlines() if line.endswith("}")]
    asked = [one for one in requests if one["verb"] == "list" and one["stage"] == "ResponseComplete"]
    return sum("/triagepolicies" in one["requestURI"] and one["userAgent"].startswith("kopf") for one in asked)


ALLOWED = {
    *("list triagepolicies", "watch tracecaptures", "patch tracecaptures", "create triagereports"),
    *("update triagepolicies/status", "update tracecaptures/status", "list triagereports", "create secrets"),
    *("list pods", "create deployments", "create rolebindings", "list namespaces", "patch triagereports"),
}
FORBIDDEN = {
    *("update triagepolicies", "patch triagepolicies", "delete tracecaptures", "create tracecaptures"),
    *("get secrets", "list secrets", "patch secrets", "get pods", "delete pods", "create pods"),
    *("create roles", "create clusterrolebindings", "create events", "list customresourcedefinitions"),
    "update namespaces",
}


def test_the_operator_has_exactly_the_rights_that_it_needs(server, tmp_path):
    """GIVEN the operator's own token THEN it reads no secrets, changes no policies, gives only our rights."""
    mine = Cluster(server.as_account(tmp_path))
    found: dict[str, set[str]] = {"yes": set(), "no": set()}
    for what in ALLOWED | FORBIDDEN:
        verb, resource = what.split()
        name, _, sub = resource.partition("/")
        group = f"{name}.sftriage.dev" if name.startswith("tr") else name
        asked = ["auth", "can-i", verb, group, "--all-namespaces", *([f"--subresource={sub}"] if sub else [])]
        found[mine.kubectl(*asked, check=False).stdout.strip()].add(what)
    assert found == {"yes": ALLOWED, "no": FORBIDDEN}
    # AND a role that is not its own to give it gives to nobody
    with server.namespace() as namespace:
        role = ["create", "rolebinding", "mine", "-n", namespace, "--serviceaccount=default:default"]
        refused = mine.kubectl(*role, "--clusterrole=cluster-admin", check=False)
        assert "attempting to grant RBAC permissions not currently held" in refused.stderr
        mine.kubectl(*role, "--clusterrole=sftriage-controller")


def test_invalid_credentials_end_the_operator(server, tmp_path):
    config = yaml.safe_load(server.as_account(tmp_path).read_text())
    config["users"][0]["user"] = {"token": "nobody's"}
    kubeconfig = tmp_path / "kubeconfig-nobody"
    kubeconfig.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "sftriage", "operator"],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "sftriage: the operator has stopped: the cluster rejected its credentials\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_replicas_are_ready_while_the_server_answers_them(server, namespace, operator, tmp_path):
    """GIVEN two operators and one whose settings are wrong THEN by the manifest's probe the leader and the waiting one
    are ready, and the third never is."""
    deployment, _ = yaml.safe_load_all((K8S / "operator" / "deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    *shell, probe = container["readinessProbe"]["exec"]["command"]
    place = Path(container["command"][container["command"].index("--ready-file") + 1])
    looked_for = f"{place.parent} -name {place.name}"
    assert looked_for in probe

    def ready(file: Path) -> bool:
        mine = probe.replace(looked_for, f"{file.parent} -name {file.name}")
        return subprocess.run([*shell, mine], check=False).returncode == 0

    # (its account may have this lease alone)
    lease = "--lease", "sftriage-system/sftriage-operator", "--ready-file"
    files = [tmp_path / f"{name}-ready" for name in ("leads", "waits", "broken")]
    for file in files[:2]:
        operator.start(file.name, *lease, str(file))
        wait_until(lambda file=file: ready(file), SOON_S)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("imag: x")
    assert operator.start("broken", *lease, str(files[2]), "--settings", str(wrong)).wait(SOON_S) == 2
    assert "wrong.yaml: imag: " in operator.said("broken")
    assert not ready(files[2])
    # WHEN the server's last answer is two minutes old THEN a replica is not ready, until the server answers again
    for file in (files[2], *files[:2]):
        file.touch()
        os.utime(file, (time.time() - 120,) * 2)
    assert not ready(files[2])
    wait_until(lambda: ready(files[0]) and ready(files[1]), SOON_S)


def test_captures_are_validated_at_once(server, namespace, operator):
    good = {"job": "resnet", "rank": 2, "reason": "why?"}
    server.create(made("TraceCapture", "good", good), namespace)
    server.create(made("TraceCapture", "bad", {**good, "profiler": "nsys", "torch": {}}), namespace)
    with operator.running():
        server.kubectl(
            *("wait", "--for=condition=Accepted=False", "tracecapture/bad", "-n", namespace, f"--timeout={SOON_S:.0f}s")
        )
        server.kubectl(
            *("wait", "--for=condition=Accepted=Unknown", "tracecapture/good", "-n", namespace, "--timeout=60s")
        )
    shown = [line.split()[:4] for line in server.kubectl("get", "tcap", "-n", namespace).stdout.splitlines()]
    assert shown[1:] == [["bad", "resnet", "2", "refused"], ["good", "resnet", "2", "requested"]]
    message = server.get("tracecapture", "bad", namespace=namespace)["status"]["conditions"][0]["message"]
    assert "options of torch have no effect with the profiler nsys" in message


def test_kube_policy_lists_policies_with_reasons(server, namespace, operator, laptop):
    """GIVEN a policy in force, one that conflicts, and one that nobody has looked at THEN each is told as it is."""
    empty = laptop("policy")
    assert (empty.stdout, empty.stderr) == ("", f"sftriage: no policy in namespace {namespace}\n")
    server.create(policy("a"), namespace)
    server.create(policy("b"), namespace)
    with operator.running():
        becomes(server, namespace, {"a": FINE, "b": CONFLICT})
    server.create(policy("c"), namespace)
    table = laptop("policy")
    lines = [line.split("│") for line in table.stdout.splitlines() if line.startswith("│")]
    assert [[one.strip() for one in line[2:5]] for line in lines if line[2].strip()] == [
        ["a", "1", "yes"],
        ["b", "1", "no"],
        ["c", "", "unknown"],
    ]
    assert "a second rule named 'slow-rank'; the first is spec.rules[0] of a" in table.stdout
    assert "some of them were not checked since they changed" in table.stderr
    rows = laptop.json("policy")
    assert [(one["policy"], one["accepted"]["reason"], one["conflicted"]["reason"]) for one in rows] == [
        ("a", "Valid", "InForce"),
        ("b", "Valid", "Conflicts"),
        ("c", "NotLookedAt", "NotLookedAt"),
    ]


def with_finalizer(server: Cluster, namespace: str, store: RemoteStore, manifest: Manifest) -> str:
    name = captured(server, namespace, store, manifest)
    finalizers = wait_until(
        lambda: server.get("tracecapture", name, namespace=namespace)["metadata"].get("finalizers"), SOON_S
    )
    assert finalizers == ["sftriage.dev/trace"]
    return name


def gone(server: Cluster, namespace: str) -> Callable[[], bool]:
    return lambda: not server.get("tracecaptures", namespace=namespace)["items"]


def test_a_trace_in_a_foreign_store_stays_and_is_reported(server, namespace, operator, stored):
    """GIVEN an operator that was given no store THEN the object waits, says why, and goes once somebody is given it."""
    with operator.running():
        name = with_finalizer(server, namespace, *stored)
        server.kubectl("delete", "tracecapture", name, "-n", namespace, "--wait=false")

        def said() -> bool:
            status = server.get("tracecapture", name, namespace=namespace)["status"]
            return any("is not a store of this operator" in one["message"] for one in status["conditions"])

        wait_until(said, SOON_S)
    assert len(stored[0].ids()) == 1
    with operator.running("--store", stored[0].place):
        wait_until(gone(server, namespace), SOON_S)
    assert stored[0].ids() == frozenset()
