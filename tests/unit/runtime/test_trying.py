"""What some steps of a job come to, and why its processes do not see what they were given.

The sentences about what is missing are in the golden record (`tests.golden.said`).
"""

import textwrap

import pytest

from sftriage.runtime.doctor import found_of
from sftriage.runtime.first_step import flags_of, hides
from tests.golden.said import MISSING, NOTHING, ranks, report


def test_of_a_job_of_which_all_is_seen_nothing_is_missing():
    found = MISSING["all is seen"]
    assert found.missing == ()
    assert (found.ranks, found.steps, found.sync, found.models) == (2, 2, ("backward",), ("DistributedDataParallel",))
    assert found.stages == {"data": 0.1, "forward": 0.2, "backward": 0.6, "optimizer": 0.05, "other": 0.05}
    assert {one.name: (one.fired, one.share) for one in found.seams}["backward"] == (20, 0.6)
    assert {one.profiler: one.works for one in found.captures}["torch"]
    assert not any(one.works for one in found_of(NOTHING).captures if one.profiler in ("torch", "stacks"))


def test_collectives_are_listed_by_where_they_are_called_and_a_stage_that_none_is_in_is_no_sync_stage():
    none, one = MISSING["no exchange"], MISSING["an exchange"]
    assert (none.sync, none.collectives) == ((), {"all_reduce (async) in backward": 8})
    assert (one.sync, one.missing) == (("exchange",), ())


@pytest.mark.parametrize("found", MISSING.values(), ids=MISSING)
def test_lines_that_a_script_lacks_are_python(found):
    for one in found.missing:
        compile(textwrap.dedent("\n".join(one.lines)), "lines", "exec")


def test_a_script_with_a_monitor_is_known_by_it():
    assert MISSING["a good Monitor"].by_hand
    assert not found_of(ranks(report())).by_hand


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["python", "train.py", "-I"], ""),
        (["/usr/bin/python3.12", "-I", "train.py"], "I"),
        (["python", "-uE", "-m", "train", "-S"], "uE"),
        (["python", "-X", "importtime", "-W", "ignore", "-S", "train.py"], "S"),
        (["python", "-Wignore", "-Xdev", "train.py"], ""),
        (["python", "-Ic", "-S"], "I"),
        (["torchrun", "-I"], ""),
        ([], ""),
    ],
)
def test_flags_of_python_are_told_from_those_of_a_script(words, flags):
    assert flags_of(words) == set(flags)


def test_what_a_trainer_was_not_given_is_told_from_what_it_was():
    given = {"SFTRIAGE_RINGS": "/rings", "PYTHONPATH": "/ours:/before"}
    whole = {"SFTRIAGE_RINGS": "/rings", "PYTHONPATH": "/wrapper:/ours:/before"}
    assert hides(whole, ["python", "train.py"], given) == set()
    assert hides(whole | {"PYTHONPATH": "/wrapper"}, ["python", "train.py"], given) == {"PYTHONPATH"}
    assert hides(whole | {"SFTRIAGE_SEAMS": "off"}, ["python", "-I", "train.py"], given) == {"SFTRIAGE_SEAMS", "-I"}
    assert hides({}, ["python", "train.py"], given) == {"SFTRIAGE_RINGS", "PYTHONPATH"}
    # AND without --auto, PYTHONPATH is the job's own
    assert hides({"SFTRIAGE_RINGS": "/rings"}, ["python"], {"SFTRIAGE_RINGS": "/rings"}) == set()
