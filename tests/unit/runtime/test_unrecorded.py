"""Why nothing is recorded: what is said follows from what is known, and from no more than that."""

import signal
from dataclasses import replace

import pytest

from sftriage.model.windows import StageSchema
from sftriage.runtime.first_step import ROOM_BYTES, Facts, begun_sentence, flags_of, hides, why_nothing

AUTO, BY_HAND = Facts(auto=True, torch=2), Facts(auto=False, torch=2)
SEEN = replace(AUTO, fired={"backward": 7, "optimizer": 0})
OVER = replace(AUTO, over=True, status=0)
HIDDEN = frozenset({"PYTHONPATH"})

# facts, and the code of the reason
TABLE = [
    # a step is recorded, however the job ended
    (replace(OVER, steps=1, status=1), None),
    # while it runs
    (Facts(auto=True), "no_torch"),
    (Facts(auto=False), "no_torch"),
    (AUTO, "no_step"),
    (SEEN, "no_optimizer"),
    (replace(SEEN, compiling=True), "compiling"),
    (replace(AUTO, compiling=True), "compiling"),
    (replace(AUTO, fired={"backward": 1, "optimizer": 1}), "few_steps"),
    (replace(AUTO, fired={"backward": 3, "optimizer": 3}), "first_step"),
    (replace(AUTO, rings=2), "first_step"),
    (replace(SEEN, failed={"optimizer": "RuntimeError('broken')"}), "seam"),
    (replace(SEEN, failed={"data": "RuntimeError('broken')"}), "no_optimizer"),
    (replace(SEEN, free_bytes=ROOM_BYTES - 1), "no_room"),
    (replace(AUTO, rings=1, free_bytes=0), "first_step"),
    (BY_HAND, "no_monitor"),
    (replace(BY_HAND, rings=2), "monitor_unused"),
    (replace(BY_HAND, free_bytes=0), "no_room"),
    (replace(AUTO, by_hand=True), "monitor_elsewhere"),
    (replace(AUTO, by_hand=True, rings=1), "monitor_unused"),
    # what keeps the seams from the trainers
    (replace(AUTO, hidden=HIDDEN), "PYTHONPATH"),
    (replace(AUTO, hidden=HIDDEN | {"-I"}), "-I"),
    (replace(AUTO, hidden=frozenset({"-E"})), "-E"),
    (replace(AUTO, hidden=frozenset({"-S"})), "-S"),
    (replace(AUTO, hidden=HIDDEN | {"SFTRIAGE_RINGS"}), "SFTRIAGE_RINGS"),
    (replace(AUTO, hidden=frozenset({"SFTRIAGE_SEAMS"})), "SFTRIAGE_SEAMS"),
    # of which a Monitor needs only the place of the rings
    (replace(BY_HAND, hidden=HIDDEN | {"-I"}), "no_monitor"),
    (replace(BY_HAND, hidden=frozenset({"SFTRIAGE_RINGS"})), "SFTRIAGE_RINGS"),
    # and which is not why where some train under seams all the same
    (replace(SEEN, hidden=HIDDEN), "no_optimizer"),
    # how it ended
    (OVER, "no_step"),
    (replace(OVER, torch=0), "no_torch"),
    (replace(OVER, status=1), "failed"),
    (replace(OVER, status=137), "failed"),
    (replace(OVER, status=1, hidden=HIDDEN), "failed"),
    (replace(OVER, status=130, told=signal.SIGINT), "stopped"),
    (replace(OVER, status=0, told=signal.SIGTERM), "stopped"),
    (replace(OVER, status=None, seconds=20.0, compiling=True), "compiling"),
    (replace(OVER, status=0, seconds=20.0), "no_step"),
    (replace(OVER, status=1, seconds=20.0), "failed"),
]


@pytest.mark.parametrize(("facts", "code"), TABLE)
def test_the_reason_follows_from_the_facts(facts, code):
    reason = why_nothing(facts)
    assert (reason and reason.code) == code


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (
            replace(OVER, status=137),
            "the job ended by itself with exit status 137, before any step was recorded: SIGKILL ended it",
        ),
        (
            replace(OVER, status=3),
            "the job ended by itself with exit status 3, before any step was recorded: its own output says why",
        ),
        (replace(OVER, status=130, told=signal.SIGINT), "the job was stopped by SIGINT, before any step was recorded"),
        (
            replace(OVER, status=None, seconds=20.0, compiling=True),
            "the time was up after 20 s; until then torch compiles (torch.compile), and recording begins with the third"
            " step",
        ),
        (Facts(auto=True), "no process of the job on this host has imported torch so far"),
        (replace(SEEN, free_bytes=2048), "/dev/shm has no room for a recording (2 KiB are free)"),
    ],
)
def test_it_is_said_in_a_clause(facts, what):
    reason = why_nothing(facts)
    assert reason is not None
    assert reason.what == what


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


def test_the_first_recorded_step_is_one_line():
    schema = StageSchema(("data", "forward", "backward", "optimizer", "other"), ("backward",))
    said = begun_sentence(3, 3, schema, (71, 71))
    assert said == "Recording 3 ranks: data, forward, backward (sync), optimizer. First verdict about step 71."
    # AND of a run that has ended
    assert begun_sentence(1, 1, schema) == "Recording 1 rank: data, forward, backward (sync), optimizer."
    # AND where the first steps are long
    assert begun_sentence(2, 8, schema, (71, 15)) == (
        "Recording 2 of 8 ranks here: data, forward, backward (sync), optimizer. First verdict by step 71, or about "
        "step 15 if all steps take as long as these."
    )
