"""Policies under a job that runs: changed, broken, several of them, and telling somebody."""

import sys

from tests.integration.policies import policy
from tests.integration.processes import LOOP, STUCK, wait_until
from tests.integration.runs import on_record
from tests.unit.sinks.hooks import hooked


def quick(name):
    return policy(f'name: {name}, match: {{gain: ">= 5%"}}', steps=(20, 10, 10), limits="", name=name)


def wide(name, more):
    # (the job's one window decides, on a busy machine too)
    detection = "window_steps: 40, stride_steps: 40, warmup_steps: 0, contended_after: 0s"
    return policy(f'name: {name}, match: {{gain: ">= 5%"}}, {more}', detection=detection, limits="", name=name)


def test_a_changed_policy_applies_and_a_broken_one_does_not(start, tmp_path):
    # GIVEN a job watched under two policies
    first, second, out = tmp_path / "first.yaml", tmp_path / "second.yaml", tmp_path / "run"
    first.write_text(quick("first"), encoding="utf-8")
    second.write_text(quick("second"), encoding="utf-8")
    of_job = "--job", "j", "--", sys.executable, LOOP, "2", "1000000", "0"
    run = start("run", "--policy", first, "--policy", second, "--out", out, *of_job)
    wait_until(lambda: on_record(out, "window"))
    kept = [(out / name).read_text(encoding="utf-8") for name in ("policy.yaml", "policy-2.yaml")]
    assert kept == [quick("first"), quick("second")]
    # WHEN one of them becomes invalid, and then changes
    second.write_text(quick("second").replace("5%", "5"), encoding="utf-8")
    (refused,) = wait_until(lambda: on_record(out, "policy"))
    second.write_text(quick("third"), encoding="utf-8")
    _, changed = wait_until(lambda: len(found := on_record(out, "policy")) == 2 and found)
    decided = len(on_record(out, "window"))
    wait_until(lambda: len(on_record(out, "window")) > decided)
    run.terminate()
    _, err = run.communicate(timeout=60)
    # THEN both are recorded and reported, with the place of the mistake
    assert (refused["kind"], changed["kind"]) == ("refused", "changed")
    assert [one["name"] for one in changed["policies"]] == ["first", "third"]
    assert f"{second}:7:" in err
    assert "now in force: first, third" in err


def test_an_initially_invalid_policy_starts_nothing(start, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text(quick("x").replace("5%", "5"), encoding="utf-8")
    run = start("run", "--policy", broken, "--out", tmp_path / "run", "--", "touch", tmp_path / "started")
    _, err = run.communicate(timeout=60)
    assert (run.returncode, (tmp_path / "started").exists(), (tmp_path / "run").exists()) == (2, False, False)
    assert f"{broken}:7:" in err


def test_a_notification_is_sent_while_the_job_runs(start, tmp_path, environment):
    notifying, end, out = tmp_path / "notifying.yaml", tmp_path / "end", tmp_path / "run"
    notifying.write_text(wide("page-me", "notify: [{webhook: {url_from_env: HOOK}}]"), encoding="utf-8")
    # GIVEN a webhook that fails at first
    with hooked(500) as hook:
        arguments = ("run", "--policy", notifying, "--out", out, "--job", "j", "--", sys.executable, STUCK, end)
        run = start(*arguments, env={**environment, "no_proxy": "127.0.0.1", "HOOK": hook.url})
        # WHEN a rank is slow
        _, _, failed = hook.next()
        _, _, event = hook.next()
        end.touch()
        _, err = run.communicate(timeout=60)
    # THEN a message names rank and stage, and the URL appears nowhere
    assert run.returncode == 0, err
    assert event == failed
    assert (event["type"], event["data"]["job"], event["data"]["rules"]) == ("dev.sftriage.decision", "j", ["page-me"])
    assert event["data"]["verdict"]["suspects"][0]["ranks"] == [1]
    written = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert not any(b"top-secret" in content for content in [*written, err.encode()])
    assert "answered 500; trying again" in err


def test_a_missing_profiler_is_refused_without_a_substitute(start, tmp_path):
    wanting, end, out = tmp_path / "wanting.yaml", tmp_path / "end", tmp_path / "run"
    wanting.write_text(wide("wanting", "capture: {profiler: nsys}"), encoding="utf-8")
    run = start("run", "--policy", wanting, "--out", out, "--", sys.executable, STUCK, end)
    (refused, *_) = wait_until(lambda: on_record(out, "capture"))
    end.touch()
    run.communicate(timeout=60)
    assert (refused["result"]["state"], refused["result"]["rank"]) == ("refused", 1)
    assert "not launched under nsys" in refused["result"]["detail"]
