"""A remedy is tried on a straggler that stays where a policy allows it, measured in turns, and kept or undone."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.mitigate.advice import Straggler
from sftriage.mitigate.loop import PARTS, SLOW_STEPS, SWITCH_S, JobNow, RemedyLoop
from sftriage.mitigate.switching import UNLIKE, Request, Setting, StageTimes, SwitchStatus
from sftriage.policy.schema import Mitigate

ALLOWED = Mitigate(remedies=("stragglar",), min_saving="2%", steps=10, cooldown="1h")
LATE = Straggler("rank 5", "data", (5,), 8, 0.2, 0.5)
GROUP = SwitchStatus("rank-0.0.switch", tuple(range(8)), 40, 40, 0, -1, Request(0, 0, 0), 0.175, 1 << 20)

LINK_ALLOWED = Mitigate(remedies=("pipeline",), min_saving="2%", steps=10, cooldown="1h")
STAGES = tuple(
    StageTimes(0.01, 0.02, there_s, back_s, 8)
    for there_s, back_s in ((0, 0.001), (0.001, 0.03), (0.03, 0.001), (0.001, 0))
)
PIPELINE = SwitchStatus("rank-0.0.switch", (0, 1, 2, 3), 40, 40, 0, -1, Request(0, 0, 0), stages=STAGES, microbatches=8)


class Job:
    """A job that takes its steps, of 8 ranks that switch on request, and the loop beside it."""

    def __init__(self, allowed=ALLOWED, *, helps_s=0.05, straggler=LATE, switches=True, beside=()):
        self.loop, self.events, self.allowed, self.straggler = RemedyLoop(), [], allowed, straggler
        self.step, self.helps_s, self.switches = 100, helps_s, switches
        self.group, self.steps_s, self.time_s = GROUP, {}, 1000.0
        self.beside = list(beside)

    def turn(self, steps=3):
        for _ in range(steps):
            self.step += 1
            jitter_s = 0.001 * (self.step * 7 % 5)
            helping = sum(bool(one.value) for one in (self.group, *self.beside))
            self.steps_s[self.step] = 0.5 + jitter_s - self.helps_s * helping
        self.time_s += 1.0
        self.loop, event = self.loop.after(self.now())
        self.events += [] if event is None else [event]
        self.group, *self.beside = map(self.switched, (self.group, *self.beside))

    def switched(self, group):
        value = self.loop.wanted([group])[group.name].value
        changes = self.switches and group.value != value
        return replace(group, value=value, since_step=self.step + 1) if changes else group

    def now(self):
        groups = [] if self.group is None else [self.group, *self.beside]
        return JobNow(self.time_s, 0, self.step, self.steps_s, groups, self.straggler, True, self.allowed)

    def turns(self, number):
        for _ in range(number):
            self.turn()
        return [(event.state, event.reason) for event in self.events]


def test_a_remedy_that_helps_is_tried_in_turns_and_kept():
    # GIVEN a straggler beyond the break-even, in a job that has taken the hook in, under a policy that allows it
    job = Job()
    # WHEN time goes on
    states = job.turns(40)
    # THEN it is tried, and kept
    assert states == [("trying", "worthwhile"), ("kept", "helps")]
    assert job.loop.wanted([GROUP]) == {GROUP.name: Setting(6)}
    # AND what is on record is what was expected, and what was measured of as many steps with it as without
    trying, kept = job.events
    assert trying.numbers["expected_s"] == pytest.approx(0.175 * (1 - (9 / 7) / 1.75))
    assert trying.numbers["break_even_s"] == pytest.approx(0.0393, abs=1e-4)
    assert kept.numbers["saves_s"] == pytest.approx(0.05, abs=1e-3)
    assert kept.numbers["on_steps"] == kept.numbers["off_steps"] == 20
    # AND both kinds of steps lie between one another
    firsts = job.loop.trials[GROUP.name].parts
    assert len(firsts) == len(PARTS)
    assert all(later - first >= ALLOWED.steps for first, later in pairwise(firsts))


TRIED, HELPS = "trying worthwhile", "kept helps"
NO_HELP, ADVISED = "undone no_help", "advised not_allowed"
FEW = Mitigate.model_construct(remedies=(), min_saving="2%")
COURSES: dict[str, tuple[dict, list[tuple[dict, int, list[str]]]]] = {
    "it changes nothing": ({"helps_s": 0.0}, [({}, 40, [TRIED, NO_HELP])]),
    "it costs": ({"helps_s": -0.02}, [({}, 40, [TRIED, NO_HELP])]),
    "it saves less than 2%": ({"helps_s": 0.009}, [({}, 40, [TRIED, NO_HELP]), ({"time_s": 4700.0}, 1, [TRIED])]),
    "the policy does not say mitigate": ({"allowed": None}, [({}, 20, [ADVISED])]),
    "the policy names no remedy": ({"allowed": FEW}, [({}, 20, [ADVISED])]),
    "no rank is late": ({"straggler": None}, [({}, 3, [])]),
    "a host is late": ({"straggler": replace(LATE, ranks=(4, 5))}, [({}, 3, [])]),
    "it is late by less than the break-even": ({"straggler": replace(LATE, late_s=0.03)}, [({}, 3, [])]),
    "nothing has been exchanged yet": ({}, [({"group": replace(GROUP, exchange_s=0.0)}, 3, [])]),
    "it is in no group": ({}, [({"group": replace(GROUP, ranks=tuple(range(8, 16)))}, 3, [])]),
    "three ranks gain nothing": ({}, [({"group": replace(GROUP, ranks=(3, 4, 5))}, 3, [])]),
    "an exchange is next to nothing of a step": ({}, [({"group": replace(GROUP, exchange_s=0.01)}, 3, [])]),
    # (nothing is tried before all ranks are known to do as usual)
    **{
        f"before all do as usual: {about}": (
            {"switches": False},
            [({"group": replace(GROUP, **about)}, 3, []), ({"group": GROUP}, 1, [TRIED])],
        )
        for about in ({"value": 3}, {"value": None}, {"request": UNLIKE}, {"request": Request(7, 43, 3)})
    },
    # (nothing was shown against it: it may be tried at once)
    "the job begins anew": (
        {},
        [
            ({}, 40, [TRIED, HELPS]),
            ({"group": replace(GROUP, name="rank-0.1.switch")}, 1, ["undone restarted"]),
            ({}, 1, [TRIED]),
        ],
    ),
    "its ranks do not switch": (
        {"switches": False},
        [({}, int(SWITCH_S), [TRIED]), ({}, 3, ["undone not_switched"])],
    ),
}


@pytest.mark.parametrize(("options", "course"), COURSES.values(), ids=COURSES)
def test_the_course_of_a_remedy(options, course):
    """GIVEN a job WHEN some of it changes, and turns go on THEN remedies come to these states, the last in force."""
    job = Job(**options)
    for change, turns, expected in course:
        vars(job).update(change)
        known = len(job.events)
        assert [" ".join(one) for one in job.turns(turns)[known:]] == expected
    in_force = bool(job.events) and job.events[-1].state in ("trying", "kept")
    assert job.loop.wanted([job.group]) == {job.group.name: Setting(6 if in_force else 0)}


@pytest.mark.parametrize("turns", [3, 40])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"straggler": None}, "gone"),
        ({"straggler": replace(LATE, ranks=(2,))}, "moved"),
        ({"allowed": None}, "not_allowed"),
    ],
)
def test_a_remedy_is_undone_when_its_cause_is_gone(turns, change, reason):
    # GIVEN a remedy that is being tried, or kept WHEN something changes THEN it is undone, whatever it had shown
    job = Job()
    job.turns(turns)
    known = len(job.events)
    for name, value in change.items():
        setattr(job, name, value)
    assert job.turns(1)[known:] == [("undone", reason)]
    assert job.loop.wanted([GROUP]) == {GROUP.name: Setting()}
    # AND a straggler that has moved is another one, which is tried
    assert job.turns(1)[known + 1 :] == ([("trying", "worthwhile")] if reason == "moved" else []) or not job.allowed


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        # none: the job ends, or will begin anew
        ([], None),
        # of a job of several groups, others alone: who takes over has not heard of all hosts of this one yet
        ([replace(PIPELINE, name="rank-4.0.switch", ranks=(4, 5, 6, 7), stages=())], None),
        ([replace(GROUP, name="rank-0.1.switch", ranks=(0, 5))], None),
        # its ranks have joined another one in its place
        ([replace(GROUP, name="rank-0.1.switch")], "restarted"),
    ],
)
@pytest.mark.parametrize(("turns", "resumed"), [(3, False), (3, True), (40, False), (40, True)])
def test_an_unreported_group_keeps_its_remedy_until_it_is_known(turns, resumed, reported, reason):
    # GIVEN a remedy on trial or kept WHEN no host reports its group any more, or yet
    job = Job()
    job.turns(turns)
    loop = RemedyLoop.resumed(job.events) if resumed else job.loop
    now = replace(job.now(), switches=reported)
    # THEN it is undone only if it is certain that it is not in force
    after, event = loop.after(now)
    assert (event and event.reason) == reason
    if reason is None:
        assert after.after(now) == (after, None)
    # AND if the ranks begin anew, it is; before they are known to, a controller that takes over waits
    assert loop.after(replace(now, attempt=1))[1].reason == "restarted"
    if reason is None:
        assert loop.after(replace(now, attempt=-1)) == (loop, None)


def test_a_new_controller_undoes_an_interrupted_trial_once_its_group_reports():
    job = Job()
    job.turns(3)
    loop = RemedyLoop.resumed(job.events)
    # GIVEN a group of which some host says nothing WHEN it does again THEN that goes on record, and not before
    assert loop.after(replace(job.now(), switches=[])) == (loop, None)
    assert loop.after(job.now())[1].reason == "interrupted"


@pytest.mark.parametrize(("turns", "state"), [(3, "trying"), (40, "kept")])
def test_a_new_controller_keeps_kept_remedies_and_undoes_trials(turns, state):
    # GIVEN a controller that was killed in a trial, or after it
    job = Job()
    job.turns(turns)
    assert job.events[-1].state == state
    # WHEN another one goes on by what is on record
    job.loop = RemedyLoop.resumed(job.events)
    known = len(job.events)
    if state == "kept":
        assert job.turns(3)[known:] == []
        assert job.group.value == 6
    else:
        assert job.loop.wanted([GROUP]) == {GROUP.name: Setting()}
        # THEN a trial of which steps are missing is begun anew
        assert job.turns(2)[known:] == [("undone", "interrupted"), ("trying", "worthwhile")]


@given(st.lists(st.sampled_from(["turn", "gone", "back", "forbid", "allow", "takeover", "restart"]), max_size=80))
@settings(max_examples=60)
def test_only_recorded_and_allowed_remedies_are_ever_in_force(events):
    job = Job()
    for event in events:
        if event == "takeover":
            job.loop = RemedyLoop.resumed(job.events)
        elif event == "restart":
            job.group = replace(job.group, name=f"rank-0.{job.step}.switch", value=0, since_step=-1)
        elif event in ("gone", "back"):
            job.straggler = None if event == "gone" else LATE
        elif event in ("forbid", "allow"):
            job.allowed = None if event == "forbid" else ALLOWED
        job.turn()
        if job.loop.wanted([job.group])[job.group.name].value:
            assert job.allowed is not None
            assert job.events[-1].state in ("trying", "kept")
            assert job.events[-1].switch == job.group.name


HEALED = tuple(one._replace(there_s=0.001, back_s=0.001) for one in STAGES)


def pipelined(allowed=LINK_ALLOWED, stages=STAGES, **options):
    """A job whose pipeline has been as it is for long."""
    job = Job(allowed, straggler=None, **options)
    job.group = replace(PIPELINE, stages=stages)
    job.turn()
    job.turn(SLOW_STEPS - 3)
    assert not job.events
    return job


def test_stages_run_further_ahead_of_a_slow_link_if_it_helps():
    # GIVEN a pipeline whose second link is slow, and no late rank
    job = pipelined()
    # WHEN time goes on THEN it is tried, and kept, with the same plan
    assert job.turns(40) == [("trying", "worthwhile"), ("kept", "helps")]
    trying, kept = job.events
    assert (trying.remedy, trying.rank, trying.numbers["delay_s"]) == ("pipeline", 1, 0.03)
    assert job.loop.wanted([job.group]) == {job.group.name: Setting.of_plan(kept.ahead_S)}
    assert kept.ahead_S == trying.ahead_S != (4, 3, 2, 1)
    assert max(kept.ahead_S) <= 8
    # AND a controller that goes on by what is on record wants the same
    assert RemedyLoop.resumed(job.events).wanted([job.group]) == job.loop.wanted([job.group])


def test_a_link_must_be_slow_at_every_look():
    # GIVEN a healthy pipeline on a busy machine, where now this link seems to be slow and now that one, or none
    job = Job(None, straggler=None)
    first, none, second = (STAGES[0]._replace(back_s=0.03), *HEALED[1:]), HEALED, STAGES
    for stages in (first, second, first, none, second, second, none) * 3:
        job.group = replace(PIPELINE, stages=stages)
        # THEN no link is named
        job.turn(SLOW_STEPS)
        assert not job.events
        job.group = replace(PIPELINE, stages=HEALED)
        job.turn()
    # AND one that goes on is, once
    job.group = replace(PIPELINE, stages=second)
    job.turn()
    assert [job.turns(1) for _ in range(SLOW_STEPS // 3)][-2:] == [[], [("advised", "not_allowed")]]


@pytest.mark.parametrize("turns", [3, 40])
@pytest.mark.parametrize(
    ("there_s", "back_s", "reason"),
    [
        (0.001, 0.001, "gone"),
        # who is ahead waits for no gradients, and goes on as if they were late
        (0.001, 0.03, "gone"),
        (0.03, 0.02, None),
    ],
)
def test_a_plan_is_undone_once_the_link_has_healed(turns, there_s, back_s, reason):
    job = pipelined()
    job.turns(turns)
    known = len(job.events)
    stages = list(STAGES)
    stages[1], stages[2] = stages[1]._replace(back_s=back_s), stages[2]._replace(there_s=there_s)
    job.group = replace(job.group, stages=tuple(stages))
    assert job.turns(1)[known:] == ([] if reason is None else [("undone", reason)])


ROOMLESS = tuple(one._replace(most=4 - at) for at, one in enumerate(STAGES))
ALIKE = tuple(one._replace(there_s=0.01, back_s=0.01) for one in STAGES)
LINKS = {
    "it does not help": ({"helps_s": 0.0}, [TRIED, NO_HELP]),
    "the policy does not say mitigate": ({"allowed": None}, [ADVISED]),
    "the policy names another remedy": ({"allowed": ALLOWED}, [ADVISED]),
    "there is room for 1F1B alone": ({"stages": ROOMLESS}, ["advised no_room"]),
    "no link stands out": ({"stages": ALIKE}, []),
    "a stage has not measured": ({"stages": (*STAGES[:3], StageTimes(0.0, 0.0, 0.0, 0.0, 8))}, []),
}


@pytest.mark.parametrize(("options", "expected"), LINKS.values(), ids=LINKS)
def test_a_link_without_remedy_is_named_once(options, expected):
    job = pipelined(**options)
    assert [" ".join(one) for one in job.turns(50)] == expected
    assert job.loop.wanted([job.group]) == {PIPELINE.name: Setting()}


def test_an_advised_link_is_reported_healed_and_named_again_if_slow_again():
    # GIVEN a slow link that was named, and no more
    job = pipelined(None)
    assert job.turns(3) == [("advised", "not_allowed")]
    slow, healed = job.group, replace(job.group, stages=HEALED)
    # WHEN it heals THEN one event says so, also after a takeover by another controller
    for loop in (job.loop, RemedyLoop.resumed(job.events)):
        job.loop, job.events, job.group = loop, [], healed
        assert job.turns(3) == [("advised", "gone")]
    # AND if it is slow again, it is named again
    job.group, job.events = slow, []
    assert job.turns(40) == [("advised", "not_allowed")]


OTHER_PIPELINE = replace(PIPELINE, name="rank-4.0.switch", ranks=(4, 5, 6, 7))


def states(events):
    return [(event.state, event.reason, event.switch) for event in events]


def test_each_group_has_its_remedy_and_one_trial_runs_at_a_time():
    # GIVEN two pipelines, each of which has a slow link
    job = pipelined(beside=[OTHER_PIPELINE])
    names = [PIPELINE.name, OTHER_PIPELINE.name]
    # WHEN time goes on THEN what helps one is kept before it is tried on the other, and stays
    job.turns(80)
    helped = [
        (state, reason, name) for name in names for state, reason in (("trying", "worthwhile"), ("kept", "helps"))
    ]
    assert states(job.events) == helped
    assert [one.value != 0 for one in (job.group, *job.beside)] == [True, True]
    # AND a controller that goes on by what is on record wants the same
    assert RemedyLoop.resumed(job.events).wanted([job.group, *job.beside]) == job.loop.wanted([job.group, *job.beside])
    # WHEN the first link heals THEN it alone is undone
    job.group = replace(job.group, stages=HEALED)
    job.turns(5)
    assert states(job.events)[4:] == [("undone", "gone", PIPELINE.name)]
    assert [one.value != 0 for one in (job.group, *job.beside)] == [False, True]


def test_a_trial_restarts_if_another_remedy_is_undone_meanwhile():
    # GIVEN a remedy that is kept, and another one that is tried
    job = pipelined(beside=[OTHER_PIPELINE])
    job.turns(33)
    assert [event.state for event in job.events] == ["trying", "kept", "trying"]
    # WHEN what the first one was for is gone THEN the trial's steps are not to be compared any more
    job.group = replace(job.group, stages=HEALED)
    job.turns(4)
    assert [one[:2] for one in states(job.events)[3:]] == [
        ("undone", "gone"),
        ("undone", "interrupted"),
        ("trying", "worthwhile"),
    ]


def test_a_late_rank_and_a_slow_link_in_two_groups_both_get_remedies():
    # GIVEN a rank that is late, beside a pipeline with a slow link
    job = Job(Mitigate(remedies=("stragglar", "pipeline"), steps=10), beside=[OTHER_PIPELINE])
    job.turns(80)
    assert [(event.remedy, event.state) for event in job.events] == [
        (remedy, state) for remedy in ("stragglar", "pipeline") for state in ("trying", "kept")
    ]
    # WHEN it is late no more THEN the pipeline's stays
    job.straggler = None
    job.turns(5)
    assert states(job.events)[4:] == [("undone", "gone", GROUP.name)]
