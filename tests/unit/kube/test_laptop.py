"""`sftriage kube`, as far as it needs no server: rows of reports and captures, and the doctor's certificate."""

import base64
import socket
from datetime import datetime, timezone

import pytest
import yaml

from k8s.make_crds import definition
from sftriage.errors import InputError, UsageError
from sftriage.kube.diagnosis import Certificate, certificate
from sftriage.kube.listing import best, is_of, job_row, of_step, progress_of, stored_of, trace_row
from sftriage.kube.objects import KINDS
from sftriage.kube.webhook import issued
from tests.unit.kube.objects import kubeconfig as config_of
from tests.unit.kube.objects import made


def capture(
    name="c", rank=2, state="stored", steps=(100, 104), because_of=(50, 99), created="T1", stored=True, **status
):
    trigger = {"policy": "p", "rule": "r", "stage": "data", "first_step": because_of[0], "last_step": because_of[1]}
    spec = {"job": "train", "rank": rank, "reason": "slow", "trigger": trigger}
    found = {"state": state, "first_step": steps[0], "last_step": steps[1], **status}
    if stored:
        found["stored"] = {"store": "s3://t", "reference": f"train/run/{name}", "size_bytes": 2, "artefacts": []}
    return made("TraceCapture", name, spec, found, creationTimestamp=created)


@pytest.mark.parametrize("job", ["train", "ml/job/train", "sftriage-train-1"])
def test_a_job_is_found_by_its_name_its_id_or_the_name_of_its_objects(job):
    about = {"annotations": {"sftriage.dev/job-id": "ml/job/train"}, "labels": {"sftriage.dev/job": "sftriage-train-1"}}
    assert is_of(made("TriageReport", "r", {"job": "train"}, **about), job)
    assert not is_of(made("TriageReport", "r", {"job": "other"}), job)


def test_objects_without_a_status_are_rows_too():
    job = job_row(made("TriageReport", "r", {"job": "train"}))
    assert [job[of] for of in ("health", "suspect", "since_step", "watched", "captures")] == ["", "", None, None, 0]
    row = trace_row(made("TraceCapture", "c", {"job": "train", "rank": 3}))
    assert (row.state, row.profiler, row.steps, row.because_of, row.store) == ("requested", "auto", None, None, "")


def test_the_distance_of_a_capture_from_a_step():
    distances = {50: 0, 99: 0, 104: 0, 40: 10, 120: 16, 0: 50}
    assert {step: trace_row(capture()).distance_from(step) for step in distances} == distances


def test_captures_of_a_step_or_the_nearest():
    near, far = (
        trace_row(capture(name, because_of=first, steps=first)) for name, first in (("a", (5, 9)), ("b", (50, 59)))
    )
    assert of_step([near, far], 7) == ([near], True)
    assert of_step([near, far], 12) == ([near], False)
    assert of_step([], 12) == ([], False)
    assert of_step([trace_row(made("TraceCapture", "c", {}))], 1) == ([], False)


OTHER = {"steps": (900, 904), "because_of": (800, 899)}
BEST = {
    "the newest": ([{}, {"created": "T2"}, {"created": "T0"}], {}, "b"),
    "one with the fault before a newer one": ([{"reproduced": "yes"}, {"created": "T2", "reproduced": "no"}], {}, "a"),
    "a part of it before none": ([{"reproduced": "partly"}, {"created": "T2"}], {}, "a"),
    "one that is stored": ([{}, {"created": "T2", "stored": False, "state": "running"}], {}, "a"),
    "one of the rank": ([{}, {"created": "T2", "rank": 3}], {"rank": 2}, "a"),
    "one of the step": ([{}, {"created": "T2", **OTHER}], {"step": 60}, "a"),
}


@pytest.mark.parametrize(("captures", "asked", "expected"), BEST.values(), ids=BEST)
def test_the_most_informative_trace(captures, asked, expected):
    bodies = [capture(name, **one) for name, one in zip("abc", captures, strict=False)]
    assert best(bodies, **{"step": None, "rank": None, **asked})["metadata"]["name"] == expected


def test_a_missing_trace_is_reported_with_the_job_s_captures():
    with pytest.raises(UsageError, match=r"no stored trace of rank 7 of step 3; captures of the job: c \(failed\)"):
        best([capture(state="failed", stored=False)], 3, 7)
    with pytest.raises(UsageError, match=r"^no stored trace$"):
        best([], None, None)


STORED = {
    "it is running": ({"state": "running", "stored": False}, UsageError, "running. Its steps are being recorded."),
    "it failed": ({"state": "failed", "stored": False, "detail": "no room"}, UsageError, "failed. no room"),
    "it is stored nowhere else": ({"stored": False}, UsageError, "Only the job's controller has it"),
    "nonsense": ({"stored": False, "state": "x"}, UsageError, "x."),
}


@pytest.mark.parametrize(("about", "error", "says"), STORED.values(), ids=STORED)
def test_a_capture_without_a_trace_is_reported_with_the_reason(about, error, says):
    with pytest.raises(error, match=says):
        stored_of(capture(**about))


def test_an_unreadable_status_has_no_trace():
    body = capture()
    assert stored_of(body).reference == "train/run/c"
    body["status"]["stored"] = {"store": ""}
    with pytest.raises(InputError, match="cannot read the location"):
        stored_of(body)


PROGRESS = {
    "nobody has looked": (made("TraceCapture", "c", {}), "requested", False),
    "it runs": (capture(state="running", stored=False), "running", False),
    "it is stored": (capture(), "stored", True),
    "it was refused": (capture(state="refused", stored=False), "refused", True),
    "it is being deleted": (made("TraceCapture", "c", {}, deletionTimestamp="T"), "requested", True),
}


@pytest.mark.parametrize(("body", "state", "over"), PROGRESS.values(), ids=PROGRESS)
def test_the_progress_of_a_capture(body, state, over):
    found, is_over, words = progress_of(body)
    assert (found, is_over, bool(words)) == (state, over, True)


def test_the_definitions_are_printed_for_kubectl(sftriage):
    outcome = sftriage("kube", "crds")
    assert outcome.code == 0
    assert list(yaml.safe_load_all(outcome.out)) == [definition(kind) for kind in KINDS]


def test_an_unreachable_cluster_is_one_line(sftriage, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        server = f"https://127.0.0.1:{held.getsockname()[1]}"
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config_of({"server": server}, {})))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    outcome = sftriage("kube", "policy")
    assert (outcome.code, outcome.out, len(outcome.err.splitlines())) == (1, "", 1)
    assert outcome.err.startswith("sftriage: cannot reach the cluster: ")


def test_a_certificate_is_checked_against_the_trusted_authorities():
    """GIVEN a certificate of a CA THEN it is trusted by whoever knows that CA, and by nobody who knows another."""
    begun = datetime(2027, 1, 1, tzinfo=timezone.utc)
    served, of_ca, of_other = (
        base64.b64encode(pem).decode()
        for one, other in [(issued(["w"], begun, 9), issued(["w"], begun))]
        for pem in (one["tls.crt"], one["ca.crt"], other["ca.crt"])
    )
    found = certificate("tls", served, [of_other, of_ca])
    assert found == Certificate("tls", begun.timestamp() - 600, begun.timestamp() + 9 * 86_400, trusted=True)
    assert not certificate("tls", served, [of_other]).trusted
    assert certificate("tls", served, [served]).trusted
    with pytest.raises(ValueError, match=r"."):
        certificate("tls", "nonsense", [])
