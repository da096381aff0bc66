"""A job on two hosts that hangs: one capture of all ranks, where its controller is, and in its store."""

import msgspec
import pytest

from sftriage.model.hangs import HANG_NAME, HangEvidence
from sftriage.traces.remote import RemoteStore
from tests.integration.namespaces import two_hosts
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.runs import captures
from tests.integration.test_stalled import HANG, IN_BACKWARD, IN_FORWARD, RULE, STOPPED

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")


def test_a_stall_on_two_hosts_is_one_capture_in_the_run_and_in_its_store(tmp_path, environment):
    (tmp_path / "policy.yaml").write_text(policy(RULE, detection="stalled_after: 8s, window_steps: 20"))
    store, run = tmp_path / "store", tmp_path / "run"
    store.mkdir()
    with two_hosts() as hosts:
        # GIVEN a job of two ranks on each host, of which rank 1 hangs
        options = ("--job-id", "stalled", "--store", store)
        started = hosts.torchrun(tmp_path, environment, options, HANG, tmp_path, 0.0, ranks=2, port=29514, forked=True)
        # WHEN its stall is seen THEN there is one capture, in the directory of the run's controller
        wait_until(lambda: captures(run))
        for step in (IN_FORWARD, IN_BACKWARD, STOPPED):
            (tmp_path / f"release-{step}").touch()
        assert [one.wait(DEADLINE_S) for one in started] == [0, 0]
    (manifest,) = captures(run)
    content = (run / "captures" / manifest.capture_id / HANG_NAME).read_bytes()
    evidence = msgspec.json.decode(content, type=HangEvidence)
    # AND it has what the ranks of both hosts report
    assert [(one.rank, one.host) for one in evidence.ranks] == [(rank, f"node-{'ab'[rank // 2]}") for rank in range(4)]
    assert (evidence.world_size, evidence.hang.kind, evidence.hang.ranks) == (4, "absent", (1,))
    assert (manifest.capture.rank, manifest.capture.host, manifest.cause.place.function) == (1, "node-a", "hang")
    # AND the same is in the store
    remote = RemoteStore.open(str(store), job=manifest.job, run=manifest.run)
    assert remote.manifest(manifest.capture_id) == manifest
    target = remote.get(manifest.capture_id, HANG_NAME, tmp_path / "fetched.json")
    assert target.read_bytes() == content
