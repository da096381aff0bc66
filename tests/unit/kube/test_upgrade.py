"""An operator and pods of the release before: what they agree on, so that what runs is watched on after an upgrade."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml

from sftriage.kube.controllers import ControllerSettings, PodState, secret, wanted
from sftriage.kube.injecting import injection
from sftriage.kube.jobs import JobRef
from sftriage.kube.sidecar import InjectionSettings

JOB = JobRef("job", "pretraining", "ml")
SETTINGS = InjectionSettings(image="registry.example.com/sftriage:next", store="s3://traces", store_secret="s3")
INJECTED = sorted(Path(__file__).parent.glob("injected-*.yaml"))
"""One of each release; the next one adds its own."""


@pytest.fixture(params=INJECTED, ids=lambda path: path.stem)
def pod(request):
    return yaml.safe_load(request.param.read_text())


def test_its_pods_are_known(pod):
    seen = PodState.of(pod)
    assert (seen.job, seen.injected) == (JOB, True)


def test_its_agents_find_the_hub_that_the_operator_has_made_now(pod):
    """GIVEN a pod of before WHEN the controller is one of now THEN address, Secret and key are those its agent has"""
    made = {one["kind"]: one for one in wanted(JOB, ControllerSettings(SETTINGS), {})}
    held = secret(JOB, SETTINGS, "x", datetime(2027, 1, 15, tzinfo=timezone.utc))
    (agent,) = (one for one in pod["spec"]["initContainers"] if one["name"] == "sftriage-agent")
    command = agent["command"]
    name, _, port = command[command.index("--hub") + 1].partition(":")
    about = made["Service"]["metadata"]
    assert (name, int(port)) == (f"{about['name']}.ml.svc", made["Service"]["spec"]["ports"][0]["port"])
    (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "sftriage-hub")
    assert volume["secret"]["secretName"] == held["metadata"]["name"]
    assert command[command.index("--creds") + 1].rpartition("/")[2] in held["stringData"]
    assert command[command.index("--job-id") + 1] == JOB.job_id

    (rule,) = made["NetworkPolicy"]["spec"]["ingress"]
    labels = rule["from"][0]["podSelector"]["matchLabels"]
    assert labels.items() <= pod["metadata"]["labels"].items()


def test_a_pod_of_before_that_comes_by_the_webhook_stays_as_it_is(pod):
    """GIVEN a job that `sftriage kube inject` of before has changed THEN the webhook of now adds nothing to its pods"""
    assert injection(pod, JOB, SETTINGS, (1, 31)).patch == ()
