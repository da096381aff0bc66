"""`sftriage run --hub` on two hosts: an unedited training script, with a slow rank on the second one."""

import os

import pytest

from tests.integration.namespaces import two_hosts
from tests.integration.processes import DEADLINE_S, UNEDITED, slowed
from tests.integration.runs import captures, named, verdicts
from tests.integration.test_auto_seams import POLICY, SLOW_FROM

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
A_STEP, SLOW = 8, 1
EPOCHS = 8  # of 40 steps: the rank is slow for ten seconds, of which it takes some until a host is asked for a capture


def test_the_stages_of_an_unedited_script_are_found_on_every_host(tmp_path, environment):
    # GIVEN two hosts, and a script that knows nothing of sftriage, whose data set becomes slow on the second one
    (tmp_path / "policy.yaml").write_text(POLICY)
    environment = {**environment, **slowed(SLOW, A_STEP, SLOW_FROM)}
    options, script = ("--job-id", f"auto/{os.getpid()}"), (UNEDITED / "ddp.py", tmp_path, EPOCHS)
    with two_hosts() as hosts:
        both = hosts.torchrun(tmp_path, environment, options, *script, ranks=1, port=29513)
        # WHEN the job has run
        codes = [one.wait(DEADLINE_S) for one in both]
    said = "\n".join((tmp_path / f"said-{number}").read_text() for number in range(2))
    assert codes == [0, 0], said
    # THEN that rank is named with its stage, and was captured where it runs
    assert (SLOW, "data") in [named(verdict) for verdict in verdicts(tmp_path / "run")], said
    assert [(one.capture.rank, one.capture.host) for one in captures(tmp_path / "run")] == [(SLOW, "node-b")], said
    # AND nothing is left of what the trainers were given
    assert not list(tmp_path.glob("**/auto"))
