"""Why a stage was slow: a truth table over the contents of the trace and the samples."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from msgspec import structs

from sftriage.reduce.causes import cause_of, cause_of_rank, in_torch, in_workers, left_open
from sftriage.reduce.samples import Frame, StackSamples, WorkerSamples
from sftriage.traces.manifest import CauseCode, Findings, KernelShare, Share, StageProfile
from sftriage.words.decisions import DOES, NEXT_STEP
from tests.unit.reduce.test_samples import GET, LIB, LOOP, MS, SPIN, samples, thread


def unknown_times(taken):
    """As where /proc says nothing of threads."""
    unknown = (-1,) * len(taken.time_ns_N)
    training, sampler = (
        structs.replace(one, run_ns_N=unknown, waited_ns_N=unknown) for one in (taken.training, taken.sampler)
    )
    return replace(taken, training=training, sampler=sampler)


def profile(stage_s, rank, working_s=0.0):
    steps = {"first_step": 1, "last_step": 5, "steps": 5}
    nothing = dict.fromkeys(("step_s", "device_s", "collective_s", "kernels", "launches", "launch_s", "waiting_s"), 0.0)
    times = {"stage_s": stage_s, "working_s": working_s, "unseen_s": stage_s - working_s}
    return StageProfile(source="t.json", rank=rank, **steps, **times, **nothing)


def findings(stage_s=0.040, control_s=None, working_s=0.0, shares=(), beside="rank", counted=None):
    control = None if control_s is None else profile(control_s, 3)
    suspect = profile(stage_s, 1, working_s)
    return Findings(
        stage="data", suspect=suspect, control=control, shares=shares, summary="", beside=beside, counted=counted
    )


def why(suspect, over_s=0.037, **found):
    """The cause of a stage of 40 ms, by default 37 more than on the others, in which the trace has nothing."""
    return cause_of(findings(**found), suspect, None, over_s=over_s)


def within(function, file, source=""):
    return Frame(function, LIB + file, 9, source)


def stdlib(file, function, source=""):
    return Frame(function, f"/usr/lib/python3.11/{file}", 9, source)


def in_data(source, function="f", line=8):
    return Frame(function, "/job/data.py", line, source)


def at(*frames, **how):
    """Eight samples of these, called in the loop."""
    return samples(((LOOP, *frames), 8), **how)


def computing(*stack):
    return samples((stack, 8), runs=1)


NEXT = Frame("Codec.next", "/job/codec.py", 9, "return self._native.next()")


def kernel(waits_in, line=NEXT, runs=0):
    """A line without Python, and the function of the kernel that it waits in."""
    return samples(((LOOP, line), 20), runs=runs, waits_in=waits_in)


MM = Share(name="aten::mm", kind="operator", waits=False, self_s=0.036, calls=4.0)
WORKERS = within("_MultiProcessingDataLoaderIter._get_data", "torch/utils/data/dataloader.py")
CODEC = in_data("self.codec.next()", "Images.__getitem__", 57)
COMPUTES = in_data("total += b", "decode", 3)
COMPILES = within("compile_fx", "torch/_inductor/compile_fx.py")
LOADS = within("loads", "json/__init__.py")
LOCKS = in_data("with self._cache_lock:", "look_up")
READS = in_data("header = stream.read(8)")
NOWHERE = [((LOOP, Frame(f"f{n}", "/job/data.py", n)), 2) for n in range(4)]
SEVERAL = [((Frame("decode", "/job/data.py", n, "total += table.get(byte)"),), 5) for n in (3, 4)]


class Case(NamedTuple):
    """What was sampled of the stage, and the cause: its code, words of its sentence, and whether it is sure."""

    sampled: StackSamples | None
    code: CauseCode
    message: str = ""
    sure: bool | None = None
    over_s: float | None = 0.037
    found: Mapping[str, object] = {}


OPERATORS = {"working_s": 0.036, "shares": (MM,)}
CASES = {
    # By what stood there, and by whether the thread ran
    "a line that sleeps": Case(at(GET), "sleep"),
    "a line that waits, for who knows what": Case(at(CODEC), "blocked"),
    "a line of a thread not accounted for by the system": Case(unknown_times(at(CODEC)), "unknown"),
    "a line that sleeps, of a thread not accounted for by the system": Case(unknown_times(at(GET)), "sleep"),
    "Python that computes": Case(at(COMPUTES, runs=1), "python"),
    "a line that says sleep, of a thread that runs": Case(at(GET, runs=1), "python"),
    "the workers of a loader": Case(at(WORKERS, stdlib("multiprocessing/connection.py", "poll")), "dataloader_workers"),
    "another thread": Case(at(stdlib("threading.py", "Condition.wait", "waiter.acquire()")), "lock"),
    "a lock": Case(at(LOCKS), "lock"),
    "a block that is no lock": Case(at(in_data("with self.block:", "f")), "blocked"),
    "a file that another process has locked": Case(at(in_data("fcntl.flock(file, fcntl.LOCK_EX)", "look_up")), "lock"),
    "a program": Case(at(stdlib("subprocess.py", "run"), stdlib("selectors.py", "Selector.select")), "subprocess"),
    "a log without a reader": Case(at(stdlib("logging/__init__.py", "emit", "stream.write(msg)")), "output"),
    "a database": Case(at(in_data("db.commit()", "note")), "database"),
    "a call that lets no sample be taken in it": Case(
        samples(((LOOP, LOADS), 5), every_ms=40, runs=1.0), "python", sure=False
    ),
    "a fetch": Case(at(stdlib("socket.py", "SocketIO.readinto")), "network"),
    "a file": Case(at(in_data("os.fsync(f.fileno())", "load")), "disk"),
    "a checkpoint": Case(at(within("save", "torch/serialization.py"), runs=1), "checkpoint"),
    "garbage": Case(computing(Frame("log", "/job/train.py", 90, "gc.collect()")), "garbage_collection"),
    "a compiler": Case(at(COMPILES, runs=1), "recompilation"),
    "a collective": Case(at(within("barrier", "torch/distributed/distributed_c10d.py", "work.wait()")), "collective"),
    "a core that is another's": Case(at(GET, runs=0.1, waits=0.9), "descheduled"),
    "a line that waits, while another thread has the interpreter": Case(at(other=0.9), "gil"),
    "a wait for a busy thread": Case(at(stdlib("queue.py", "get", "not_empty.wait()"), other=0.9), "lock"),
    "more work, on a host that is crowded": Case(at(COMPUTES, runs=0.4, waits=0.6), "python"),
    "no thread ran, and the sampler came late": Case(at(GET, every_ms=40), "stopped"),
    "no thread ran, and the sampler had no core": Case(at(GET, every_ms=40, sampler_waits=0.9), "sleep"),
    "no place in particular": Case(samples(*NOWHERE), "unknown"),
    "nothing that was sampled": Case(None, "unknown"),
    # By the function of the kernel in which a line without Python waits
    "it sleeps": Case(kernel("hrtimer_nanosleep"), "sleep"),
    "it waits for a child": Case(kernel("do_wait"), "subprocess"),
    "its pipe is full": Case(kernel("anon_pipe_write"), "output"),
    "its pipe is empty": Case(kernel("anon_pipe_read"), "lock"),
    "what it reads is a pipe, and no disk": Case(kernel("anon_pipe_read", READS), "lock"),
    "a lock of a file": Case(kernel("locks_lock_inode_wait"), "lock"),
    "a socket": Case(kernel("sk_wait_data"), "network"),
    "a page of a file": Case(kernel("folio_wait_bit_common"), "disk"),
    "a journal": Case(kernel("jbd2_log_wait_commit"), "disk"),
    "what says nothing": Case(kernel("do_poll"), "blocked"),
    "nothing": Case(kernel(""), "blocked"),
    "it runs most of the time": Case(kernel("folio_wait_bit_common", runs=1), "python"),
    # What a line computes in, by the name that the program has for it
    "a library's Python": Case(
        computing(LOOP, LOADS, within("JSONDecoder.raw_decode", "json/decoder.py", "obj, end = self.scan_once(s, at)")),
        "python",
        "main (train.py:12: batch = next(batches)), which computes in json.loads;",
    ),
    "a library's function by the program's name": Case(
        computing(in_data("order = np.sort(g(x))"), within("sort", "numpy/_core/fromnumeric.py")),
        "python",
        "which computes in np.sort;",
    ),
    "a library's own affairs": Case(
        computing(LOOP, within("_w", "a/b.py"), within("Model.fit", "a/c.py")), "python", "computes in a.c.Model.fit;"
    ),
    "what has no Python": Case(computing(in_data("zlib.decompress(x)")), "python", "computes in zlib.decompress;"),
    "the head of a loop": Case(computing(in_data("for row in codec.rows(x):")), "python", "computes in codec.rows;"),
    "several calls in one line": Case(computing(in_data("h(a).g(b)")), "python", "h(a).g(b)), which computes;"),
    "no call, and brackets": Case(
        computing(in_data("a = (a * 31) % (1 << 20)")), "python", "(1 << 20)), which computes in Python;"
    ),
    "no call": Case(computing(in_data("a += b")), "python", "a += b), which computes in Python;"),
    "half a line": Case(computing(in_data("return g(")), "python", "return g(), which computes;"),
    "several busy lines": Case(samples(*SEVERAL, runs=1), "python", ", which computes in Python;"),
    "a lock, while another thread sleeps": Case(
        at(LOCKS, other=0.0),
        "lock",
        "which waits for another thread or process, while thread 'statistics' is in spin (statistics.py:4",
    ),
    # Sure is what takes most of it in one place, even if the whole stage of the others were spent there
    "most of it, in many samples": Case(samples(((LOOP, GET), 20)), "sleep", sure=True),
    "too few samples": Case(samples(((LOOP, GET), 9)), "sleep", sure=False),
    "no rank to compare with": Case(samples(((LOOP, GET), 20)), "unknown", sure=False, over_s=None),
    # (24 of 40 ms there, and the others' whole stage takes 5: 19 of 35 at least)
    "half of it may be the others', too": Case(
        samples(((LOOP, GET), 24), ((LOOP,), 16)), "sleep", sure=False, over_s=0.035
    ),
    "an unknown wait": Case(samples(((LOOP,), 20)), "blocked", sure=False),
    # Operators, and the line that calls them; below the compiler it is that, and not the operators that it runs
    "most of it in one operator": Case(
        samples(((LOOP, Frame("Model.forward", "/job/model.py", 33, "x = big @ big")), 20), runs=1),
        "operator",
        "36.0 of 40.0 ms in aten::mm, called from Model.forward (model.py:33: x = big @ big)",
        sure=True,
        found=OPERATORS,
    ),
    "operators below the compiler": Case(
        samples(((LOOP, COMPILES), 20), runs=1), "recompilation", sure=True, found=OPERATORS
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cause_is_what_the_thread_was_found_at(case):
    cause = why(case.sampled, case.over_s, **case.found)
    assert cause.code == case.code
    assert case.code == "unknown" or cause.sentence.startswith("Rank 1 is slow in data: ")
    assert case.message in cause.sentence
    assert cause.sure is (cause.sure if case.sure is None else case.sure)
    assert cause.next_step


def test_the_sentence_names_the_line_and_what_the_control_spends_there():
    # GIVEN a rank that sleeps for 38 of 40 ms in a line of its dataset, and a control that spends next to nothing there
    suspect = samples(((LOOP, GET), 38), ((LOOP,), 2), every_ms=1)
    control = samples(((LOOP,), 9), ((LOOP, GET), 1), every_ms=1)
    cause = cause_of(findings(control_s=0.003), suspect, control)
    assert cause.sentence == (
        "Rank 1 is slow in data: 38.0 of 40.0 ms in Images.__getitem__ (data.py:57: time.sleep(0.04)), which sleeps; "
        "rank 3 spends 0.3 ms there."
    )
    assert (cause.code, cause.sure, cause.compared_with) == ("sleep", True, 3)
    place = ("Images.__getitem__", "/job/data.py", 57, "time.sleep(0.04)")
    assert tuple(cause.place.model_dump().values()) == place


TWO = Frame("parse", "/job/text.py", 9, "total += table[byte]")
TWICE = {
    # (samples at the one and the other place, and at several more) -> the sentence
    "both are much of it": (
        (12, 8, 0),
        "Rank 1 is slow in data: 24.0 of 40.0 ms in Images.__getitem__ (data.py:57: time.sleep(0.04)), which sleeps; "
        "the other ranks spend 1.0 ms in all of data. Another 16.0 ms are in parse (text.py:9: total += table[byte]), "
        "which waits there for an unknown reason.",
    ),
    "neither is half of it": ((9, 8, 3), "Another 16.0 ms are in parse"),
    "a third of it is elsewhere": ((7, 6, 7), "no place accounts for half of it"),
    "the second is little": ((16, 3, 1), "the other ranks spend 1.0 ms in all of data."),
}


@pytest.mark.parametrize(("taken", "message"), TWICE.values(), ids=TWICE)
def test_two_that_are_wrong_at_once_are_both_named(taken, message):
    # GIVEN a stage of 40 ms in which a rank sleeps, parses, and does other work WHEN its cause is searched
    sleeps, parses, rest = taken
    elsewhere = [((LOOP, Frame(f"f{n}", "/job/data.py", n)), 1) for n in range(rest)]
    suspect = samples(((LOOP, GET), sleeps), ((LOOP, TWO), parses), *elsewhere, every_ms=2)
    cause = why(suspect, 0.039)
    # THEN the first is the cause, and a large second is named too
    assert message in cause.sentence
    assert ("Another" in cause.sentence) is ("Another" in message)


@pytest.mark.parametrize("control_s", [0.045, 0.040, 0.037])
def test_a_stage_that_took_hardly_longer_has_no_cause(control_s):
    # GIVEN a rank that was captured by hand, and is as quick as its control but for 3 % of a step of 100 ms
    found = findings(control_s=control_s)
    found = found.model_copy(update={"suspect": found.suspect.model_copy(update={"step_s": 0.1})})
    cause = cause_of(found, samples(((LOOP, GET), 20)), samples(((LOOP,), 20)))
    assert (cause.code, cause.sure, cause.place) == ("unknown", False, None)


CROWDED = {
    # (how long of 40 ms it ran, or else waited for a core; the others' whole time) -> the sentence
    "the others do the same work, and quicker": (0.1, 0.004, "descheduled"),
    "most of its work is its own": (0.2, 0.004, "garbage_collection"),
    "it does next to nothing, and the others nothing": (0.01, 0.0, "descheduled"),
    "it does a little, and the others nothing": (0.03, 0.0, "garbage_collection"),
}


@pytest.mark.parametrize(("runs", "others_s", "code"), CROWDED.values(), ids=CROWDED)
def test_on_a_crowded_host_a_rank_waits_for_a_core_because_of_the_work_that_it_alone_has(runs, others_s, code):
    # GIVEN a line that waits for a core most of the time WHEN the cause is searched
    line = Frame("log", "/job/train.py", 90, "gc.collect()")
    suspect = samples(((LOOP, line), 20), runs=runs, waits=1 - runs)
    cause = why(suspect, 0.040 - others_s)
    assert cause.code == code
    # AND what the kernel counted of the wait says the same
    assert why(suspect, 0.040 - others_s, counted={"queued_s": 0.035}).code == code
    waited = f"which collects garbage, and spends {40 * (1 - runs):.1f} ms of that waiting for a core; the other ranks"
    assert (waited in cause.sentence) is (code == "garbage_collection")


def test_the_same_wait_on_the_control_is_no_cause():
    # GIVEN a crowded host, where both wait for a core for half of the time, and the suspect sleeps besides
    suspect = samples(((LOOP, GET), 30), ((LOOP,), 10), runs=0.1, waits=0.3)
    control = samples(((LOOP,), 10), runs=0.5, waits=0.5)
    assert cause_of(findings(control_s=0.010), suspect, control).code == "sleep"


def test_of_what_comes_back_the_other_steps_are_compared_with():
    # GIVEN a fault in step 2 alone: in the others its line is not met
    both = replace(samples(((LOOP,), 20), ((LOOP, GET), 20)), step_N=(1,) * 20 + (2,) * 20)
    cause = cause_of(findings(control_s=0.003, beside="steps"), both, None, fault_steps=(2,))
    assert "in its other steps it spends 0.0 ms there" in cause.sentence
    assert cause.sure
    assert cause.compared_with is None


EVERYWHERE = ((LOOP, GET), 20), ((LOOP, SPIN), 20)
NOW_AND_THEN = {"every_ms": 15, "runs": 0.2, "other": 0.7}
QUEUES = samples(*EVERYWHERE, runs=0.4, waits=0.5)
WHOLE_RANK = {
    # (how it was sampled) -> what is done to it, and whether that is sure; what is known of it besides
    "it waits for a core": (QUEUES, "descheduled", False),
    "it waits for one as its peers do": (QUEUES, "unknown", False, {"counted": {"queued_s": 0.003}}),
    "it waits like them and is stopped": (QUEUES, "stopped", True, {"counted": {"queued_s": 0.01, "stopped_s": 0.067}}),
    "its cgroup keeps it": (None, "cgroup_throttled", True, {"counted": {"throttled_s": 0.07, "queued_s": 0.07}}),
    "it computes": (samples(*EVERYWHERE, runs=1), "operator", False, {"operator": "aten::mm"}),
    "it is stopped": (samples(*EVERYWHERE, every_ms=40), "stopped", True),
    "a thread keeps even the sampler from the interpreter": (samples(*EVERYWHERE, every_ms=40, other=0.9), "gil", True),
    "a thread does so now and then": (samples(*EVERYWHERE, **NOW_AND_THEN), "gil", False),
    "it waits in the kernel meanwhile": (samples(*EVERYWHERE, **NOW_AND_THEN, waits_in="pipe_read"), "unknown", False),
    "a thread runs, and keeps it from nothing": (samples(*EVERYWHERE, runs=0.9, other=0.9), "unknown", False),
    "it runs all the time": (samples(*EVERYWHERE, runs=1), "unknown", False),
    "nothing was sampled": (None, "unknown", False),
}


@pytest.mark.parametrize("case", WHOLE_RANK)
def test_a_rank_that_is_slow_everywhere_is_so_by_what_is_done_to_it(case):
    # GIVEN a rank that is 80 ms a step over its peers in no stage in particular
    sampled, code, sure, *known = WHOLE_RANK[case]
    cause = cause_of_rank(1, sampled, 0.08, **dict(*known))
    assert (cause.code, cause.sure, cause.place) == (code, sure, None)
    computes = "it computes for 200.0 ms, above all aten::mm; it has more work than its peers"
    assert (computes in cause.sentence) is (code == "operator")
    assert cause.sentence.startswith("Rank 1 is slow in all its local stages, 80.0 ms a step over its peers")


def test_a_rank_captured_on_request_is_not_called_slow():
    # GIVEN a healthy rank that a person had captured, and no control WHEN the cause is searched
    cause = why(samples(((LOOP, GET), 20)), None, **OPERATORS)
    assert (cause.code, cause.sure, cause.place) == ("unknown", False, None)
    assert cause.sentence == (
        "It is not known whether data took too long: there is no other rank to compare with; most of data is in "
        "Images.__getitem__ (data.py:57: time.sleep(0.04)), 40.0 of 40.0 ms."
    )
    # AND one that is as quick as its peers in the captured steps has none, whatever was done to it
    for over_s in (0.0, -0.01):
        cause = cause_of_rank(1, samples(*EVERYWHERE, waits=0.5), over_s, "aten::mm")
        assert (cause.code, cause.sure) == ("unknown", False)
        assert cause.sentence == "Rank 1 was no slower than its peers while it was captured."


def used(taken, **each_ms):
    """The same samples, with what was counted of the process in each."""
    n = len(taken.time_ns_N)
    counts = {name: tuple(int(its * (number + 1)) for number in range(n)) for name, its in each_ms.items()}
    return replace(taken, training=structs.replace(taken.training, **counts))


def test_garbage_that_is_collected_by_itself_is_named_and_not_the_line_that_makes_objects():
    # GIVEN a rank that collects garbage at lines that make objects, each of them no more often than the other
    lines = [(LOOP, in_data("return [dict(a) for a in rows]", name)) for name in ("records", "copies")]
    suspect = used(samples((lines[0], 9), (lines[1], 7), runs=1), collected_ns=4.5 * MS)
    cause = why(suspect, 0.075, stage_s=0.08)
    assert (cause.code, cause.sure, cause.place and cause.place.function) == ("garbage_collection", True, "records")
    assert "slow in data: 67.5 of 80.0 ms in garbage collection, most in records (data.py:8" in cause.sentence
    # AND so it is of a rank that does so in all its stages, and not of one that does so for a part of the time
    assert cause_of_rank(1, suspect, 0.06).code == "garbage_collection"
    partly = used(samples((lines[0], 16), runs=1), collected_ns=2 * MS)
    assert why(partly, 0.075, stage_s=0.08).code == "python"


@pytest.mark.parametrize(
    ("counts", "runs", "code"),
    [
        # Read from a disk, page by page: after each it waits for a core.
        ({"major_faults": 2, "minor_faults": 2, "system_ns": MS}, 0.2, "page_faults"),
        # In memory already, and mapped anew.
        ({"major_faults": 0, "minor_faults": 400, "system_ns": 4 * MS}, 1.0, "page_faults"),
        ({"major_faults": 0, "minor_faults": 4, "system_ns": 4 * MS}, 1.0, "python"),
        ({}, 1.0, "python"),
    ],
)
def test_a_thread_that_runs_for_page_faults_does_not_compute(counts, runs, code):
    # GIVEN a line that runs, or could if it had a core, and of which nothing was counted beside its peers
    line = in_data("pages[a:b].sum()")
    suspect = used(samples(((LOOP, line), 20), runs=runs, waits=1 - runs), **counts)
    # THEN it is not sure what it runs for
    cause = why(suspect)
    assert (cause.code, cause.sure) == (code, False)
    # AND where the kernel counted no faults over the peers', it computes
    cause = why(suspect, counted={"run_s": 0.037})
    assert (cause.code, cause.sure) == ("python", True)


def test_our_own_functions_are_no_cause():
    ours = Frame("Session._close_marks", f"{LIB}sftriage/trainer/session.py", 128)
    torchs = Frame("__exit__", f"{LIB}torch/autograd/profiler.py", 9)
    for frame in (ours, replace(ours, file="/work/sftriage/trainer/session.py")):
        cause = why(samples(((LOOP, GET), 8), ((LOOP, frame, torchs), 8)))
        assert cause.code == "sleep"
        assert not any(words in cause.sentence for words in ("_close_marks", "main"))


def test_every_code_has_words_and_is_on_the_page_about_causes_once():
    assert set(DOES) == set(NEXT_STEP) == set(get_args(CauseCode))
    page = (Path(__file__).parents[3] / "docs" / "causes.md").read_text(encoding="utf-8")
    table = page.partition("## The codes")[2].partition("\n## ")[0]
    _, *codes = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(codes) == sorted(get_args(CauseCode))


FRESH = Frame("touch", "/job/train.py", 190, "fresh[at] = 1")
CACHED = {"minor_faults": 1e4, "system_s": 0.02, "run_s": 0.025}
FEW = {"minor_faults": 1e2, "system_s": 1e-3, "run_s": 0.03}
COUNTED = {
    # (what the kernel counted over its peers', what was sampled) -> the code, whether it is sure and the line is named
    "its cgroup, wherever it stood": ({"throttled_s": 0.034, "queued_s": 0.034}, GET, "cgroup_throttled", True, False),
    "a stopped process": ({"stopped_s": 0.022}, GET, "stopped", False, False),
    "its memory, read from disk": ({"major_faults": 9.0, "disk_s": 0.036}, GET, "page_faults", True, False),
    "another on its core": ({"queued_s": 0.03}, GET, "descheduled", True, False),
    "memory that it touches first": (CACHED, FRESH, "page_faults", True, True),
    "a line that computes, and a few faults": (FEW, FRESH, "python", True, True),
    "a line that waits for a disk": ({"disk_s": 0.03}, in_data("codec.next()"), "disk", True, True),
    "a line that says what it waits for": ({"disk_s": 0.03}, GET, "sleep", True, True),
    "a GPU that is slow": ({"gpu_s": 0.03}, GET, "gpu_throttled", False, False),
    "less than half of it": ({"stopped_s": 0.01, "throttled_s": 0.01}, GET, "sleep", True, True),
}


@pytest.mark.parametrize(("counted", "frame", "code", "sure", "named"), COUNTED.values(), ids=COUNTED)
def test_what_the_kernel_counted_comes_before_the_line_it_stood_at(counted, frame, code, sure, named):
    cause = why(samples(((LOOP, frame), 20), runs=frame is FRESH), counted=counted)
    assert (cause.code, cause.sure) == (code, sure)
    assert (cause.place and cause.place.function) == (frame.function if named else None)


def sorts(device_s, control_s=None, name="sort_kernel", operator="aten::sort", within="Router"):
    """A kernel, and what it took."""
    return KernelShare(
        name=name, operator=operator, within=within, device_s=device_s, calls=2, control_device_s=control_s
    )


def on_device(kernels, own_s, control_s=None, idle_s=0.0):
    """A stage that took the host 2 ms, and the device longer."""
    found = findings(0.002, None if control_s is None else 0.002)
    of_device = {"device_s": 0.040, "device_own_s": own_s, "device_idle_s": idle_s}
    control = found.control and found.control.model_copy(update={"device_own_s": control_s})
    return found.model_copy(
        update={"kernels": kernels, "suspect": found.suspect.model_copy(update=of_device), "control": control}
    )


SORT, LESS = "sort_kernel (aten::sort in Router)", "on the other ranks the stage takes 30.0 ms less."
REST = sorts(0.004, name="gemm", operator="aten::mm", within="")
BESIDE = on_device((sorts(0.030, 0.003),), 0.034, control_s=0.006)
SPENDS = f"its GPU spends 30.0 of 34.0 ms in {SORT};"
ON_DEVICE = {
    # (the device's work) -> whether it is sure, and the sentence
    "a kernel that the others hardly have": (on_device((sorts(0.030), REST), 0.034), True, f"{SPENDS} {LESS}"),
    "a kernel that the others may have as well": (
        on_device((sorts(0.030), REST), 0.064),
        False,
        f"its GPU spends 30.0 of 64.0 ms in {SORT}; {LESS}",
    ),
    "many kernels": (
        on_device((sorts(0.010, operator="", within=""), REST), 0.040),
        False,
        f"its GPU works 30.0 ms longer, above all in sort_kernel; {LESS}",
    ),
    "a device that waits for its host": (on_device((sorts(0.020),), 0.034, idle_s=0.028), False, None),
    "a device that may wait for it": (on_device((sorts(0.020),), 0.034, idle_s=None), False, None),
    "a device that waits in a collective": (on_device((sorts(0.002),), 0.003), False, None),
    "a kernel that takes the control less": (BESIDE, True, f"{SPENDS} rank 3's GPU works 6.0 ms in all of data."),
    "a kernel that is there in some steps only": (
        BESIDE.model_copy(update={"beside": "steps"}),
        True,
        f"{SPENDS} in its other steps it works 6.0 ms in all of data.",
    ),
}


@pytest.mark.parametrize(("found", "sure", "message"), ON_DEVICE.values(), ids=ON_DEVICE)
def test_by_the_devices_clock_the_kernels_are_why(found, sure, message):
    cause = cause_of(found, None, None, over_s=0.030, on_device=True)
    assert (cause.code, cause.sure) == ("unknown" if message is None else "kernel", sure)
    if message is not None:
        assert cause.sentence == f"Rank 1 is slow in data: {message}"
        assert cause.compared_with == (3 if found.control is not None and found.beside == "rank" else None)
    # AND by the host's clock they are no cause
    assert cause_of(found, None, None, over_s=0.0015).code != "kernel"


def test_counters_give_the_cause_without_samples():
    cause = why(None, counted={"disk_s": 0.03})
    message = "for 30.0 of 40.0 ms it waited for a disk; the other ranks spend 3.0 ms in all of data."
    assert cause.sentence == f"Rank 1 is slow in data: {message}"


DATA = f"{LIB}torch/utils/data/"
FRAMES = (
    Frame("train", "/job/train.py", 12, "for batch in loader:"),
    Frame("_MultiProcessingDataLoaderIter._try_get_data", f"{DATA}dataloader.py", 1300, "self._data_queue.get()"),
    Frame("_worker_loop", f"{DATA}_utils/worker.py", 374, "data = fetcher.fetch(index)"),
    Frame("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 113, "if not self._poll(timeout):"),
    Frame("Images.__getitem__", "/job/data.py", 57, "time.sleep(0.1)"),
    Frame("decode", "/job/data.py", 80, "total += byte"),
)
TRAIN, POLLS, FETCHES, GETS, SLEEPS, DECODES = range(6)
WAITING, IDLE, ASLEEP, BUSY = (TRAIN, POLLS), (FETCHES, GETS), (FETCHES, SLEEPS), (FETCHES, DECODES)


def worker(*stacks, runs=0.0, waits=0.0, number=0):
    """A worker that is sampled every 5 ms, 1 ms before its trainer is."""
    times_ns = tuple((5 * (one + 1) - 1) * MS for one in range(len(stacks)))
    its = thread(stacks, times_ns, runs, waits)
    return WorkerSamples(number, 70 + number, 0.005, times_ns, (its,), thread((), times_ns))


def rank(*workers, stacks=(WAITING,) * 40, stage="data"):
    """A rank that waits for its workers in one long step."""
    times_ns = tuple(5 * (one + 1) * MS for one in range(len(stacks)))
    n = len(stacks)
    columns = times_ns, (1,) * n, (stage,) * n, (0,) * n
    return StackSamples(FRAMES, 5 * MS, *columns, thread(stacks, times_ns), (), thread((), times_ns), workers)


SLEEPER, IDLER = worker(*(ASLEEP,) * 40), worker(*(IDLE,) * 40, number=1)
WHERE = {
    # workers -> the place that is named, and what they spend there in all
    "one that sleeps": ([SLEEPER], (SLEEPS, 0.2)),
    "one that sleeps, beside one that has nothing to do": ([SLEEPER, IDLER], (SLEEPS, 0.2)),
    "two that sleep": ([SLEEPER, worker(*(ASLEEP,) * 20, number=1)], (SLEEPS, 0.3)),
    "one that mostly sleeps": ([worker(*(ASLEEP,) * 30, *(BUSY,) * 10)], (SLEEPS, 0.15)),
    "no place in particular": ([worker(*(ASLEEP,) * 10, *(BUSY,) * 9, *((FETCHES,),) * 11)], None),
    "all have nothing to do": ([IDLER], None),
    "none was sampled": ([], None),
    "one that was gone before it was sampled": ([worker()], None),
}


@pytest.mark.parametrize(("workers", "place"), WHERE.values(), ids=WHERE)
def test_the_place_is_where_the_workers_are_that_do_something(workers, place):
    found = in_workers(rank(*workers), None, "data")
    assert (found and (FRAMES.index(found[0].frame), round(found[1], 3))) == place


def test_work_of_workers_outside_a_wait_is_not_the_cause():
    # GIVEN a worker that decodes while the training thread is elsewhere, and then sleeps while that thread waits for it
    stacks = ((TRAIN,),) * 30 + (WAITING,) * 10
    its = worker(*(BUSY,) * 30, *(ASLEEP,) * 10)
    # WHEN its place is searched THEN it is where the thread waited for it; in another stage, nowhere
    assert in_workers(rank(its, stacks=stacks), None, "data")[0].frame == FRAMES[SLEEPS]
    assert in_workers(rank(its, stacks=stacks), None, "forward") is None
    # AND other steps have no place
    assert in_workers(rank(its, stacks=stacks), None, "data", {7}) is None


SAID = {
    "which sleeps": (worker(*(ASLEEP,) * 40), SLEEPS, "Images.__getitem__ (data.py:57: time.sleep(0.1)), which sleeps"),
    "which computes": (worker(*(BUSY,) * 40, runs=1), DECODES, "decode (data.py:80: total += byte), which computes"),
    "which has no core": (worker(*(BUSY,) * 40, waits=1), DECODES, "ready to run and waiting for a core"),
}


@pytest.mark.parametrize(("its", "place", "message"), SAID.values(), ids=SAID)
def test_the_cause_names_the_line_in_the_worker_and_not_the_one_that_waits(its, place, message):
    # GIVEN a rank that waits for a worker, and a control whose own is at that place for 10 ms
    control = rank(worker(*(IDLE,) * 38, *(its.threads[0].stacks_N[0],) * 2))
    cause = cause_of(findings(stage_s=0.2, control_s=0.01), rank(its), control)
    assert (cause.code, cause.sure, cause.compared_with) == ("dataloader_workers", True, 3)
    assert cause.place.line == FRAMES[place].line
    assert "which waits for the workers of its DataLoader, which are in" in cause.sentence
    assert message in cause.sentence
    assert "(200.0 ms a step; those of rank 3: 10.0 ms)" in cause.sentence


def test_where_the_workers_were_not_sampled_the_line_that_waits_is_the_place():
    cause = cause_of(findings(stage_s=0.2, control_s=0.01), rank(), None)
    assert (cause.code, cause.place.line) == ("dataloader_workers", 12)


CALLS = Frame("mix", "/job/data.py", 8, "x = torch.mm(x, x)")


@pytest.mark.parametrize(
    ("code", "has", "missing"),
    [
        # (what was recorded) -> what another means would show
        ("unknown", "stacks", "operators"),
        ("blocked", "stacks", "operators"),
        ("unknown", "operators", "stacks"),
        ("blocked", "operators stacks", "system"),
        ("unknown", "operators stacks", "system"),
        # A call of torch is for operators to say, where there are none
        ("python", "stacks torch_call", "operators"),
        ("python", "operators stacks torch_call", ""),
        ("python", "stacks", ""),
        # What is known is known
        ("sleep", "stacks torch_call", ""),
        ("operator", "operators", ""),
        ("descheduled", "stacks", ""),
    ],
)
def test_what_is_left_open(code, has, missing):
    assert left_open(code, **{name: name in has.split() for name in ("operators", "stacks", "torch_call")}) == missing


@pytest.mark.parametrize(
    ("stack", "calls"),
    [
        ((LOOP, GET), False),
        ((LOOP, CALLS), True),
        ((LOOP, GET, within("linear", "torch/nn/functional.py")), True),
        ((LOOP, replace(GET, source="self.torch_calls += 1")), False),
    ],
)
def test_a_call_of_torch_is_recognised_by_its_files_or_by_the_line(stack, calls):
    assert in_torch(samples((stack, 8)), "data") == calls
    assert not in_torch(samples((stack, 8)), "forward")
