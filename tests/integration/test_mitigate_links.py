"""A real pipeline of four stages with a slow link: it is named, and stages run further ahead where that is allowed."""

import json
import signal
from pathlib import Path

import pytest

from sftriage.mitigate.switching import Setting, SwitchFile, find_switches
from tests.integration.processes import JOBS, wait_until
from tests.integration.remedies import POLICY, meeting_ranks, remedies, say, states, under_triage
from tests.integration.runs import on_record

JOB = JOBS / "slow_link.py"
SPEC = {"forward_s": 0.006, "backward_s": 0.012, "microbatches": 8, "most": 8, "steps": 2000}
DELAY_S = 0.02
HELPED = [("trying", "worthwhile"), ("kept", "helps")]
MITIGATE = "  mitigate: {remedies: [pipeline], min_saving: 2%, steps: 8}\n"


@pytest.fixture
def begin(start, tmp_path):
    def begin(policy, delays, **spec):
        say(tmp_path / "delays", json.dumps(delays))
        spec |= {"delays": str(tmp_path / "delays")}
        _, run = under_triage(start, tmp_path, policy, (4, JOB), **(SPEC | spec))
        return run, tmp_path / "delays"

    return begin


def tried(run):
    """What was tried. (A pipeline's only link is compared with no other: on a busy machine it is named, too.)"""
    return [one for one in states(run) if one[0] != "advised"]


def in_force(run):
    found = {}
    for path in find_switches(Path(json.loads((run / "run.json").read_text())["rings"])):
        with SwitchFile(path) as file:
            status = file.status()
            found[status.ranks] = bool(status.value) if status.round else None
    return found


@pytest.mark.parametrize("link", [0, 2])
def test_a_slow_link_is_named_with_its_delay(begin, sftriage, link):
    # GIVEN a pipeline with a slow link, and a policy without remedies
    delays = [0.0, 0.0, 0.0]
    delays[link] = DELAY_S
    run, _ = begin(POLICY, delays)
    # WHEN it has run for a while THEN that link is named, with its delay, and nothing is changed
    wait_until(lambda: remedies(run))
    (told,) = remedies(run)
    assert (told["remedy"], told["state"], told["rank"]) == ("pipeline", "advised", link)
    assert told["who"] == f"the link between ranks {link} and {link + 1}"
    assert told["numbers"]["delay_s"] == pytest.approx(DELAY_S, rel=0.2)
    # AND advice names it too, with the saving of stages further ahead, from the job's own figures
    advice = sftriage("advise", run, "--json").json
    assert advice["slow_link"]["link"] == link
    assert advice["slow_link"]["delay_s"] == pytest.approx(DELAY_S, rel=0.2)
    assert advice["best"] == "pipeline"
    assert advice["remedies"][0]["saves_s"] == pytest.approx(told["numbers"]["expected_s"])


@pytest.mark.parametrize("slow_rank", [None, 1])
def test_no_link_is_named_if_none_is_slow(begin, slow_rank):
    # GIVEN a healthy pipeline, or one with a rank that computes for twice as long WHEN many windows have been judged
    run, _ = begin(POLICY, [0.0, 0.0, 0.0], slow_rank=slow_rank)
    wait_until(lambda: len(on_record(run, "window")) >= 15)
    # THEN no link has been named
    assert remedies(run) == []


def test_stages_run_further_ahead_for_as_long_as_the_link_is_slow(begin):
    # GIVEN a slow link, and a policy that allows remedies
    run, delays = begin(POLICY + MITIGATE, [0.0, DELAY_S, 0.0])
    # WHEN the job continues THEN its stages run further ahead, first on trial and then for good
    wait_until(lambda: len(states(run)) == 2)
    assert states(run) == [("trying", "worthwhile", 1), ("kept", "helps", 1)]
    trying, kept = remedies(run)
    # AND the measured and the predicted saving are on record
    assert kept["ahead_S"][0] > 4
    assert kept["numbers"]["saves_s"] > 2 * kept["numbers"]["error_s"]
    assert kept["numbers"]["saves_s"] == pytest.approx(trying["numbers"]["expected_s"], rel=0.5)
    # WHEN the link heals THEN they run as before
    say(delays, json.dumps([0.0, 0.0, 0.0]))
    wait_until(lambda: len(states(run)) == 3)
    assert states(run)[2] == ("undone", "gone", 1)


def test_pipelines_that_share_gradients_each_have_their_remedy(begin):
    # GIVEN two pipelines of two stages with replicas: each first stage is the first rank of two groups
    run, delays = begin(POLICY + MITIGATE, [DELAY_S, 0.0, 0.0], copies=2, microbatches=4)
    # WHEN the first one's link is slow, and later the second one's too
    wait_until(lambda: len(tried(run)) == 2)
    say(delays, json.dumps([DELAY_S, 0.0, DELAY_S]))
    wait_until(lambda: len(tried(run)) == 4)
    # THEN each pipeline's stages run further ahead, the first one's throughout
    assert tried(run) == [(state, reason, link) for link in (0, 2) for state, reason in HELPED]
    assert len({one["switch"] for one in remedies(run) if one["state"] == "kept"}) == 2
    wait_until(lambda: in_force(run) == {(0, 1): True, (0, 2): False, (1, 3): False, (2, 3): True})


@pytest.mark.parametrize("once", ["voted", "switched"])
def test_a_stage_that_is_killed_while_all_switch_ends_the_others(environment, tmp_path, once):
    # GIVEN the ranks of a pipeline without a launcher, one of which is killed when all switch
    say(tmp_path / "delays", "[0.0, 0.0, 0.0]")
    spec = json.dumps(SPEC | {"delays": str(tmp_path / "delays"), "killed": {"rank": 1, "once": once}})
    with meeting_ranks(4, environment, tmp_path, JOB, spec) as ranks:
        wait_until(lambda: find_switches(tmp_path))
        (path,) = find_switches(tmp_path)
        ahead_S = (7, 5, 3, 1)

        def is_killed():
            # WHEN a request lets them run further ahead, until all see it in time
            with SwitchFile(path) as file:
                status = file.status()
                wanted = status.next_request(Setting.of_plan(ahead_S).value)
                if wanted is not None and all(one.most for one in status.stages):
                    file.write_request(wanted, ahead_S)
            return ranks[1].poll() is not None

        wait_until(is_killed)
        assert ranks[1].returncode == -signal.SIGKILL
        # THEN the others fail in their next exchange, as without a switch, and none hangs
        others = [ranks[rank] for rank in (0, 2, 3)]
        wait_until(lambda: all(one.poll() is not None for one in others), deadline_s=120)
        assert [one.returncode for one in others] == [1, 1, 1]
        assert all("Error" in one.stderr.read() for one in others)
