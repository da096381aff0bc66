"""Why a stage took so long: a truth table over what the trace has, and what was sampled meanwhile."""

import json

import pytest

from sftriage.errors import InputError
from sftriage.reduce.causes import DOES, NEXT_STEP, cause_of, cause_of_rank
from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, read_samples, spots
from sftriage.traces.manifest import CauseCode, Findings, Share, StageProfile

MS = 1_000_000
LOOP = Frame("main", "/job/train.py", 12, "batch = next(batches)")
GET = Frame("Images.__getitem__", "/job/data.py", 57, "time.sleep(0.04)")
SPIN = Frame("spin", "/job/statistics.py", 4, "total += 1")
LIB = "/venv/lib/python3.11/site-packages/"


def thread(stacks, times_ns, runs=0.0, waits=0.0, name="MainThread"):
    run_ns, waited_ns = (tuple(int(one * part) for one in times_ns) for part in (runs, waits))
    return ThreadSamples(name, tuple(stacks), run_ns, waited_ns)


def samples(*taken, stage="data", runs=0.0, waits=0.0, every_ms=5, step=1, other=None, sampler_waits=0.0):
    """Samples of one stage: each of the stacks so many times, one ``every_ms``, the first that long after it began.

    ``other`` is what another thread ran.
    """
    frames = list(dict.fromkeys((*(frame for stack, _ in taken for frame in stack), SPIN)))
    stacks = [tuple(map(frames.index, stack)) for stack, times in taken for _ in range(times)]
    times_ns = [(number + 1) * every_ms * MS for number in range(len(stacks))]
    spins = [(frames.index(SPIN),)] * len(stacks)
    return StackSamples(
        frames=tuple(frames),
        period_ns=min(every_ms, 5) * MS,
        time_ns_N=tuple(times_ns),
        step_N=(step,) * len(stacks),
        stage_N=(stage,) * len(stacks),
        since_ns_N=(0,) * len(stacks),
        training=thread(stacks, times_ns, runs, waits),
        others=() if other is None else (thread(spins, times_ns, other, name="statistics"),),
        sampler=thread((), times_ns, waits=sampler_waits),
    )


def profile(stage_s, rank, working_s=0.0):
    whole = dict.fromkeys(("step_s", "device_s", "collective_s", "kernels", "launches", "launch_s", "waiting_s"), 0.0)
    return StageProfile(
        source="t.json",
        rank=rank,
        first_step=1,
        last_step=5,
        steps=5,
        stage_s=stage_s,
        working_s=working_s,
        unseen_s=stage_s - working_s,
        **whole,
    )


def findings(stage_s=0.040, control_s=None, working_s=0.0, shares=(), beside="rank"):
    control = None if control_s is None else profile(control_s, 3)
    suspect = profile(stage_s, 1, working_s)
    return Findings(stage="data", suspect=suspect, control=control, shares=shares, summary="", beside=beside)


def within(function, file, source=""):
    return Frame(function, LIB + file, 9, source)


MM = Share(name="aten::mm", kind="operator", waits=False, self_s=0.036, calls=4.0)
WORKERS = within("_MultiProcessingDataLoaderIter._get_data", "torch/utils/data/dataloader.py")
PUTS = Frame("poll", "/usr/lib/python3.11/multiprocessing/connection.py", 257, "return self._poll(timeout)")

TABLE = {
    # (what stood there, whether the thread ran) -> what is said
    "a line that sleeps": (samples(((LOOP, GET), 8)), "sleep"),
    "a line that waits, for who knows what": (
        samples(((LOOP, Frame("Images.__getitem__", "/job/data.py", 57, "self.codec.next()")), 8)),
        "blocked",
    ),
    "Python that computes": (samples(((LOOP, Frame("decode", "/job/data.py", 3, "total += b")), 8), runs=1), "python"),
    "a line that says sleep, of a thread that runs": (samples(((LOOP, GET), 8), runs=1), "python"),
    "the workers of a loader": (samples(((LOOP, WORKERS, PUTS), 8)), "dataloader_workers"),
    "another thread": (
        samples(((LOOP, Frame("Condition.wait", "/usr/lib/python3.11/threading.py", 327, "waiter.acquire()")), 8)),
        "lock",
    ),
    "a fetch": (
        samples(((LOOP, Frame("SocketIO.readinto", "/usr/lib/python3.11/socket.py", 718, "")), 8)),
        "network",
    ),
    "a file": (samples(((LOOP, Frame("load", "/job/data.py", 8, "os.fsync(f.fileno())")), 8)), "disk"),
    "a checkpoint": (samples(((LOOP, within("save", "torch/serialization.py")), 8), runs=1), "checkpoint"),
    "garbage": (samples(((Frame("log", "/job/train.py", 90, "gc.collect()"),), 8), runs=1), "garbage_collection"),
    "a compiler": (
        samples(((LOOP, within("compile_fx", "torch/_inductor/compile_fx.py")), 8), runs=1),
        "recompilation",
    ),
    "a collective": (
        samples(((LOOP, within("barrier", "torch/distributed/distributed_c10d.py", "work.wait()")), 8)),
        "collective",
    ),
    "a core that is another's": (samples(((LOOP, GET), 8), runs=0.1, waits=0.9), "descheduled"),
    "a line that waits, while another thread has the interpreter": (
        samples(((LOOP,), 8), other=0.9),
        "gil",
    ),
    "another thread that is waited for": (
        samples(
            ((LOOP, Frame("Queue.get", "/usr/lib/python3.11/queue.py", 171, "self.not_empty.wait()")), 8), other=0.9
        ),
        "lock",
    ),
    "more work, on a host that is crowded": (
        samples(((LOOP, Frame("decode", "/job/data.py", 3, "total += b")), 8), runs=0.4, waits=0.6),
        "python",
    ),
    "nobody ran, and the sampler came late": (samples(((LOOP, GET), 8), every_ms=40), "stopped"),
    "nobody ran, and the sampler had no core": (samples(((LOOP, GET), 8), every_ms=40, sampler_waits=0.9), "sleep"),
    "no place in particular": (
        samples(*(((LOOP, Frame(f"f{n}", "/job/data.py", n)), 2) for n in range(4))),
        "unknown",
    ),
    "nothing that was sampled": (None, "unknown"),
}


@pytest.mark.parametrize(("suspect", "code"), TABLE.values(), ids=TABLE)
def test_the_cause_is_what_the_thread_was_found_at(suspect, code):
    # GIVEN a stage of 40 ms, 37 more than on the others, in which the trace has nothing WHEN its cause is asked for
    cause = cause_of(findings(), suspect, None, over_s=0.037)
    # THEN it is what the stacks show, in a sentence with the rank and the stage, and something to do about it
    assert cause.code == code
    assert code == "unknown" or cause.sentence.startswith("Rank 1 is slow in data: ")
    assert cause.next_step


def test_the_sentence_names_the_line_and_what_the_control_spends_there():
    # GIVEN a rank that sleeps for 38 of 40 ms in a line of its dataset, and a control that spends next to nothing there
    suspect = samples(((LOOP, GET), 38), ((LOOP,), 2), every_ms=1)
    control = samples(((LOOP,), 9), ((LOOP, GET), 1), every_ms=1)
    # WHEN the cause is asked for
    cause = cause_of(findings(control_s=0.003), suspect, control)
    # THEN rank, stage, time, function, file, line and the control are in one sentence, and it is sure
    assert cause.sentence == (
        "Rank 1 is slow in data: 38.0 of 40.0 ms in Images.__getitem__ (data.py:57: time.sleep(0.04)), which sleeps; "
        "rank 3 spends 0.3 ms there."
    )
    assert (cause.code, cause.sure, cause.compared_with) == ("sleep", True, 3)
    assert cause.place.model_dump() == {
        "function": "Images.__getitem__",
        "file": "/job/data.py",
        "line": 57,
        "source": "time.sleep(0.04)",
    }


SURE = {
    "most of it, in many samples": (samples(((LOOP, GET), 20)), 0.037, True),
    "too few samples": (samples(((LOOP, GET), 9)), 0.037, False),
    "nobody to compare with": (samples(((LOOP, GET), 20)), None, False),
    # 24 of 40 ms there, and the others' whole stage takes 5: 19 of 35 at least.
    "half of it may be the others', too": (samples(((LOOP, GET), 24), ((LOOP,), 16)), 0.035, False),
    "what waits for nobody knows what": (samples(((LOOP,), 20)), 0.037, False),
}


@pytest.mark.parametrize(("suspect", "over_s", "sure"), SURE.values(), ids=SURE)
def test_it_is_sure_where_most_of_it_is_in_one_place_and_cannot_be_the_others(suspect, over_s, sure):
    # GIVEN a capture of the suspect alone WHEN the cause is asked for
    # THEN it is sure where even the whole stage of the others leaves most of it to this place
    assert cause_of(findings(), suspect, None, over_s=over_s).sure is sure


def test_operators_that_took_it_are_the_cause_and_the_line_that_calls_them_the_place():
    # GIVEN 36 of 40 ms in one operator
    line = Frame("Model.forward", "/job/model.py", 33, "x = big @ big")
    suspect = samples(((LOOP, line), 20), runs=1)
    # WHEN the cause is asked for
    cause = cause_of(findings(working_s=0.036, shares=(MM,)), suspect, None, over_s=0.037)
    # THEN it is that operator, called from there
    assert cause.code == "operator"
    assert cause.sure
    assert "36.0 of 40.0 ms in aten::mm, called from Model.forward (model.py:33: x = big @ big)" in cause.sentence


def test_a_compiler_is_named_as_what_it_is_and_not_by_the_operators_it_runs():
    # GIVEN 36 of 40 ms in one operator, all of it below the compiler
    suspect = samples(((LOOP, within("compile_fx", "torch/_inductor/compile_fx.py")), 20), runs=1)
    # WHEN the cause is asked for THEN it is the compiler
    cause = cause_of(findings(working_s=0.036, shares=(MM,)), suspect, None, over_s=0.037)
    assert (cause.code, cause.sure) == ("recompilation", True)


@pytest.mark.parametrize("control_s", [0.045, 0.040, 0.037])
def test_a_stage_that_took_hardly_longer_has_no_cause(control_s):
    # GIVEN a rank that was captured by hand, and is as quick as its control but for 3 % of a step of 100 ms
    found = findings(control_s=control_s)
    found = found.model_copy(update={"suspect": found.suspect.model_copy(update={"step_s": 0.1})})
    # WHEN the cause is asked for
    cause = cause_of(found, samples(((LOOP, GET), 20)), samples(((LOOP,), 20)))
    # THEN none is invented
    assert (cause.code, cause.sure, cause.place) == ("unknown", False, None)


def test_the_same_wait_on_the_control_is_no_cause():
    # GIVEN a crowded host, where both wait for a core for half of the time, and the suspect sleeps besides
    suspect = samples(((LOOP, GET), 30), ((LOOP,), 10), runs=0.1, waits=0.3)
    control = samples(((LOOP,), 10), runs=0.5, waits=0.5)
    # WHEN the cause is asked for THEN it is what the suspect alone does
    assert cause_of(findings(control_s=0.010), suspect, control).code == "sleep"


def test_of_what_comes_back_the_other_steps_are_compared_with():
    # GIVEN a fault in step 2 alone: in the others its line is not met
    slow, quick = samples(((LOOP,), 0), ((LOOP, GET), 20), step=2), samples(((LOOP,), 20), step=1)
    both = StackSamples(
        frames=slow.frames,
        period_ns=5 * MS,
        time_ns_N=(*quick.time_ns_N, *(200 * MS + one for one in slow.time_ns_N)),
        step_N=quick.step_N + slow.step_N,
        stage_N=quick.stage_N + slow.stage_N,
        since_ns_N=(0,) * 20 + (200 * MS,) * 20,
        training=thread(((0,),) * 20 + slow.training.stacks_N, (0,) * 40),
        others=(),
        sampler=thread((), (0,) * 40),
    )
    # WHEN the cause is asked for
    cause = cause_of(findings(control_s=0.003, beside="steps"), both, None, fault_steps=(2,))
    # THEN it is said beside the others
    assert "in its other steps it spends 0.0 ms there" in cause.sentence
    assert cause.sure
    assert cause.compared_with is None


EVERYWHERE = ((LOOP, GET), 20), ((LOOP, SPIN), 20)
WHOLE_RANK = {
    "it waits for a core": (samples(*EVERYWHERE, runs=0.4, waits=0.5), "descheduled"),
    "it is stopped": (samples(*EVERYWHERE, every_ms=40), "stopped"),
    "another thread has the interpreter, even from the sampler": (samples(*EVERYWHERE, every_ms=40, other=0.9), "gil"),
    "another thread runs, and keeps nobody from anything": (samples(*EVERYWHERE, runs=0.9, other=0.9), "unknown"),
    "it runs all the time": (samples(*EVERYWHERE, runs=1), "unknown"),
    "nothing was sampled": (None, "unknown"),
}


@pytest.mark.parametrize(("sampled", "code"), WHOLE_RANK.values(), ids=WHOLE_RANK)
def test_a_rank_that_is_slow_everywhere_is_so_by_what_is_done_to_it(sampled, code):
    # GIVEN a rank that is 80 ms a step over its peers in no stage in particular WHEN the cause is asked for
    cause = cause_of_rank(1, sampled, 0.08)
    # THEN no line of it is blamed
    assert (cause.code, cause.place) == (code, None)
    assert cause.sentence.startswith("Rank 1 is slow in all its local stages, 80.0 ms a step over its peers")


def test_a_rank_that_was_captured_by_hand_is_not_said_to_be_slow():
    # GIVEN a healthy rank that a person had captured, and nobody beside it WHEN the cause is asked for
    cause = cause_of(findings(working_s=0.036, shares=(MM,)), samples(((LOOP, GET), 20)), None)
    # THEN what it did is said, and no cause
    assert (cause.code, cause.sure, cause.place) == ("unknown", False, None)
    assert cause.sentence == (
        "Whether data took too long is not known, for there is no other rank to compare with; most of data is in "
        "Images.__getitem__ (data.py:57: time.sleep(0.04)), 40.0 of 40.0 ms."
    )


@pytest.mark.parametrize("over_s", [0.0, -0.01])
def test_a_rank_that_was_no_slower_while_it_was_captured_has_no_cause(over_s):
    # GIVEN a rank that was suspected as a whole, and is as quick as its peers in the captured steps
    cause = cause_of_rank(1, samples(*EVERYWHERE, waits=0.5), over_s, "aten::mm")
    # THEN nothing that was done to it is why
    assert (cause.code, cause.sure) == ("unknown", False)
    assert cause.sentence == "Rank 1 was no slower than its peers while it was captured."


def test_a_rank_that_computes_all_the_time_has_more_to_do_or_a_slower_processor():
    # GIVEN a rank that is slow everywhere and runs meanwhile, in operators mostly WHEN its cause is asked for
    cause = cause_of_rank(1, samples(*EVERYWHERE, runs=1, every_ms=5), 0.08, "aten::mm")
    # THEN both that it may be are said, and neither is sure
    assert (cause.code, cause.sure) == ("operator", False)
    assert "it computes for 200.0 ms, first of all aten::mm; it has more work than they have" in cause.sentence


def test_every_code_has_words():
    assert set(DOES) == set(NEXT_STEP) == set(CauseCode.__args__)


def test_time_is_counted_from_where_the_stage_began_and_only_in_the_steps_that_are_wanted():
    # GIVEN two samples in one stage, the first 5 ms after it began, and one of another step
    taken = samples(((LOOP, GET), 2), ((LOOP,), 1))
    # WHEN its places are asked for THEN a sample stands for the time before it, and a function is named at its line
    first, second = spots(taken, "data", {1})
    assert (first.frame, first.samples, first.weight_ns) == (GET, 2, 10 * MS)
    assert (second.frame, second.weight_ns) == (LOOP, 5 * MS)
    assert spots(taken, "data", {7}) == spots(taken, "forward") == []


def document(**changes):
    columns = {name: [1] for name in ("time_ns", "step", "since_ns")}
    times = {"run_ns": [1], "waited_ns": [1]}
    columns |= {"schema_version": 1, "period_s": 0.005, "stage": ["data"], "source": ["x"]}
    return {
        "shared": {"frames": [{"name": "f\x1b[2J", "file": "/job/a.py", "line": 3}]},
        "profiles": [{"name": "MainThread", "samples": [[0]]}],
        "sftriage": {**columns, "threads": [times], "sampler": times, **changes},
    }


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"shared": {"frames": []}},
        {**document(), "profiles": [{"name": "", "samples": [[0], [0]]}]},
        {**document(), "profiles": [{"name": "", "samples": [[7]]}]},
        document(threads=[]),
        document(sampler={"run_ns": [], "waited_ns": [1]}),
        document(source=[]),
        document(time_ns=[1, 2]),
        document(schema_version=2),
        document(stage=[4]),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(tmp_path, broken):
    # GIVEN a file of stacks that somebody has touched WHEN it is read THEN that is one error that names it
    (tmp_path / "s.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"s\.json: not sampled stacks"):
        read_samples(tmp_path / "s.json")


def test_names_in_a_file_do_nothing_to_a_terminal(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(document()))
    assert read_samples(tmp_path / "s.json").frames[0].function == "f?[2J"
    with pytest.raises(InputError, match="No such file"):
        read_samples(tmp_path / "none.json")
