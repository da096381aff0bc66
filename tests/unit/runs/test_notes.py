"""What a journal has beside its windows, on the pages."""

import json

import msgspec
import pytest

from sftriage.model.captures import CaptureResult, ManualRequest
from sftriage.model.events import (
    VERSION,
    CostMeasured,
    DiskRecovered,
    EvidenceGathered,
    FollowUpDecided,
    JobPaused,
    ManualRequestDecided,
    NamedPolicy,
    PolicyChanged,
    RemedyChanged,
    TakenOver,
)
from sftriage.runs.decisions import DecisionGroup, captures_in, log_of
from sftriage.runs.following import JournalTail, request_row
from sftriage.runs.glance import outlook
from sftriage.runs.liveness import DISK, note_problem
from tests.scenario import NOW_S, Recorder, decision, request_of, row, verdict
from tests.unit.conftest import asked_for
from tests.unit.web.asking import NASTY, Seen, text_of

ASK = ManualRequest("a-1", (1,), "ada", "why is the loader slow?")
CHANGE = {"time_s": NOW_S, "kind": "changed", "policies": [{"name": "default"}], "problems": [], "later": []}


@pytest.fixture
def journal(run):
    made = Recorder(run.directory.decisions)
    yield made
    made.close()


def cost(first: int, last: int, cost_s: float | None = 0.82, attempt: int = 0) -> dict:
    steps = {"first_step": first, "last_step": last}
    return {"time_s": NOW_S, "attempt": attempt, **steps, "cost_s": cost_s, "before_s": None if cost_s is None else 0.1}


def test_a_pause_is_on_record_on_the_page_and_on_the_terminal(run, journal, sftriage):
    # GIVEN a job that paused
    run.decide(verdict(200))
    journal.append(JobPaused(NOW_S, 0, 240, 240, 55.2, "backward", "in_sync"))
    # THEN it is among the decisions
    sentence = "The job paused for 55.2 s in step 240 (all ranks, in backward)."
    assert sentence in text_of(run.get("/decisions"))
    assert sentence in sftriage("decisions", "--run", run.directory.path).out


def test_what_people_ask_for_is_on_record(run, journal):
    # GIVEN a person whose capture is made, and one whose is not
    journal.append(
        ManualRequestDecided(
            ASK, decision(verdict(100), "capture", "asked for by ada", requests=(request_of("a-1-r1", 1),))
        )
    )
    journal.append(ManualRequestDecided(ASK, decision(verdict(110), "throttle", "captures_left")))
    # WHEN the decisions are read THEN who asked, why, and what was decided is there
    seen = text_of(run.get("/decisions"))
    for words in ("ada asked for a capture: why is the loader slow?", "asked for, and ? left", "Ask for fewer"):
        assert words in seen
    assert "Capture of rank 1 is under way" in seen
    # AND by itself
    only = text_of(run.get("/decisions?outcome=ask"))
    assert "asked for 2" in only
    assert run.get("/decisions?outcome=throttle").text.count("<li>") == 1
    # AND the capture has a page while it runs, though no window led to it
    assert "ada asked for it" in text_of(run.get("/captures/a-1-r1"))
    assert "Capture of rank 1 is under way" in text_of(run.get())


def test_what_was_done_about_a_straggler_is_on_record_with_its_effect(run, journal):
    # GIVEN a remedy that was tried, and kept
    of = {"attempt": 0, "remedy": "stragglar", "rank": 2, "who": f"rank 2 {NASTY}", "where": "data"}
    numbers = {"on_s": 0.281, "off_s": 0.325, "saves_s": 0.044, "error_s": 0.0016}
    run.decide(verdict(100, "suspect"))
    journal.append(RemedyChanged(**of, time_s=NOW_S, step=109, state="trying", reason="worthwhile"))
    journal.append(RemedyChanged(**of, time_s=NOW_S + 60, step=300, state="kept", reason="helps", numbers=numbers))
    # WHEN the decisions are read THEN its effect is there, by itself too, and as text
    seen = run.get("/decisions?outcome=remedy").text
    assert seen.count("<li>") == 2
    assert "a step is 281.0 ms with it, and 325.0 ms without, give or take 1.6 ms" in text_of(run.get("/decisions"))
    assert NASTY not in seen


def test_the_page_of_what_a_person_asked_for_says_who_and_why_and_no_rule(run, store, trace, make_manifest):
    store.put("a-1-r2", trace, lambda artefact: asked_for(make_manifest("a-1-r2", artefact)))
    seen = text_of(run.get("/captures/a-1-r2"))
    assert "because of ada asked for it: why is the loader slow? rule none, a person asked; under" in seen
    assert "all local stages" not in seen


def test_a_capture_that_hangs_leads_to_another(run, journal):
    # GIVEN a stall whose capture got no answer, and what was done about that
    hung = verdict(100, "stalled", reasons=("in_sync",))
    run.decide(hung, "capture", "rule hang", requests=(request_of("c-9"),))
    run.ended(CaptureResult("c-9", 2, "failed", "no answer long past its time-box"))
    journal.append(FollowUpDecided("c-9", decision(hung, "capture", "rank 2 hangs", requests=(request_of("c-10"),))))
    # WHEN the page is read THEN both belong to the present trouble, and say why they are there
    seen = run.get()
    assert {"/captures/c-9", "/captures/c-10"} <= {a.get("href") for tag, a in Seen(seen.text).tags if tag == "a"}
    assert "Because capture c-9 got no answer from its rank" in text_of(run.get("/decisions"))
    assert "It is to show where the rank hangs" in text_of(run.get("/captures/c-10"))
    assert "came to nothing" in text_of(run.get("/captures/c-9"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "The policy was changed: now under default."),
        ({"later": ["detection.window_steps"]}, "detection.window_steps will take effect with another run."),
        ({"kind": "refused", "problems": ["policy.yaml:3:5: no duration"]}, "policy.yaml:3:5: no duration"),
        ({"kind": "refused"}, "not valid; what was in force stays: default."),
        ({"kind": "restored"}, "again the one in force: default."),
    ],
)
def test_changes_of_the_policy_are_on_record(run, journal, change, said):
    journal.append(msgspec.convert(CHANGE | change, PolicyChanged))
    assert said in text_of(run.get("/decisions?outcome=policy"))


@pytest.mark.parametrize(
    ("cost_s", "said"),
    [(0.82, "cost the job 820 ms in all"), (-0.1, "nothing that could be measured"), (None, "could not be measured")],
)
def test_what_captures_cost_is_beside_them(captured, cost_s, said):
    # GIVEN what a capture has cost
    journal = Recorder(captured.directory.decisions)
    journal.append(CostMeasured(**cost(159, 165, cost_s)))
    journal.close()
    # WHEN the decisions, and the capture's own page, are read THEN both say it
    assert said in text_of(captured.get("/decisions?outcome=cost"))
    page = text_of(captured.get("/captures/c-1"))
    assert said in page
    # AND what its own rank paid
    assert "cost on that rank start 100 ms, stop 200 ms" in page
    assert ("820 ms so far" in text_of(captured.get())) is (cost_s == 0.82)


def test_a_cost_that_is_in_the_manifest_needs_no_journal(captured, store):
    from sftriage.traces.manifest import CostInfo

    store.note("c-1", CostInfo(first_step=159, last_step=165, cost_s=0.5, before_s=0.1, captures=2))
    assert "shared by 2 captures" in text_of(captured.get("/captures/c-1"))


@pytest.mark.parametrize(
    ("first", "last", "attempt", "found"),
    [(159, 165, 0, True), (100, 160, 0, True), (164, 170, 0, True), (165, 170, 0, False), (159, 165, 1, False)],
)
def test_a_cost_is_of_the_captures_that_measured_its_steps(first, last, attempt, found):
    of = CostMeasured(0.0, attempt, first, last, 1.0, 0.1)
    stored = CaptureResult("c-1", 2, "stored", first_step=160, last_step=164)
    results = [stored, CaptureResult("c-2", 2, "failed")]
    assert list(captures_in(of, {"c-1": 0, "c-2": 0}, results)) == ([stored] if found else [])


def test_what_gpus_say_is_on_record_and_what_says_nothing_is_not(run, journal):
    seen = {"time_s": NOW_S, "first_step": 100, "last_step": 149, "gpus": {"problem": None, "of": {}}}
    journal.append(EvidenceGathered(**seen, remarks=("GPU 2 is held back by its power limit",)))
    journal.append(EvidenceGathered(**seen))
    journal.append(EvidenceGathered(time_s=NOW_S, first_step=100, last_step=149, ready_fraction=1.0))
    assert "held back by its power limit" in text_of(run.get("/decisions"))
    assert run.get("/decisions?outcome=evidence").text.count("<li>") == 1
    assert "could not be read" not in text_of(run.get())


@pytest.mark.parametrize(
    "damage",
    [
        {"type": "cost"},
        {"type": "policy", **CHANGE, "kind": "<script>"},
        {"type": "evidence", "time_s": "now", "first_step": 1, "last_step": 2},
        {"type": "follow_up", "capture_id": 7, "decision": {}},
        {"type": "manual_request", "request": {}, "decision": {}},
    ],
)
def test_damage_is_passed_over_and_counted(tmp_path, damage):
    path = tmp_path / "decisions.jsonl"
    sound = {"type": "cost", **cost(1, 2)}
    path.write_text("".join(json.dumps({**one, "version": VERSION}) + "\n" for one in (damage, sound)))
    tail = JournalTail(path)
    tail.follow()
    assert (len(tail.notes), tail.skipped) == (1, 1)


def test_markup_in_what_others_wrote_is_text(run, journal):
    asked = ManualRequest("a-1", (1,), NASTY, NASTY)
    journal.append(ManualRequestDecided(asked, decision(verdict(100), "capture", NASTY, requests=(request_of("a-1"),))))
    journal.append(
        msgspec.convert(CHANGE | {"policies": [{"name": NASTY}], "problems": [NASTY], "later": [NASTY]}, PolicyChanged)
    )
    journal.append(EvidenceGathered(time_s=NOW_S, first_step=100, last_step=149, remarks=(NASTY,)))
    journal.append(TakenOver(NOW_S, NASTY, 7))
    for target in ("/", "/decisions", "/captures/a-1"):
        answer = run.get(target)
        assert answer.status == 200
        assert NASTY not in answer.text
        assert "&lt;img src=x" in answer.text


def test_notes_stand_between_windows_by_their_time():
    rows = [row(20), row(30), row(200, "suspect")]
    notes = [
        CostMeasured(rows[1].time_s + 1.0, 0, 1, 2, 1.0, 0.1),
        PolicyChanged(rows[2].time_s, "changed", (NamedPolicy("x"),)),
    ]
    page = log_of(rows, notes, {})
    kinds = [one.row.first_step if isinstance(one, DecisionGroup) else one.kind for one in page.entries]
    assert kinds == ["policy", 200, "cost", 30]
    assert page.counts == {"ignore": 3, "cost": 1, "policy": 1}


def test_what_followed_an_earlier_trouble_does_not_belong_to_this_one():
    rows = [row(20, "stalled", "capture", requests=(request_of("c-1"),)), row(30), row(40, "suspect", "throttle")]
    hung = decision(verdict(20, "stalled"), "capture", "it hangs", requests=(request_of("c-2"),))
    beside = request_row(FollowUpDecided("c-1", hung))
    assert outlook(rows, {}, [beside]).captures == ()


def test_what_a_disk_has_cost_is_on_record_and_while_it_takes_nothing_the_page_says_so(run, journal):
    # GIVEN a run of which a full disk has cost some windows
    journal.window(verdict(20), decision(verdict(20)))
    lost = {"lost": {"windows": 12}, "lost_steps": (300, 460)}
    journal.append(DiskRecovered(time_s=NOW_S, since_s=NOW_S - 60, problem="No space left", late={"steps": 9}, **lost))
    said = "can be written again after 60 s (No space left). Written late: 9 steps. Lost: 12 windows (of steps 300 to"
    assert said in text_of(run.get())
    assert said in text_of(run.get("/decisions?outcome=disk"))
    # WHEN it takes nothing once more THEN that is said as long as it is so
    rings = run.directory.path / "rings"
    assert "cannot be written" not in text_of(run.get())
    note_problem(rings / DISK, "Read-only file system")
    assert "The run directory cannot be written (Read-only file system)." in text_of(run.get())
    note_problem(rings / DISK, None)
    assert "cannot be written" not in text_of(run.get())
    # AND one that cost nothing is no alarm
    journal.append(DiskRecovered(time_s=NOW_S, since_s=NOW_S - 1, problem="No space left", late={"steps": 3}))
    assert "Nothing is lost" not in text_of(run.get("/captures/none"))
    assert text_of(run.get("/decisions?outcome=disk")).count("Nothing is lost") == 1
