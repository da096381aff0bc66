"""`sftriage kube`, as far as nobody needs a server for it."""

from __future__ import annotations

import socket

import pytest
import yaml

from k8s.make_crds import definition
from sftriage.kube.objects import KINDS

CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "x"}}],
    "contexts": [{"name": "k", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "k",
}


def test_the_definitions_are_printed_for_kubectl(sftriage):
    outcome = sftriage("kube", "crds")
    assert outcome.code == 0
    assert list(yaml.safe_load_all(outcome.out)) == [definition(kind) for kind in KINDS]


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "apiVersion: v1", yaml.safe_dump({**CONFIG, "current-context": "x"})]
)
def test_without_a_cluster_to_ask_it_is_said_in_a_line(sftriage, monkeypatch, tmp_path, text):
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    outcome = sftriage("kube", "policy")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("sftriage: no cluster to ask: ")
    assert len(outcome.err.splitlines()) == 1


ASKING = ("status", "traces j", "get c", "open c", "capture j --rank 1 --reason why", "doctor", "policy")


@pytest.mark.parametrize("command", ASKING)
def test_a_context_that_is_not_in_the_kubeconfig_is_refused(sftriage, monkeypatch, tmp_path, command):
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    outcome = sftriage("kube", *command.split(), "--context", "away")
    assert (outcome.code, "Expected object with name away" in outcome.err) == (2, True)


def test_a_cluster_that_is_not_there_is_said_in_a_line(sftriage, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump({**CONFIG, "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}"}}]})
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    outcome = sftriage("kube", "policy")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("sftriage: the cluster cannot be reached: ")
    assert len(outcome.err.splitlines()) == 1


def test_one_namespace_and_all_of_them_is_a_contradiction(sftriage):
    assert sftriage("kube", "policy", "-n", "x", "-A").code == 2


def test_an_operator_is_given_stores(sftriage):
    outcome = sftriage("operator", "--store", "ftp://x")
    assert outcome.code == 2
    assert "not a store" in outcome.err


WRONG = {
    "no job": ("kube", "controller", "--job-id", "ml/resnet", "--policies", "p", "--run", "r", "--creds", "c"),
    "a claim of no controller": ("operator", "--runs-claim", "runs"),
    "a lease that is none": ("operator", "--lease", "sftriage-operator"),
    "settings that are not there": ("operator", "--settings", "nowhere.yaml"),
}


@pytest.mark.parametrize("command", WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_said_in_a_line(sftriage, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    outcome = sftriage(*command)
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
