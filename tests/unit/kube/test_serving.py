"""The webhook's server, as far as nobody needs a cluster for it."""

from __future__ import annotations

import json
import ssl
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from sftriage.errors import InputError
from sftriage.kube import webhook as serving
from sftriage.kube.sidecar import InjectionSettings
from sftriage.kube.webhook import Issued, KeptSettings, WebhookServer, issued, rotating, wait_for_certificate
from tests.integration.processes import wait_until
from tests.unit.kube.pods import pod

REVIEW: dict[str, Any] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "7d",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": "ml",
        "object": pod({"job-name": "resnet"}),
    },
}


def webhook(version: tuple[int, int] | None = (1, 31)) -> TestClient:
    return TestClient(WebhookServer(InjectionSettings, lambda: version).app)


def test_a_review_is_answered_once_the_version_is_known():
    with webhook() as client:
        assert client.get("/healthz").text == "ok"
        wait_until(lambda: client.get("/readyz").status_code == 200, 30)
        found = client.post("/mutate", json=REVIEW).json()["response"]
        assert found["allowed"] is True
        assert "patch" in found


def test_a_cluster_that_does_not_tell_its_version_has_its_pods_left_alone():
    with webhook(None) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503
        found = client.post("/mutate", json=REVIEW).json()["response"]
        assert found["allowed"] is True
        assert "patch" not in found
        assert found["warnings"] == ["sftriage: not injected: the cluster's version is not known yet"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ("[]", 400),
        ("{}", 400),
        ("[" * 100_000, 400),
        (json.dumps({"x": "y" * serving.MAX_BODY_BYTES}), 413),
    ],
    ids=["half", "a list", "nothing", "deep", "large"],
)
def test_what_is_no_review_gets_an_error_and_the_server_goes_on(body, status):
    with webhook() as client:
        assert client.post("/mutate", content=body).status_code == status
        assert client.get("/healthz").text == "ok"


def test_settings_that_change_take_effect_and_those_that_make_no_sense_do_not(tmp_path, caplog):
    path = tmp_path / "settings.yaml"

    def write(text: str) -> None:
        # (as a node does it: another file takes its name)
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)

    write("image: one")
    kept = KeptSettings(path)
    assert kept().image == "one"
    write("image: two")
    assert kept().image == "two"
    write("imag: three")
    assert kept().image == "two"
    assert "the settings stay as they were" in caplog.text
    write("image: four")
    assert kept().image == "four"
    path.unlink()
    assert kept().image == "four"
    with pytest.raises(InputError, match="cannot be read"):
        KeptSettings(path)


def laid(folder: Path, made: Issued) -> None:
    for name, content in made.files().items():
        (folder / name).write_bytes(content)


def shaken(server: ssl.SSLContext, made: Issued) -> bool:
    """Whether a client that trusts an authority takes what a server has."""
    one, other, back = ssl.MemoryBIO(), ssl.MemoryBIO(), None
    context = ssl.create_default_context(cadata=made.authority.decode())
    client = context.wrap_bio(one, other, server_hostname="a.b.svc")
    serves = server.wrap_bio(other, one, server_side=True)
    for _ in range(10):
        for end in (client, serves):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
            back = end
    return back is not None


def test_each_handshake_has_the_certificate_that_lies_there_then(tmp_path, caplog):
    first, second = (issued(["a.b.svc"], datetime.now(timezone.utc)) for _ in range(2))
    laid(tmp_path, first)
    context = rotating(tmp_path)
    assert shaken(context, first)
    assert not shaken(context, second)
    # WHEN a key has come, and its certificate has not THEN the one before is used still
    (tmp_path / "tls.key").write_bytes(second.key)
    assert shaken(context, first)
    assert "the one before is" in caplog.text
    laid(tmp_path, second)
    assert shaken(context, second)
    assert not shaken(context, first)
    # AND back again
    laid(tmp_path, first)
    assert shaken(context, first)


def test_a_folder_without_a_certificate_is_waited_for_and_then_said(tmp_path):
    with pytest.raises(InputError, match=r"has no tls\.crt and tls\.key"):
        wait_for_certificate(tmp_path, 0.0)
    with pytest.raises(InputError, match="has no certificate that can be used"):
        rotating(tmp_path)
    laid(tmp_path, issued(["a.b.svc"], datetime.now(timezone.utc)))
    wait_for_certificate(tmp_path, 0.0)
