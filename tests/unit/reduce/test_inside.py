"""What filled a stage: self time, work against waiting, kernels against launches, suspect against control."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.reduce.causes import cause_of
from sftriage.reduce.inside import SampledRank, find, find_sampled, kernel_name, slowest
from sftriage.traces.manifest import Findings
from tests.unit.reduce.heavy import ENGINE, GLOO, MAIN, event, job_events, mark, recurring_events, reduced
from tests.unit.reduce.test_events import in_small_parts
from tests.unit.reduce.test_samples import GET, LOOP, samples

STEP = [mark("ProfilerStep#1", 0, 1000), mark("sftriage:data", 100, 800)]


def shares(findings):
    return {
        share.name: (share.kind, share.waits, round(share.self_s * 1e6, 3), share.calls) for share in findings.shares
    }


def test_work_goes_before_waiting_and_waiting_before_nothing(tmp_path):
    # GIVEN a stage of 800: an operator in one thread while another waits for a collective, a device's sync,
    # Python between, and nothing at all for the rest
    events = [
        *STEP,
        event("aten::stack", 100, 100),
        event("aten::copy_", 120, 30),
        mark("gloo:all_reduce", 150, 150, tid=GLOO),
        event("cudaStreamSynchronize", 350, 50, "cuda_runtime"),
        event("train.py(3): load", 500, 60, "python_function"),
        event("<built-in method sleep>", 510, 40, "python_function"),
        event("aten::outside", 950, 20),
    ]
    findings = find(reduced(tmp_path / "t.json", events, rank=2, world_size=4), "data")
    profile = findings.suspect
    times_s = (profile.stage_s, profile.working_s, profile.waiting_s, profile.unseen_s)
    assert [round(s * 1e6) for s in times_s] == [800, 100 + 20, 100 + 50 + 40, 800 - 310]
    assert shares(findings) == {
        "gloo:all_reduce": ("annotation", True, 150, 1),
        "aten::stack": ("operator", False, 70, 1),
        "cudaStreamSynchronize": ("call", True, 50, 1),
        "<built-in method sleep>": ("python", True, 40, 1),
        "aten::copy_": ("operator", False, 30, 1),
        "train.py(3): load": ("python", False, 20, 1),
    }
    assert findings.summary.endswith("What stands out is time in Python or in the system, which leaves no events.")
    assert (profile.rank, profile.steps, profile.first_step) == (2, 1, 1)


def test_what_records_the_steps_is_no_work_of_the_program(tmp_path):
    # GIVEN a stage that sleeps, while a thread of ours waits for a request, and one of our functions closes a mark
    events = [
        *STEP,
        event("train.py(3): load", 100, 800, "python_function"),
        event("<built-in function sleep>", 100, 700, "python_function"),
        event("/venv/lib/sftriage/trainer/session.py(128): _close_marks", 850, 40, "python_function"),
        event("sftriage/trainer/stacks.py(172): _run", 0, 1000, "python_function", tid=GLOO),
    ]
    found = find(reduced(tmp_path / "t.json", events), "data")
    assert [round(s * 1e6) for s in (found.suspect.working_s, found.suspect.waiting_s)] == [60, 700]
    assert set(shares(found)) == {"train.py(3): load", "<built-in function sleep>"}


def test_idle_threads_do_not_count_as_waiting(tmp_path):
    # GIVEN a worker thread that waits for work all the time, and the step's own thread that sleeps for a while
    events = [
        *STEP,
        event("pthread_cond_wait", 0, 1000, "cuda_runtime", tid=ENGINE),
        event("<built-in function sleep>", 200, 50, "python_function"),
        event("cudaStreamSynchronize", 300, 30, "cuda_runtime", tid=-5),
    ]
    findings = find(reduced(tmp_path / "t.json", events), "data")
    assert findings.suspect.waiting_s == pytest.approx(80e-6)
    assert set(shares(findings)) == {"<built-in function sleep>", "cudaStreamSynchronize"}


EVENTS = st.lists(
    st.tuples(st.integers(0, 990), st.integers(0, 300), st.integers(0, 5), st.sampled_from([MAIN, ENGINE, GLOO])),
    max_size=15,
)
NAMED = ("aten::a", "aten::b", "gloo:x", "cudaEventSynchronize", "f.py(1): f", "## forward ##")
KINDS = ("cpu_op", "cpu_op", "user_annotation", "cuda_runtime", "python_function", "user_annotation")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS)
def test_work_waiting_and_nothing_are_the_stage(tmp_path, events):
    some = [event(NAMED[n], start, length, KINDS[n], tid=tid) for start, length, n, tid in events]
    for stage in ("data", "other"):
        findings = find(reduced(tmp_path / "t.json", [*STEP, *some]), stage)
        profile = findings.suspect
        assert profile.stage_s == pytest.approx(800e-6 if stage == "data" else 200e-6)
        assert profile.working_s + profile.waiting_s + profile.unseen_s == pytest.approx(profile.stage_s)
        assert min(profile.working_s, profile.waiting_s, profile.unseen_s) >= 0
        assert Findings.model_validate_json(findings.model_dump_json()) == findings


def test_kernels_belong_to_the_stage_that_launched_them(tmp_path):
    # GIVEN two launches in the stage whose kernels run after it, overlapping, one of them a collective; and one outside
    events = [
        *STEP,
        event("cudaLaunchKernel", 200, 10, "cuda_runtime", correlation=1),
        event("cudaLaunchKernelExC", 220, 15, "cuda_runtime", correlation=2),
        event("cudaLaunchKernel", 50, 10, "cuda_runtime", correlation=3),
        event("gemm", 1200, 100, "kernel", pid=0, tid=7, correlation=1),
        event("ncclDevKernel_AllReduce_Sum", 1250, 200, "kernel", pid=0, tid=9, correlation=2),
        event("gemm", 300, 100, "kernel", pid=0, tid=7, correlation=3),
    ]
    profile = find(reduced(tmp_path / "t.json", events), "data").suspect
    assert (profile.kernels, profile.launches) == (2, 2)
    assert (profile.device_s, profile.collective_s) == (pytest.approx(250e-6), pytest.approx(200e-6))
    assert profile.launch_s == pytest.approx(25e-6)


def launch(number, ts, took, name="gemm", tid=MAIN, begins=None, call="cudaLaunchKernel"):
    """A launch on the host, and the kernel, by default 100 later."""
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return [
        event(call, ts, 5, "cuda_runtime", tid=tid, correlation=number),
        event(name, ts + 100 if begins is None else begins, took, cat, pid=0, tid=7, correlation=number),
    ]


def test_kernels_that_overlap_on_one_stream_take_no_longer_than_the_time_they_cover(tmp_path):
    # GIVEN kernels of one stream that overlap, one within another; and one of another stream beside them
    begins = {1: (1200, 100, 7), 2: (1210, 100, 7), 3: (1220, 30, 7), 4: (1305, 50, 7), 5: (1200, 90, 8)}
    events = list(STEP)
    for number, (ts, took, stream) in begins.items():
        name = "relu" if number in (2, 5) else "gemm"
        events.append(event("cudaLaunchKernel", 200 + 10 * number, 5, "cuda_runtime", correlation=number))
        events.append(event(name, ts, took, "kernel", pid=0, tid=stream, correlation=number))
    found = find(reduced(tmp_path / "t.json", events), "data")
    assert found.suspect.device_s == pytest.approx(155e-6)
    took_us = {one.name: (round(one.device_s * 1e6), one.calls) for one in found.kernels}
    assert took_us == {"gemm": (145, 3), "relu": (10 + 90, 2)}


LONG = "void at::native::(anonymous namespace)::sort_kernel<float, 4>(at::native::Tensor, int)"
ENGINES = "autograd::engine::evaluate_function: SortBackward0"


def sorting_events(took):
    """A stage that launches in its own thread and in autograd's, within operators and without."""
    return [
        *STEP,
        event("ProfilerStep#1", 0, 1000),
        *launch(1, 110, 10, "Memcpy HtoD (Pinned -> Device)", call="cudaMemcpyAsync"),
        event("Router", 150, 100),
        event("aten::sort", 160, 80),
        event("aten::sort", 165, 40),
        *launch(2, 170, took, LONG),
        *launch(3, 230, 20, LONG),
        event(ENGINES, 300, 90, tid=ENGINE),
        event("aten::mm", 310, 50, tid=ENGINE),
        *launch(4, 320, 7, "void cutlass::Kernel2<cutlass_80_simt_sgemm>(cutlass_80_simt_sgemm::Params)", tid=ENGINE),
        *launch(5, 365, 300, "ncclDevKernel_AllReduce_Sum", tid=ENGINE),
        *launch(6, 20, 900, "gemm"),
    ]


@pytest.mark.parametrize("small", [False, True])
def test_kernels_are_listed_by_their_launchers(tmp_path, monkeypatch, small):
    if small:
        in_small_parts(monkeypatch)
    # GIVEN a suspect and a control whose router sorts for longer, and for not as long
    suspect, control = (
        reduced(tmp_path / f"{rank}.json", sorting_events(took), rank=rank, world_size=2)
        for rank, took in enumerate((60, 40))
    )
    found = find(suspect, "data", control).kernels
    # THEN what takes the most more comes first, each with the innermost operator and the outermost, by the names that
    # people use, and neither a collective nor what another stage launched is among them
    assert [(one.name, one.operator, one.within) for one in found] == [
        ("sort_kernel", "aten::sort", "Router"),
        ("Memcpy HtoD", "", ""),
        ("Kernel2<cutlass_80_simt_sgemm>", "aten::mm", "SortBackward0"),
    ]
    times = [(one.device_s, one.control_device_s) for one in found]
    assert [tuple(round(each * 1e6) for each in one) for one in times] == [(80, 60), (10, 10), (7, 7)]
    assert [one.calls for one in found] == [2, 1, 1]
    assert found[0].more_s == pytest.approx(20e-6)
    # AND what it did beside a collective counts in full
    assert find(suspect, "data").suspect.device_own_s == pytest.approx((60 + 20 + 10 + 7) * 1e-6)


def test_a_device_that_has_nothing_to_do_waits_for_its_host(tmp_path):
    # GIVEN a device that is at the stage before until 300, and whose host launches the stage's kernels late
    made = [*STEP, *launch(1, 20, 200, begins=100)]
    made += [event("aten::mm", 100, 700), *launch(2, 290, 50, begins=350), *launch(3, 600, 100, begins=700)]
    # (a copy at the end of what others have sent is no wait for the host)
    made += launch(4, 890, 10, "Memcpy HtoD", begins=1900)
    profile = find(reduced(tmp_path / "t.json", made), "data").suspect
    assert profile.device_idle_s == pytest.approx((50 + 300) * 1e-6)
    # AND where nothing was launched nothing is known
    assert find(reduced(tmp_path / "u.json", STEP), "data").suspect.device_idle_s is None


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", "spin_kernel"),
        ("void at::native::elementwise_kernel<128, 2, at::native::f(int)>(int)", "elementwise_kernel"),
        ("void cutlass::Kernel2<cutlass_80_gemm_nn>(cutlass_80_gemm_nn::Params)", "Kernel2<cutlass_80_gemm_nn>"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("Memset (Device)", "Memset"),
        ("<lambda>(int)", "<lambda>"),
    ],
)
def test_a_kernel_has_a_name_that_people_use(name, short):
    assert kernel_name(name) == short


def test_a_copy_back_from_the_device_is_a_wait(tmp_path):
    events = [*STEP]
    for number, way in ((1, "DtoH (Device -> Pageable)"), (2, "HtoD (Pageable -> Device)")):
        events.append(event("cudaMemcpyAsync", 100 * number + 100, 50, "cuda_runtime", correlation=number))
        events.append(event(f"Memcpy {way}", 900, 5, "gpu_memcpy", pid=0, tid=7, correlation=number))
    profile = find(reduced(tmp_path / "t.json", events), "data").suspect
    assert (profile.working_s, profile.waiting_s) == (pytest.approx(50e-6), pytest.approx(50e-6))


def test_against_a_control_what_took_more_comes_first(tmp_path):
    # GIVEN a suspect that spends 20 ms more in one operator than its control, and the same in a longer one
    suspect = [*STEP, event("aten::long", 100, 400), event("aten::slow at 0x7fd2", 500, 300)]
    control = [*STEP, event("aten::long", 100, 400), event("aten::slow at 0x7eee", 500, 100)]
    findings = find(
        reduced(tmp_path / "s.json", suspect, rank=2, world_size=4),
        "data",
        reduced(tmp_path / "c.json", control, rank=1, world_size=4),
    )
    its_us = [(share.name, round((share.control_self_s or 0) * 1e6)) for share in findings.shares]
    assert its_us == [("aten::slow", 100), ("aten::long", 400)]
    assert findings.control.rank == 1
    assert "What stands out is aten::slow." in findings.summary


def test_steps_that_both_have_are_compared(tmp_path):
    suspect = reduced(tmp_path / "s.json", job_events(2, 2, first=100, steps=4), rank=2, world_size=4)
    control = reduced(tmp_path / "c.json", job_events(1, 2, first=102, steps=4), rank=1, world_size=4)
    findings = find(suspect, "data", control)
    for profile in (findings.suspect, findings.control):
        assert (profile.first_step, profile.last_step, profile.steps) == (102, 103, 2)
    assert findings.suspect.stage_s - findings.control.stage_s == pytest.approx(0.02, abs=2e-4)


RECURRING = recurring_events()


def test_a_fault_that_comes_back_is_found_in_its_steps_against_the_others(tmp_path):
    # GIVEN a capture of six steps, two of which have the fault
    captured = reduced(tmp_path / "t.json", RECURRING, rank=2, world_size=4)
    findings = find(captured, "data", fault_steps=(1, 4, 77))
    assert (findings.suspect.steps, findings.of_steps, findings.beside) == (2, 6, "steps")
    assert findings.suspect.stage_s == pytest.approx(1200e-6)
    assert (findings.control.steps, findings.control.rank) == (4, 2)
    assert findings.control.stage_s == pytest.approx(300e-6)
    found = [(one.name, round(one.self_s * 1e6), round((one.control_self_s or 0) * 1e6)) for one in findings.shares]
    assert found == [("aten::slow", 1000, 100), ("aten::stack", 200, 200)]
    assert "ms of a step in the 2 of 6 captured steps that have the fault" in findings.summary
    assert "0.9 ms more than in its other steps. What stands out is aten::slow." in findings.summary
    assert Findings.model_validate_json(findings.model_dump_json()) == findings


def test_a_fault_is_not_compared_with_steps_in_which_its_stage_is_longer(tmp_path):
    # GIVEN steps that are known to have the fault, for the peers were quicker in them, and others in which it is longer
    findings = find(reduced(tmp_path / "t.json", RECURRING), "data", fault_steps=(0, 2, 3, 5))
    assert (findings.suspect.steps, findings.of_steps, findings.control) == (4, 6, None)
    assert "than" not in findings.summary


@pytest.mark.parametrize("known", [(), (77,), range(6)], ids=["not known", "none of these", "all of them"])
def test_without_steps_that_differ_all_are_analysed(tmp_path, known):
    captured = reduced(tmp_path / "t.json", RECURRING)
    findings = find(captured, "data", fault_steps=known)
    assert findings == find(captured, "data")
    assert (findings.suspect.steps, findings.of_steps, findings.control) == (6, None, None)


def test_names_that_would_harm_a_terminal_are_made_harmless(tmp_path):
    findings = find(reduced(tmp_path / "t.json", [*STEP, event("\x1b[31m" + "x" * 300, 200, 50)]), "data")
    (share,) = findings.shares
    assert share.name == "?[31m" + "x" * 95


SLOW = {"data": 0.040, "forward": 0.010, "other": 0.0}
QUICK = {"data": 0.004, "forward": 0.010, "other": 0.0}
SLEEPS = samples(((LOOP, GET), 8))


def sampled(number=1, steps=None, taken=SLEEPS):
    return SampledRank(f"r{number}.json", number, {1: SLOW, 2: SLOW} if steps is None else steps, taken)


def test_a_stage_is_as_long_as_it_was_recorded_and_filled_by_the_places_that_were_met():
    found = find_sampled(sampled(), "data")
    assert (found.suspect.stage_s, found.suspect.step_s, found.suspect.steps) == (0.040, 0.050, 2)
    assert (found.suspect.waiting_s, found.suspect.working_s) == (0.040, 0.0)
    (share,) = found.shares
    assert (share.name, share.kind) == ("Images.__getitem__ (data.py:57)", "python")
    assert (share.waits, share.self_s) == (True, 0.040)
    assert found.summary.endswith("What stands out is Images.__getitem__ (data.py:57).")
    cause = cause_of(found, SLEEPS, None, over_s=0.036)
    assert (cause.code, cause.place and cause.place.line, cause.took_s) == ("sleep", 57, 0.040)


def test_beside_a_control_the_same_steps_are_compared_and_the_stage_is_the_one_that_is_longer():
    control = sampled(3, {2: QUICK, 3: QUICK}, samples(((LOOP, GET), 2), step=2))
    assert slowest(sampled(), control) == "data"
    found = find_sampled(sampled(taken=samples(((LOOP, GET), 8), step=2)), "data", control)
    assert (found.suspect.first_step, found.suspect.last_step, found.control.steps) == (2, 2, 1)
    assert (found.control.rank, found.shares[0].control_self_s, found.beside) == (3, 0.004, "rank")
    assert "36.0 ms more than rank 3" in found.summary


@pytest.mark.parametrize(("others", "beside"), [(QUICK, "steps"), (SLOW, "rank")])
def test_steps_without_the_fault_are_what_is_compared_with_where_they_are_quicker(others, beside):
    found = find_sampled(sampled(steps={1: SLOW, 2: others}), "data", None, (1,))
    assert (found.beside == "steps", found.control is not None, found.of_steps) == (True, beside == "steps", 2)


def test_missing_records_are_reported(tmp_path):
    with pytest.raises(InputError, match="none of its steps were recorded"):
        find_sampled(sampled(steps={}), "data")
    with pytest.raises(InputError, match="no stage 'loss' in it; it has: data, forward, other"):
        find_sampled(sampled(), "loss")
    with pytest.raises(InputError, match="no stage 'nope' in it; it has: data, other"):
        find(reduced(tmp_path / "t.json", STEP), "nope")


def test_a_stage_without_a_sample_is_unseen_time():
    found = find_sampled(sampled(), "forward")
    assert (found.shares, found.suspect.unseen_s) == ((), 0.010)
    assert found.summary.startswith("forward took 10.0 of the 50.0 ms of a step, by its stacks: 10.0 ms not accounted")
