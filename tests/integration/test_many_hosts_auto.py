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
EPOCHS = 8  # of 40 steps: the rank is slow for ten seconds, some of which pass before its host gets a request


def test_the_stages_of_an_unedited_script_are_found_on_every_host(tmp_path, environment):
    # GIVEN two hosts, and a script that knows nothing of sftriage, whose data set becomes slow on the second one
    (tmp_path / "policy.yaml").write_text(POLICY)
    environment = {**environment, **slowed(SLOW, A_STEP, SLOW_FROM)}
    options, script = ("--job-id", f"auto/{os.getpid()}"), (UNEDITED / "ddp.py", tmp_path, EPOCHS)
    with two_hosts() as hosts:
        both = hosts.torchrun(tmp_path, environment, options, *script, ranks=1, port=29513, forked=True)
        # WHEN the job has run
        codes = [process.wait(DEADLINE_S) for process in both]
    log = "\n".join((tmp_path / f"said-{number}").read_text() for number in range(2))
    assert codes == [0, 0], log
    # THEN that rank is named with its stage, and was captured where it runs
    assert (SLOW, "data") in [named(verdict) for verdict in verdicts(tmp_path / "run")], log
    assert [(made.capture.rank, made.capture.host) for made in captures(tmp_path / "run")] == [(SLOW, "node-b")], log
    # AND the trainers' folder is gone
    assert not list(tmp_path.glob("**/auto"))
