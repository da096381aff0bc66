"""`sftriage run --metrics-port` beside a real job, scraped by a real Prometheus; and its spans, sent to a receiver."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sftriage.runs.recordings import load_recording
from sftriage.sinks.spans import trace_id_of
from sftriage.verdict.accounting import anchored
from sftriage.windows.gather import Shape
from tests import needs
from tests.integration import policies
from tests.integration.conftest import own_environment
from tests.integration.processes import (
    DEADLINE_S,
    FORKED,
    IN_TURN,
    LOOP,
    ROOT,
    ended,
    free_port,
    sftriage_process,
    wait_until,
)
from tests.integration.runs import captures, verdicts
from tests.otlp import Receiver

RULE = 'name: any, match: {gain: ">= 5%"}, capture: {profiler: torch, steps: 3}, cooldown: 10m'
POLICY = policies.policy(RULE, steps=(40, 10, 10), limits="overhead_budget: 100%")


@pytest.fixture
def policy(tmp_path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


def get(url: str, **parameters: object) -> str:
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=30) as answer:
        return answer.read().decode()


def values(text: str) -> dict[tuple[str, ...], float]:
    """What a file or an answer says, by name and labels, without the job's name."""
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "job_name")): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def test_the_counters_equal_the_steps_on_disk(start, sftriage, tmp_path, policy):
    # GIVEN a job that was watched to its end, its metrics written into a file
    path = tmp_path / "job.prom"
    run = start("run", "--metrics-file", path, "--out", tmp_path / "run", "--policy", policy, "--job", "loop",
                "--", sys.executable, LOOP, 3, 333, 0)  # fmt: skip
    _, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    found = values(path.read_text())
    # THEN the exposed time is, to the last digit but a few, that of the judged steps as one window
    recording = load_recording(tmp_path / "run")
    n_steps = int(found[("sftriage_steps_total",)] + found[("sftriage_incomplete_steps_total",)])
    assert n_steps == 10 * int((333 - 10 - 40) / 10) + 40
    (whole,) = list(recording.windows(Shape(n_steps, n_steps, 10)))
    accounting = anchored(whole)
    stages = {name[1]: value for name, value in found.items() if name[0] == "sftriage_exposed_seconds_total"}
    assert sum(stages.values()) == pytest.approx(accounting.exposed_s, rel=1e-9)
    assert stages == pytest.approx(
        {f"stage={s}": v for s, v in zip(whole.schema.stages, accounting.advances_S, strict=True)}, rel=1e-9
    )
    # AND the other counters equal the records
    decisions = sftriage("decisions", "--run", tmp_path / "run", "--json").json
    counted = sum(value for name, value in found.items() if name[0] == "sftriage_decisions_total")
    assert counted == len(decisions)
    assert found[("sftriage_telemetry_steps_total",)] == 3 * 333
    assert found[("sftriage_run_active",)] == 0
    assert 0.0 <= found[("sftriage_telemetry_lag_seconds",)] < 60.0


def test_a_taken_port_is_reported_and_stops_the_job_only_with_required(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["run", "--metrics-port", port, "--out", tmp_path / "run"]
        job = ["--", "touch", tmp_path / "ran"]
        # GIVEN a taken port WHEN triage is required THEN the job does not start
        refused = start(*options, "--required", *job)
        out, err = refused.communicate(timeout=60)
        assert (refused.returncode, out, len(err.splitlines())) == (2, "", 1)
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in err
        assert not (tmp_path / "ran").exists()
        assert not (tmp_path / "run").exists()
        # AND otherwise it starts, is watched, and one line says what is missing
        run = start(*options, *job)
        _, err = run.communicate(timeout=60)
    assert f"no metrics: cannot listen on 127.0.0.1 port {port}: Address already in use" in err
    assert (run.returncode, (tmp_path / "ran").exists(), (tmp_path / "run").is_dir()) == (0, True, True)


def test_nothing_listens_by_default_and_with_a_port_only_that(start, tmp_path):
    def listening(pid: int) -> list[str]:
        sockets = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
        inodes = {name[len("socket:[") : -1] for name in sockets if name.startswith("socket:[")}
        found = []
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.append(fields[1])
        return found

    for options, count in (([], 0), (["--metrics-port", "0"], 1)):
        out = tmp_path / f"run-{count}"
        run = start("run", *options, "--out", out, "--", sys.executable, LOOP, 2, 1_000_000, 0)
        wait_until(lambda out=out: list((out / "steps").glob("*.steps")))
        found = listening(run.pid)
        assert len(found) == count
        assert all(address.startswith("0100007F:") for address in found)
        run.terminate()
        run.communicate(timeout=60)


def test_a_non_loopback_address_requires_a_token(start, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    token.chmod(0o600)
    job = ["--out", tmp_path / "run", "--", sys.executable, LOOP, 2, 1_000_000, 0]
    refused = start("run", "--metrics-port", 0, "--metrics-host", "0.0.0.0", *job)
    assert "give one with --metrics-token-file" in refused.communicate(timeout=60)[1]
    assert refused.returncode == 2
    run = start("run", "--metrics-port", 0, "--metrics-host", "0.0.0.0", "--metrics-token-file", token, *job)
    line = wait_until(lambda: next((one for one in iter(run.stderr.readline, "") if "metrics are at" in one), None))
    port = int(re.search(r":(\d+)/metrics", str(line))[1])
    for authorization, status in ((None, 401), ("Bearer 0123456789abcdef0123", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Authorization": authorization} if authorization else {}
        connection.request("GET", "/metrics", headers=headers)
        assert connection.getresponse().status == status
        connection.close()
    run.terminate()
    run.communicate(timeout=60)


@contextlib.contextmanager
def prometheus(target: str, folder: Path):
    """A Prometheus of the test's own, which scrapes one target every second; where it is asked."""
    folder.mkdir()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: test, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    command = [needs.PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(f"{url}/-/ready"))
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(get(url))
    return False


def asked(url: str, kind: str, **parameters: object) -> list[dict]:
    answer = json.loads(get(f"{url}/api/v1/{kind}", **parameters))
    assert answer["status"] == "success"
    data = answer["data"]
    return data["result"] if isinstance(data, dict) else data


OF_A_REGRESSED_JOB = {"Slower than its own best"}


def empty_panels(url: str, began_s: float) -> list[tuple[str, str]]:
    """The panels of the dashboard that have nothing to show, when they ask as Grafana would."""
    dashboard = json.loads((ROOT / "k8s" / "dashboards" / "sftriage.json").read_text(encoding="utf-8"))
    empty = []
    for panel in dashboard["panels"]:
        if panel["title"] in OF_A_REGRESSED_JOB:
            continue
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s").replace("$job", ".*")
            series = asked(url, "query_range", query=expression, start=began_s, end=time.time(), step=1)
            if not [value for one in series for _, value in one["values"] if value != "NaN"]:
                empty.append((panel["title"], expression))
    return empty


class Observed(NamedTuple):
    run: Path
    prometheus: str
    empty_panels: list[tuple[str, str]]
    receiver: Receiver
    began_s: float
    ended_s: float


@pytest.fixture(scope="module")
def observed(tmp_path_factory) -> Iterator[Observed]:
    """A real job with a slow rank, scraped by a real Prometheus where there is one, its spans sent to a receiver."""
    directory = tmp_path_factory.mktemp("observed")
    (directory / "policy.yaml").write_text(POLICY)
    run, port, began_s = directory / "run", free_port(), time.time()
    command = ["run", "--metrics-port", port, "--metrics-per-rank", "--otel", "--policy", directory / "policy.yaml"]
    command += ["--out", run, "--", *FORKED, 2, IN_TURN, directory, "data:1"]
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(Receiver())
        url = ""
        if needs.PROMETHEUS:
            url = stack.enter_context(prometheus(f"127.0.0.1:{port}", directory / "prometheus"))
        to = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_SERVICE_NAME": "trainer"}
        job = sftriage_process(*command, env=own_environment(directory) | to, stderr=subprocess.PIPE, text=True)
        with ended(job):
            wait_until(lambda: verdicts(run))
            (directory / "next-0").touch()
            wait_until(lambda: captures(run))
            empty: list[tuple[str, str]] = []
            if url:
                # (a rate is one of ten seconds, scraped once a second)
                end_s = time.monotonic() + DEADLINE_S
                while (empty := empty_panels(url, began_s)) and time.monotonic() < end_s:
                    time.sleep(1)
            (directory / "next-1").touch()
            _, err = job.communicate(timeout=DEADLINE_S)
            assert job.returncode == 0, err
        yield Observed(run, url, empty, receiver, began_s, time.time())


@needs.prometheus
def test_every_panel_of_the_dashboard_has_data_from_a_real_job(observed):
    url = observed.prometheus
    assert observed.empty_panels == []
    # AND the stack is the step time
    exposed_s = {
        one["metric"]["stage"]: float(one["value"][1])
        for one in asked(url, "query", query="last_over_time(sftriage_exposed_seconds_total[1h])")
    }
    (whole,) = asked(url, "query", query="last_over_time(sftriage_step_exposed_seconds_sum[1h])")
    assert sum(exposed_s.values()) == pytest.approx(float(whole["value"][1]), rel=1e-9)
    # AND the exemplars lead to stored captures
    stored = {one.capture_id for one in captures(observed.run)}
    for query in ("sftriage_captures_total", "sftriage_step_exposed_seconds_bucket"):
        found = asked(url, "query_exemplars", query=query, start=observed.began_s, end=observed.ended_s)
        ids = {e["labels"]["capture_id"] for one in found for e in one["exemplars"]}
        assert ids & stored, (query, found)


@needs.prometheus
def test_promtool_accepts_the_metrics(start, tmp_path, policy):
    path = tmp_path / "job.prom"
    run = start("run", "--metrics-file", path, "--metrics-per-rank", "--out", tmp_path / "run", "--policy", policy,
                "--", sys.executable, LOOP, 2, 200, 0)  # fmt: skip
    run.communicate(timeout=120)
    checked = subprocess.run(
        [needs.PROMTOOL, "check", "metrics"], input=path.read_text(), capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


ALERTED = """
rule_files: [rules.yml]
evaluation_interval: 1m
tests:
- interval: 1m
  input_series:
  - {series: 'sftriage_stalled{job_name="a"}', values: 0x2 1x20}
  - {series: 'sftriage_stalled{job_name="b"}', values: 0x20}
  - {series: 'sftriage_suspect_share_ratio{job_name="a",scope="rank",stage="data"}', values: 0.3x20}
  - {series: 'sftriage_suspect_share_ratio{job_name="b",scope="all",stage="data"}', values: 0.3x20}
  - {series: 'sftriage_suspect_share_ratio{job_name="c",scope="rank",stage="data"}', values: 0.05x20}
  alert_rule_test:
  - alertname: TrainingStalled
    eval_time: 15m
    exp_alerts:
    - exp_labels: {severity: page, job_name: a}
      exp_annotations: {summary: a stands still, description: 'Which ranks are missing: sftriage decisions'}
  - alertname: TrainingHasSlowRank
    eval_time: 15m
    exp_alerts:
    - exp_labels: {severity: ticket, job_name: a, scope: rank, stage: data}
      exp_annotations:
        {summary: 'a: a rank is slow in data', description: Mending it would save 30% of each step.}
"""


@needs.prometheus
def test_the_documented_alerts_fire_when_they_should(tmp_path):
    # GIVEN the rules as a reader copies them
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rules = tmp_path / "rules.yml"
    rules.write_text(re.search(r"```yaml\n(groups:.*?)```", text, re.DOTALL)[1])
    checked = subprocess.run([needs.PROMTOOL, "check", "rules", rules], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    # WHEN a job stalls, or has a slow rank for long, and another is healthy
    (tmp_path / "tests.yml").write_text(ALERTED)
    # THEN these alerts fire, and no others
    tested = subprocess.run([needs.PROMTOOL, "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_spans_of_a_real_job_arrive_with_the_times_of_its_steps(observed, sftriage):
    receiver, run = observed.receiver, observed.run
    # THEN there is a window span for every window on record, all in the run's trace
    by_name = receiver.by_name()
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert {span.trace_id for span in receiver.spans} == {trace_id_of(run_id).to_bytes(16, "big")}
    decided = sftriage("decisions", "--run", run, "--json").json
    about = [receiver.attributes(span) for span in by_name["window"]]
    assert [one["sftriage.first_step"] for one in about] == [one["first_step"] for one in decided]
    assert {one["service.name"] for one in receiver.resources} == {"trainer"}
    # AND each spans its steps: in order, within the run, and as long as they took
    starts_ns = [span.start_time_unix_nano for span in by_name["window"]]
    assert starts_ns == sorted(starts_ns)
    assert all(observed.began_s * 1e9 < ns < observed.ended_s * 1e9 for ns in starts_ns)
    for span, one in zip(by_name["window"], about, strict=True):
        lasted_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert lasted_s == pytest.approx(40 * one["sftriage.exposed_s"], rel=0.2)
    # AND the capture is linked to the window that led to it
    (capture, *_) = by_name["capture"]
    windows = {span.span_id: receiver.attributes(span) for span in by_name["window"]}
    assert windows[capture.links[0].span_id]["sftriage.outcome"] == "capture"
    assert receiver.attributes(capture)["sftriage.capture.state"] == "stored"


def test_an_unreachable_receiver_costs_the_job_one_line(start, tmp_path, policy, environment):
    environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    run = start("run", "--otel", "--out", tmp_path / "run", "--policy", policy,
                "--", sys.executable, LOOP, 2, 300, 5, env=environment)  # fmt: skip
    _, err = run.communicate(timeout=120)
    assert run.returncode == 5
    said = [line for line in err.splitlines() if "OpenTelemetry" in line]
    assert said == ["sftriage: OpenTelemetry: cannot deliver spans, they are lost; see OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert "Traceback" not in err
