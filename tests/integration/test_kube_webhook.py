"""The webhook against a real API server: asked over TLS, with the rights of its own token and no more."""

import base64
import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.kube.injecting import SITE
from sftriage.kube.webhook import issued
from tests.integration.kube import K8S, Cluster, made
from tests.integration.processes import ended, free_port, wait_until
from tests.unit.kube.pods import JOBS, pod

SOON_S = 60.0
HOST = "127.0.0.1"
CAPTURE = made("TraceCapture", "look", {"job": "resnet", "rank": 3, "reason": "why", "profiler": "stacks"})


class Webhook:
    """`sftriage webhook serve` on this machine, and the API server told to ask it."""

    def __init__(self, server: Cluster, folder: Path) -> None:
        self.server, self.certs, self._folder = server, folder / "certs", folder
        self.certs.mkdir()
        self.port = free_port()
        self._environment = {**os.environ, "KUBECONFIG": str(server.as_account(folder, "sftriage-webhook"))}

    def register(self) -> None:
        """Have the API server ask it: by the configuration as it is, but for where, and trust its certificate alone."""
        made = issued([HOST], datetime.now(timezone.utc))
        for name, content in made.items():
            (self.certs / name).write_bytes(content)
        configuration = yaml.safe_load((K8S / "webhook" / "webhook.yaml").read_text())
        bundle = base64.b64encode(made["ca.crt"]).decode()
        for one in configuration["webhooks"]:
            one["clientConfig"] = {"url": f"https://{HOST}:{self.port}/mutate", "caBundle": bundle}
        self.server.kubectl("apply", "-f", "-", text=json.dumps(configuration))

    @contextlib.contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "sftriage", "webhook", "serve", "--cert", str(self.certs), "--host", HOST]
        log = self._folder / "webhook.log"
        with (
            log.open("ab") as out,
            subprocess.Popen(
                [*command, "--port", str(self.port), *arguments], stdout=out, stderr=out, env=self._environment
            ) as process,
            ended(process),
        ):
            wait_until(lambda: process.poll() is not None or self._answers(), SOON_S)
            assert process.poll() is None, log.read_text()
            yield process

    def _answers(self) -> bool:
        asks = f"https://{HOST}:{self.port}/readyz"
        context = ssl._create_unverified_context()
        with contextlib.suppress(OSError), urllib.request.urlopen(asks, timeout=5, context=context) as found:
            return bool(found.read() == b"ok")
        return False


@pytest.fixture
def webhook(server, tmp_path) -> Iterator[Webhook]:
    found = Webhook(server, tmp_path)
    found.register()
    yield found
    server.kubectl("delete", "mutatingwebhookconfiguration", "sftriage")


def created(server: Cluster, body: Any, namespace: str, *options: str) -> tuple[dict[str, Any], str]:
    """A pod as the server has it, and what kubectl warns of."""
    done = server.kubectl("create", *options, "-n", namespace, "-o", "json", "-f", "-", text=json.dumps(body))
    return json.loads(done.stdout), done.stderr


def asked(server: Cluster, namespace: str) -> None:
    # (the configuration takes a moment to be known to the server: until then pods are made as they are)
    def injected() -> bool:
        body = pod({"sftriage.dev/job-name": "probe"}, name="probe")
        found, said = created(server, body, namespace, "--dry-run=server")
        return "initContainers" in found["spec"] or "sftriage" in said

    wait_until(injected, SOON_S)


def test_a_labelled_namespace_injects_the_pods_of_every_kind_of_job(server, namespace, webhook):
    """GIVEN pods as their controllers make them WHEN the server creates them THEN it injects those of jobs, once."""
    server.kubectl("label", "namespace", namespace, "sftriage.dev/inject=enabled")
    with webhook.running("--server-version", "1.31"):
        asked(server, namespace)
        for name, (body, expected) in JOBS.items():
            # (a server of 1.20 drops what it does not know, such as scheduling gates)
            found, said = created(server, body, namespace, "--dry-run=server", "--validate=false")
            ours = [one["name"] for one in found["spec"].get("initContainers", ()) if "sftriage" in one["name"]]
            if expected is None:
                assert (ours, said) == ([], ""), name
                continue
            assert ours == ["sftriage-carry", "sftriage-agent"], name
            assert found["metadata"]["annotations"]["sftriage.dev/job-id"] == f"{namespace}/{expected}"
            assert SITE in [one.get("value") for one in found["spec"]["containers"][0]["env"]]
            # AND what came out goes in again, and stays as it is
            kept = {of: value for of, value in found["metadata"].items() if of in body["metadata"]}
            again = {**body, "metadata": {**kept, "labels": found["metadata"]["labels"]}, "spec": found["spec"]}
            twice, _ = created(server, again, namespace, "--dry-run=server")
            assert twice["spec"] == found["spec"], name


def test_a_label_of_a_pod_decides_before_that_of_its_namespace(server, namespace, webhook):
    server.kubectl("label", "namespace", namespace, "sftriage.dev/inject=enabled")
    with webhook.running("--server-version", "1.31"):
        asked(server, namespace)
        out = pod({"job-name": "quiet", "sftriage.dev/inject": "disabled"}, name="out")
        found, said = created(server, out, namespace, "--dry-run=server")
        assert ("initContainers" in found["spec"], said) == (False, "")
        # AND a person who labels a pod of no job reads why nothing happens
        web = pod({"app": "web"}, name="web", owner="ReplicaSet")
        found, said = created(server, web, namespace, "--dry-run=server")
        assert "initContainers" not in found["spec"]
        assert "sftriage: not injected: its labels name no known training job" in said


def test_an_old_cluster_s_pods_stay_unchanged_with_a_warning(server, namespace, webhook):
    """GIVEN this server, should it be old WHEN the webhook asks it for its version THEN no pod is injected."""
    told = json.loads(server.kubectl("version", "-o", "json").stdout)["serverVersion"]
    if (int(told["major"]), int(told["minor"].rstrip("+"))) >= (1, 29):
        pytest.skip("this server has sidecars that end with their pod")
    with webhook.running():
        asked(server, namespace)
        found, said = created(server, pod({"job-name": "resnet"}), namespace)
        assert "initContainers" not in found["spec"]
        assert f"Warning: sftriage: not injected: Kubernetes 1.{told['minor'].rstrip('+')} has no sidecars" in said


def test_without_the_webhook_pods_start_and_captures_do_not(server, namespace, webhook):
    """GIVEN a webhook that nobody runs THEN a pod is made as it is; and no capture, for nobody says who asks for it."""
    # (once the server knows of the configuration)
    wait_until(
        lambda: server.create(CAPTURE, namespace, check=False).returncode != 0 or _gone(server, namespace), SOON_S
    )
    found, said = created(server, pod({"job-name": "resnet"}), namespace)
    assert "initContainers" not in found["spec"]
    assert said == ""


def _gone(server: Cluster, namespace: str) -> bool:
    server.kubectl("delete", "tcap", "look", "-n", namespace)
    return False


def test_a_new_certificate_needs_no_restart(server, namespace, webhook):
    with webhook.running("--server-version", "1.31"):
        asked(server, namespace)
        created(server, pod({"job-name": "resnet"}), namespace)
        # WHEN another authority signs another certificate, and the API server trusts that one alone
        webhook.register()
        # THEN the next handshake has it
        asked(server, namespace)
        found, _ = created(server, pod({"job-name": "resnet"}), namespace)
        assert found["metadata"]["annotations"]["sftriage.dev/status"] == "injected"


def test_the_requester_of_a_capture_is_the_server_s_user(server, namespace, webhook):
    with webhook.running("--server-version", "1.31"):
        asked(server, namespace)
        claims = {**CAPTURE, "spec": {**CAPTURE["spec"], "requested_by": {"username": "boss", "uid": "1"}}}
        server.create(claims, namespace)
        by = server.get("tcap", "look", namespace=namespace)["spec"]["requested_by"]
        me = "admin" if hasattr(server, "port") else by["username"]
        assert by["username"] == me != "boss"
        # AND nobody can change it afterwards
        patch = json.dumps({"spec": {"requested_by": {"username": "boss"}, "reason": "another"}})
        server.kubectl("patch", "tcap", "look", "-n", namespace, "--type=merge", "-p", patch)
        spec = server.get("tcap", "look", namespace=namespace)["spec"]
        assert (spec["requested_by"], spec["reason"]) == (by, "another")


def test_the_certificate_needs_rights_on_two_objects_only(server, tmp_path):
    """GIVEN the manifests as they are WHEN one is made THEN all webhooks trust it; a second time none is."""
    server.prepare("webhook/webhook.yaml", "certificates/rbac.yaml")
    environment = {**os.environ, "KUBECONFIG": str(server.as_account(tmp_path, "sftriage-certificates"))}

    def run(*options: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "sftriage", "webhook", "certificates", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SOON_S, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    try:
        assert "wrote a new certificate to the Secret" in run()
        data = server.get("secret", "sftriage-webhook-tls", namespace="sftriage-system")["data"]
        webhooks = server.get("mutatingwebhookconfiguration", "sftriage", namespace="default")["webhooks"]
        assert {one["clientConfig"]["caBundle"] for one in webhooks} == {data["ca.crt"]}
        assert len(webhooks) == 4
        assert "the certificate is valid" in run()
        assert server.get("secret", "sftriage-webhook-tls", namespace="sftriage-system")["data"] == data
        # WHEN the manifests are applied anew, which may take the trust away THEN the running one restores it
        command = [sys.executable, "-m", "sftriage", "webhook", "certificates", "--repeat-hours", "0.001"]
        with subprocess.Popen(command, env=environment) as running, ended(running):
            server.kubectl("replace", "-f", str(K8S / "webhook" / "webhook.yaml"))

            def trusted() -> bool:
                found = server.get("mutatingwebhookconfiguration", "sftriage", namespace="default")["webhooks"]
                return {one["clientConfig"].get("caBundle") for one in found} == {data["ca.crt"]}

            wait_until(trusted, SOON_S)
            running.terminate()
            assert running.wait(SOON_S) == 0
        # AND one for a Service of another name
        assert "wrote a new certificate to the Secret" in run("--service", "hook")
    finally:
        server.kubectl("delete", "mutatingwebhookconfiguration", "sftriage")
    for option in ("--secret", "--configuration"):
        refused = run(option, "another", code=1)
        assert re.search(
            'the cluster refused the request: (secrets|mutatingwebhookconfigurations.*) "another" is forbidden', refused
        )
