"""The objects of a job's controller. `test_kube_jobs` has a real server take them."""

from __future__ import annotations

from datetime import datetime, timezone

from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube.client import plural_of
from sftriage.kube.controllers import WANTED_ANNOTATION, ControllerSettings, policy_files, removed, secret, wanted
from sftriage.kube.jobs import JobRef
from sftriage.kube.sidecar import InjectionSettings, pod_parts
from sftriage.kube.statuses import standings
from sftriage.kube.webhook import good_until
from sftriage.policy.loading import parse
from tests.unit.kube.test_policies import RULE, body

JOB = JobRef("jobset", "pretraining", "ml")
SETTINGS = ControllerSettings(InjectionSettings(image="sftriage@sha256:12"))
OWNER = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "pretraining", "uid": "7d"}


def made(settings=SETTINGS, policies=None, owners=(OWNER,)):
    return {one["kind"]: one for one in wanted(JOB, settings, policies or {"a.yaml": "a"}, owners)}


NOW = datetime(2027, 1, 15, tzinfo=timezone.utc)


def digest(found):
    return found["Deployment"]["metadata"]["annotations"][WANTED_ANNOTATION]


def test_all_of_it_is_the_job_s():
    found = made()
    assert set(found) == {"ServiceAccount", "RoleBinding", "ConfigMap", "Service", "NetworkPolicy", "Deployment"}
    for one in found.values():
        about = one["metadata"]
        assert (about["name"], about["namespace"], about["ownerReferences"]) == (JOB.object_name, "ml", [OWNER])
        assert about["labels"]["sftriage.dev/job"] == JOB.object_name
    # AND all that is made is removed, the Deployment last: by it the others are found
    secrets = [secret(JOB, InjectionSettings(hub_tls=one), "x", NOW) for one in (False, True)]
    made_ = (*wanted(JOB, SETTINGS, {}), *secrets)
    assert {(one["apiVersion"], plural_of(one["kind"]), one["metadata"]["name"]) for one in made_} == set(removed(JOB))
    assert removed(JOB)[-1] == ("apps/v1", "deployments", JOB.object_name)


def test_its_pod_meets_the_strictest_of_the_pod_security_standards():
    spec = made()["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert {key for one in spec["volumes"] for key in one} <= {"name", "emptyDir", "configMap", "secret"}
    assert all(one["emptyDir"].get("sizeLimit") for one in spec["volumes"] if "emptyDir" in one)


def test_its_service_leads_to_its_pod_and_to_none_of_the_job_s():
    found = made()
    template = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selector = found["Service"]["spec"]["selector"]
    assert selector.items() <= template.items()
    assert selector == found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= {"sftriage.dev/job": JOB.object_name, "sftriage.dev/inject": "enabled"}.items()


def test_settings_are_followed():
    said = InjectionSettings(store="s3://traces", store_secret="keys", run_as_user=7)
    spec = made(ControllerSettings(said, "claim"))["Deployment"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == 7
    (container,) = spec["containers"]
    assert container["command"][-2:] == ["--store", "s3://traces"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys", "optional": True}}]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "claim"}} in spec["volumes"]
    assert {"name": "runs", "mountPath": "/runs", "subPath": JOB.object_name} in container["volumeMounts"]


def test_a_hub_that_is_encrypted_has_its_certificate_beside_its_password():
    """GIVEN hub_tls THEN one Secret, made once, has what the controller serves by; agents get less of it"""
    said = InjectionSettings(hub_tls=True)
    found = secret(JOB, said, "x", NOW)
    data = found["stringData"]
    assert set(data) == {"hub", "ca.pem", "cert.pem", "key.pem"}
    names = {f"{JOB.object_name}.ml.svc", "127.0.0.1"}
    files = {"ca.crt": data["ca.pem"], "tls.crt": data["cert.pem"], "tls.key": data["key.pem"]}
    until = good_until({name: text.encode() for name, text in files.items()}, tuple(names))
    assert until is not None
    assert until.year >= 2036
    spec = made(ControllerSettings(said))["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"][-2:] == ["--tls", "/hub"]
    (hub,) = (one for one in pod_parts(JOB, said)["volumes"] if one["name"] == "sftriage-hub")
    assert {one["key"] for one in hub["secret"]["items"]} == {"hub", "ca.pem"}
    (served,) = (one for one in spec["volumes"] if one["name"] == "hub")
    assert served["secret"]["secretName"] == hub["secret"]["secretName"] == found["metadata"]["name"]
    # AND a job whose Secret was made without is not left with that
    assert found["metadata"]["name"] != secret(JOB, InjectionSettings(), "x", NOW)["metadata"]["name"]


def test_with_a_nats_server_that_all_share_no_hub_is_started():
    """GIVEN `nats` THEN agents and controller connect to it, each with its own key, and nobody to the controller"""
    said = InjectionSettings(nats="tls://nats:4222", nats_secret="keys", nats_ca=True)
    found = made(ControllerSettings(said))
    assert "Service" not in found
    assert found["NetworkPolicy"]["spec"]["ingress"] == []
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"][-6:] == ["--nats", "tls://nats:4222", "--creds", "/hub", "--tls", "/hub"]
    assert "readinessProbe" not in container
    (hub,) = (one for one in pod_parts(JOB, said)["volumes"] if one["name"] == "sftriage-hub")
    assert hub["secret"]["secretName"] == "keys"
    assert {one["key"] for one in hub["secret"]["items"]} == {"agents.nk", "ca.pem"}
    command = pod_parts(JOB, said)["initContainers"][-1]["command"]
    assert command[6:10] == ["--creds", "/sftriage-hub/agents.nk", "--tls", "/sftriage-hub"]


def test_metrics_are_for_whoever_has_the_token():
    found = made(ControllerSettings(InjectionSettings(metrics_secret="scraped")))
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {one["name"] for one in container["ports"]} == {"hub", "metrics"}
    assert container["env"][-1]["valueFrom"]["secretKeyRef"] == {"name": "scraped", "key": "token", "optional": True}
    assert {"ports": [{"port": 9400, "protocol": "TCP"}]} in found["NetworkPolicy"]["spec"]["ingress"]


def test_it_is_known_by_what_it_was_made_of_and_policies_start_no_pod_anew():
    first, again, other = made(), made(), made(policies={"a.yaml": "b"})
    assert digest(first) == digest(again) != digest(other)
    assert first["Deployment"]["spec"] == other["Deployment"]["spec"]
    assert digest(made(owners=())) != digest(first)


def test_the_policies_in_force_are_files_in_their_order_and_of_none_the_default():
    old = body("z-old", {**RULE, "name": "one"}, created="2027-01-15T07:00:00Z")
    new = body("a-new", {**RULE, "name": "two"}, created="2027-01-15T08:00:00Z")
    conflicting = body("b", {**RULE, "name": "one"}, created="2027-01-15T09:00:00Z")
    found = policy_files(standings([conflicting, new, old], 0.0))
    assert list(found) == ["000-z-old.yaml", "001-a-new.yaml"]
    assert [parse(text, name).policy.metadata.name for name, text in found.items()] == ["z-old", "a-new"]
    default = policy_files(standings([], 0.0))
    assert [parse(text, name).policy.metadata.name for name, text in default.items()] == ["default"]


@given(st.text(st.characters(categories=("Ll", "Nd"), include_characters="-."), min_size=1, max_size=253))
def test_whatever_a_job_is_called_its_objects_are_names_that_a_server_takes(name):
    job = JobRef("job", name, "ml")
    assert len(job.object_name) <= 63
    assert all(one["metadata"]["name"] == job.object_name for one in wanted(job, SETTINGS, {}))
