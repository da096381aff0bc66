"""`sftriage kube doctor` against a real API server: what is missing is found, and again as it is mended."""

import base64
import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from sftriage.kube.webhook import issued
from tests.integration.kube import K8S, Laptop

LABELS = {"batch.kubernetes.io/job-name": "train"}


def trainer(name: str, **labels: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "main", "image": "x"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {**LABELS, **labels}}, "spec": spec}


def wrong(laptop: Laptop) -> dict[str, str]:
    return {one["code"]: one["says"] for one in laptop.json("doctor", code=1) if one["state"] == "wrong"}


def test_doctor_finds_what_is_missing(server, namespace, laptop):
    """GIVEN a cluster in which nothing is installed but definitions THEN each thing that is missing is said in turn."""
    found = wrong(laptop)
    assert {"operator", "webhook", "webhook_configuration"} <= set(found)
    # WHEN a job trains without a label, and then with one, put on it while it runs
    server.create(trainer("train-0"), namespace)
    assert wrong(laptop)["label"].startswith("train-0 trains without the label")
    server.let_age("pods", namespace)
    server.kubectl("label", "pod", "train-0", "-n", namespace, "sftriage.dev/inject=enabled")
    found = wrong(laptop)
    assert "label" not in found
    assert found["injected"].startswith("train-0: labelled, but not injected")
    # AND a policy that nobody looks at is too young to complain about
    assert "policies" not in found
    server.kubectl("create", "quota", "small", "-n", namespace, "--hard=pods=1")
    table = laptop("doctor", code=1).stdout
    assert "do: recreate the pods" in table or "do: see above" in table


WEBHOOK = ("mutatingwebhookconfiguration", "sftriage")


def signed(days: int) -> dict[str, str]:
    """A certificate that is good for some days, from ten days ago on, and its authority, as objects have them."""
    made = issued(["webhook"], datetime.now(timezone.utc) - timedelta(days=10), days)
    return {name: base64.b64encode(content).decode() for name, content in made.items()}


@pytest.fixture
def installed(server) -> Iterator[None]:
    """All of sftriage, as `kubectl apply -k k8s/` makes it, on a server that runs no pods."""
    # (an old server does not know the versions of CronJob and PodDisruptionBudget, and takes the rest)
    done = server.kubectl("apply", "-k", str(K8S), check=False)
    assert done.stderr.count("no matches for kind") == done.stderr.count("resource mapping not found")
    try:
        yield
    finally:
        # (definitions and rights stay: other tests have them too)
        server.kubectl("delete", *WEBHOOK)
        server.kubectl("delete", "deployments,secrets", "--all", "-n", "sftriage-system")


def test_doctor_examines_a_broken_installation(server, namespace, laptop, installed):
    """GIVEN all of it installed, and nothing running THEN what is missing is found, and each again as it is mended."""
    found = wrong(laptop)
    assert "has no caBundle (pods.sftriage.dev" in found["ca_bundle"]
    assert "the webhook is not running" in found["webhook"]
    assert "has no ready pod" in found["webhook_service"]
    assert "operator_rights" not in found
    for days, says in ((9, "expired at"), (12, "expires in 4"), (400, "")):
        made_of = signed(days)
        bundle = [
            {"op": "add", "path": f"/webhooks/{number}/clientConfig/caBundle", "value": made_of["ca.crt"]}
            for number in range(len(server.get(*WEBHOOK, namespace="default")["webhooks"]))
        ]
        server.kubectl("patch", *WEBHOOK, "--type=json", "-p", json.dumps(bundle))
        patch = json.dumps({"data": {"tls.crt": made_of["tls.crt"], "tls.key": ""}})
        server.kubectl("patch", "secret", "sftriage-webhook-tls", "-n", "sftriage-system", "--type=merge", "-p", patch)
        found = wrong(laptop)
        assert "ca_bundle" not in found
        assert says in found.get("certificate", "")
        assert bool(says) == ("certificate" in found)
    # WHEN the certificate is one of somebody else
    patch = json.dumps({"data": {"tls.crt": signed(400)["tls.crt"]}})
    server.kubectl("patch", "secret", "sftriage-webhook-tls", "-n", "sftriage-system", "--type=merge", "-p", patch)
    assert "not signed by an authority" in wrong(laptop)["certificate"]


def test_doctor_reports_missing_rights_as_unknown(server, namespace, laptop, tmp_path):
    """GIVEN a person without rights THEN that is said, and what they may not look at is not called wrong."""
    server.kubectl("apply", "-f", str(K8S / "rbac"))
    as_operator = server.as_account(tmp_path)
    findings = Laptop(as_operator, laptop.home, namespace).json("doctor", code=1)
    states = {one["code"]: one["state"] for one in findings}
    assert states["rights"] == "wrong"
    assert states["webhooks"] == "unknown"
    assert "create tracecaptures" in next(one["says"] for one in findings if one["code"] == "rights")


def test_doctor_finds_an_operator_in_any_namespace(server, namespace, laptop, tmp_path, request):
    """GIVEN sftriage in a namespace of its owner's choosing, as a chart has it, THEN it and its rights are found."""
    request.addfinalizer(lambda: server.prepare("rbac"))
    with server.namespace() as chosen:
        for file in ("rbac/operator.yaml", "operator/deployment.yaml", "webhook/deployment.yaml"):
            text = (K8S / file).read_text().replace("sftriage-system", chosen)
            # (an old server does not know disruption budgets, and takes the rest)
            server.kubectl("apply", "-f", "-", text=text, check=False)
        found = wrong(laptop)
        assert found["operator"].startswith("the operator is not running")
        assert "operator_rights" not in found
        # WHEN the server is asked of a namespace in which it is not
        elsewhere = laptop.json("doctor", "--operator-namespace", namespace, code=1)
        assert ("operator", "wrong") in {(one["code"], one["state"]) for one in elsewhere}
        # WHEN somebody asks who may not look at all namespaces THEN it may be elsewhere, or is where they say
        server.kubectl("create", "serviceaccount", "jane", "-n", chosen)
        server.kubectl("create", "role", "jane", "-n", chosen, "--verb=list", "--resource=deployments.apps")
        server.kubectl("create", "rolebinding", "jane", "-n", chosen, "--role=jane", f"--serviceaccount={chosen}:jane")
        jane = Laptop(server.as_account(tmp_path, "jane", chosen), laptop.home, namespace)
        for more, state in (((), "unknown"), (("--operator-namespace", chosen), "wrong")):
            findings = jane.json("doctor", *more, code=1)
            assert next(one["state"] for one in findings if one["code"] == "operator") == state
