"""Which clock a verdict stands on, where ranks run on devices: jobs whose hosts only launch.

Every rank has a host that launches and a device that works, each with a clock of its own. A host goes through its
stages launching; a device does what was launched, in order, no sooner than it was launched and no faster than that. In
the sync stage the devices wait for one another, and no host does. A host waits for its device at one place of the step
(`loss.item()`), or only where it is too many steps ahead of it. Stage boundaries are taken on both clocks, as the
recorder does: the device gets there when it is through with what was launched before.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sftriage.model.captures import Trigger
from sftriage.model.verdicts import Settings
from sftriage.model.windows import OTHER, StageSchema, Window
from sftriage.verdict.accounting import anchored
from sftriage.verdict.evidence import Past
from sftriage.verdict.judging import judge, reproduced
from sftriage.words.verdicts import explain, verdict_sentence
from tests.scenario import CALM, Drawn, Fault, Job, Noise, classify, past_of
from tests.unit.verdict.strategies import ORDINARY, windows

MS = 1e-3


@dataclass(frozen=True)
class GpuJob:
    """A step of 80 ms on the device: 30 forward, 40 backward (5 of exchange), 8 optimizer; of 18 ms on the host.

    Args:
        stages: of each its host's and its device's time.
        waits_in: the stage at whose end each host waits for its device; None where it only keeps at most
            ``ahead_steps`` ahead of it.
        behind: there it waits for what its device had to do in the step before.
    """

    n_ranks: int = 4
    n_steps: int = 50
    stages: tuple[tuple[str, float, float], ...] = (
        ("data", 2 * MS, 0.0),
        ("forward", 5 * MS, 30 * MS),
        ("backward", 8 * MS, 35 * MS),
        ("optimizer", 2 * MS, 8 * MS),
        (OTHER, 1 * MS, 0.0),
    )
    sync: tuple[str, ...] = ("backward",)
    exchange_s: float = 5 * MS
    waits_in: str | None = OTHER
    behind: bool = False
    ahead_steps: int = 2
    noise: Noise = CALM

    def run(self, *faults: Fault, kernels: tuple[Fault, ...] = (), seed=0, device=True, ready=False, warm_up=4):
        """A window of the job with faults on hosts and in kernels; without ``device``, on the host's clock alone.

        ``ready``: with the moment of the last gradient, on the device.
        """
        n_all, n_ranks, n_stages = self.n_steps + warm_up, self.n_ranks, len(self.stages)
        host_R, device_R, through = np.zeros(n_ranks), np.zeros(n_ranks), []
        host_NRB, device_NRB = (np.zeros((n_all, n_ranks, n_stages + 1)) for _ in range(2))
        ready_NR = np.zeros((n_all, n_ranks))
        n_times, n_exchanges = n_stages + sum(device_s > 0 for *_, device_s in self.stages), len(self.sync)
        # Drawn at once, in the order in which the steps use it.
        noise = Drawn(self.noise, seed, n_all, n_ranks * n_times + n_exchanges)

        def own(stage, seconds, among):
            own_NR = seconds * noise.next(n_ranks)
            for fault in (one for one in among if one.stage == stage):
                on_NR = np.zeros((n_all, n_ranks), dtype=bool)
                on_NR[warm_up:] = fault.applies(self.n_steps, n_ranks)
                own_NR = np.where(on_NR, own_NR * fault.factor + fault.seconds, own_NR)
            return own_NR

        times = []
        for stage, host_s, device_s in self.stages:
            launching_NR = own(stage, host_s, faults)
            working_NR = own(stage, device_s, kernels) if device_s else None
            exchange_N = self.exchange_s * noise.next(1)[:, 0] if stage in self.sync else None
            times.append((stage, launching_NR, working_NR, exchange_N))

        for n in range(n_all):
            if self.waits_in is None and n >= self.ahead_steps:
                host_R = np.maximum(host_R, through[n - self.ahead_steps])
            for s, (stage, launching_NR, working_NR, exchange_N) in enumerate(times):
                began_R = host_R
                # The device gets to the boundary when it is through with what was launched before.
                device_R = np.maximum(device_R, host_R)
                host_NRB[n, :, s], device_NRB[n, :, s] = host_R, device_R
                host_R = host_R + launching_NR[n]
                if working_NR is not None:
                    device_R = np.maximum(np.maximum(device_R, began_R) + working_NR[n], host_R)
                if exchange_N is not None:
                    ready_NR[n] = device_R - device_NRB[n, :, s]
                    device_R = np.full(n_ranks, device_R.max() + exchange_N[n])
                if stage == self.waits_in and not self.behind:
                    host_R = np.maximum(host_R, device_R)
                elif stage == self.waits_in and n:
                    host_R = np.maximum(host_R, through[n - 1])
            device_R = np.maximum(device_R, host_R)
            host_NRB[n, :, -1], device_NRB[n, :, -1] = host_R, device_R
            through.append(device_R)
        host, on_device = (self._window(at_NRB[warm_up - 1 :]) for at_NRB in (host_NRB, device_NRB))
        if not device:
            return replace(host, on_device=True)
        return replace(
            host,
            on_device=True,
            device_NRS=on_device.durations_NRS,
            device_outside_NRG=on_device.outside_NRG,
            device_between_NR=on_device.between_NR,
            device_ready_NR=ready_NR[warm_up:] if ready else None,
        )

    def _window(self, at_NRB):
        """The window of these boundaries; the first step is only there for what passed after it."""
        n_steps, n_ranks = at_NRB.shape[0] - 1, at_NRB.shape[1]
        return Window(
            StageSchema(tuple(name for name, *_ in self.stages), self.sync),
            0,
            np.diff(at_NRB[1:], axis=2),
            outside_NRG=np.zeros((n_steps, n_ranks, len(self.sync))),
            between_NR=at_NRB[1:, :, 0] - at_NRB[:-1, :, -1],
        )


SETTINGS = Settings()
READS_LOSS = GpuJob()  # `loss.item()` after the optimizer: hosts wait for their devices there
WAITS_IN_BACKWARD = GpuJob(waits_in="backward")
RUNS_AHEAD = GpuJob(waits_in=None)  # hosts two steps ahead of their devices
COPIES_IN_DATA = GpuJob(waits_in="data")  # a blocking copy to the device

QUEUE_FULL_IN_BACKWARD = GpuJob(waits_in="backward", behind=True)  # hosts a step ahead, launching what fits

SLOW_FORWARD = Fault("forward", 2, 20 * MS)  # in its kernels, or in launching them
SLOW_LAUNCHES = Fault("forward", 1, 60 * MS)
LATE_DATA = Fault("data", 2, 30 * MS)
LATE_DATA_EVERYWHERE = Fault("data", None, 30 * MS)


HEALTHY, LIMITED = "healthy", "clock_limited"


def case(situation, job, device, host, hosts=None, kernels=None, known=True):
    """A situation, and the verdict with device times and without: a label's reason, or (rank, stage).

    ``hosts`` and ``kernels``: what is slow on hosts, and on devices. ``known``: healthy windows went before.
    """
    faults = [() if fault is None else (fault,) for fault in (hosts, kernels)]
    return pytest.param(job, device, host, *faults, known, id=situation)


SLOW_OPTIMIZER, SLOW_BACKWARD = replace(SLOW_FORWARD, stage="optimizer"), replace(SLOW_FORWARD, stage="backward")

TRUTH = [
    *(
        case(f"nothing happens, {name}, {'' if known else 'not '}known", job, HEALTHY, HEALTHY, known=known)
        for name, job in (("reading losses", READS_LOSS), ("running ahead", RUNS_AHEAD), ("copying", COPIES_IN_DATA))
        for known in (False, True)
    ),
    # A slow kernel on one rank is everyone's wait, in whatever stage the hosts wait.
    case("a slow kernel", READS_LOSS, (2, "forward"), LIMITED, kernels=SLOW_FORWARD),
    case("a slow kernel, waiting in the sync", WAITS_IN_BACKWARD, (2, "forward"), LIMITED, kernels=SLOW_FORWARD),
    case("a slow kernel, hosts ahead", RUNS_AHEAD, (2, "forward"), LIMITED, kernels=SLOW_FORWARD),
    case("a slow kernel, and all wait in data", COPIES_IN_DATA, (2, "forward"), LIMITED, kernels=SLOW_FORWARD),
    case("a slow kernel after the sync", READS_LOSS, (2, "optimizer"), LIMITED, kernels=SLOW_OPTIMIZER),
    # It was there from the first step on: on the host's clock all is as ever.
    case("a slow kernel, always", READS_LOSS, (2, "forward"), HEALTHY, kernels=SLOW_FORWARD, known=False),
    # In the sync stage the devices tie as hosts do without devices.
    case("a slow kernel in the sync", READS_LOSS, "sync_ambiguous", LIMITED, kernels=SLOW_BACKWARD),
    # Launch-bound: the device waits for what its host is late to launch.
    case("slow launches", READS_LOSS, (1, "forward"), LIMITED, SLOW_LAUNCHES),
    case("launches, named by the host", WAITS_IN_BACKWARD, (1, "forward"), LIMITED, SLOW_LAUNCHES, known=False),
    # A late batch is the host's own work, and its clock tells where the hosts wait for each other in the sync stage.
    case("late data", READS_LOSS, (2, "data"), LIMITED, LATE_DATA),
    case("late data, waiting in the sync", WAITS_IN_BACKWARD, (2, "data"), (2, "data"), LATE_DATA),
    case("late data, waiting, always", WAITS_IN_BACKWARD, (2, "data"), (2, "data"), LATE_DATA, known=False),
    # Devices that have enough to do meanwhile lose nothing.
    case("late data, hosts ahead", RUNS_AHEAD, HEALTHY, HEALTHY, LATE_DATA),
    case("slow launches, hosts ahead", RUNS_AHEAD, HEALTHY, HEALTHY, SLOW_LAUNCHES),
    case("late data, hosts ahead up to backward", QUEUE_FULL_IN_BACKWARD, HEALTHY, LIMITED, LATE_DATA),
    case("late data everywhere", READS_LOSS, ("all", "data"), LIMITED, LATE_DATA_EVERYWHERE),
    case("late data everywhere, hosts ahead", RUNS_AHEAD, HEALTHY, LIMITED, LATE_DATA_EVERYWHERE),
]


@cache
def healthy_past(job, device):
    windows = (job.run(seed=1000 + n, device=device) for n in range(10))
    return past_of(replace(window, first_step=job.n_steps * (n - 10)) for n, window in enumerate(windows))


def judged(job, seed, device, hosts=(), kernels=(), known=True):
    window = job.run(*hosts, kernels=kernels, seed=seed, device=device)
    return classify(window, healthy_past(job, device) if known else None, SETTINGS)


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
@pytest.mark.parametrize(("job", "device", "host", "hosts", "kernels", "known"), TRUTH)
def test_the_truth_table(job, device, host, hosts, kernels, known, on_device):
    for seed in range(3):
        # GIVEN the situation, WHEN its window is classified with device times or without
        verdict = judged(job, seed, on_device, hosts, kernels, known)
        # THEN it says its clock, and the label is the one, and the reason, or the suspect
        assert verdict.clock == ("device" if on_device else "host")
        expected = device if on_device else host
        if expected == HEALTHY:
            assert (verdict.label, verdict.reasons) == ("healthy", ()), dict(verdict.numbers)
        elif isinstance(expected, str):
            assert (verdict.label, verdict.reasons) == ("needs_evidence", (expected,)), dict(verdict.numbers)
        else:
            first = verdict.suspects[0]
            assert (verdict.label, verdict.reasons) == ("suspect", ()), dict(verdict.numbers)
            assert ("all" if first.scope == "all" else first.rank, first.stage) == expected


def test_a_job_on_cpus_is_judged_on_the_hosts_clock():
    # GIVEN a job that no device is part of
    verdict = classify(Job().run(Fault("forward", 1, 0.030)))
    # THEN the host's clock decides, and the verdict has no other
    assert (verdict.label, verdict.clock, verdict.suspects[0].stage) == ("suspect", "host", "forward")
    assert not {"device_coverage", "clock_agreement"} & set(verdict.numbers)
    assert "clock" not in verdict_sentence(verdict)


def without_device_times(window, steps, ranks=slice(None)):
    for values in (window.device_NRS, window.device_outside_NRG, window.device_between_NR):
        values[steps, ranks] = np.nan
    return window


@pytest.mark.parametrize(
    ("situation", "steps", "ranks", "clock"),
    [
        ("one step of one rank", 7, 2, "device"),
        ("the last steps, whose events were not ready", slice(34, None), slice(None), "device"),
        ("every fifth step of a rank, and so what passed before the next", slice(None, None, 5), 1, "device"),
        ("every third step of a rank, and so what passed before the next", slice(None, None, 3), 1, "host"),
        ("one rank", slice(None), 3, "host"),
        ("all", slice(None), slice(None), "host"),
    ],
)
def test_steps_without_device_times_are_left_out_until_too_few_are_left(situation, steps, ranks, clock):
    # GIVEN a slow kernel, and device times that are not all there
    window = without_device_times(WAITS_IN_BACKWARD.run(kernels=(SLOW_FORWARD,)), steps, ranks)
    # WHEN classified
    verdict = classify(window)
    # THEN it is judged on the device's clock as long as at least half of the steps are known there
    assert verdict.clock == clock
    assert (verdict.numbers["device_coverage"] >= verdict.numbers["min_device_coverage"]) == (clock == "device")
    if clock == "device":
        assert (verdict.label, verdict.suspects[0].stage) == ("suspect", "forward")
        assert sum(verdict.advances_s.values()) == pytest.approx(verdict.exposed_s, rel=1e-12)


def test_steps_that_the_host_alone_lacks_are_not_counted():
    # GIVEN two steps that the host's ring of a rank lost before they were read, and device times of all
    window = READS_LOSS.run(kernels=(SLOW_FORWARD,))
    for values in (window.durations_NRS, window.outside_NRG, window.between_NR):
        values[10:12, 3] = np.nan
    # THEN they decide nothing about the clock, and every number is one
    verdict = classify(window)
    assert (verdict.clock, verdict.label, verdict.numbers["device_coverage"]) == ("device", "suspect", 1.0)
    assert np.isfinite(list(verdict.numbers.values())).all()


def test_the_hosts_ready_moment_does_not_count_on_the_devices_clock():
    # GIVEN a kernel that is slow inside the sync stage, and a host that launched late there for another reason
    past = healthy_past(READS_LOSS, device=True)
    window = READS_LOSS.run(kernels=(replace(SLOW_FORWARD, stage="backward"),))
    ready_NR = np.full(window.durations_NRS.shape[:2], 5 * MS)
    ready_NR[:, 1] = 35 * MS
    # THEN that host is not named for it
    assert classify(replace(window, ready_NR=ready_NR), past).reasons == ("sync_ambiguous",)


def test_a_late_last_gradient_on_the_device_names_its_rank_in_the_sync_stage():
    # GIVEN the same kernel, and events where each device had its last gradient
    window = READS_LOSS.run(kernels=(replace(SLOW_FORWARD, stage="backward"),), ready=True)
    # THEN its rank is named, without any past, on the device's clock
    verdict = classify(window)
    first = verdict.suspects[0]
    assert (verdict.label, first.rank, first.stage, verdict.clock) == ("suspect", 2, "backward", "device")
    # AND healthy devices are healthy
    assert classify(READS_LOSS.run(ready=True)).label == "healthy"


def test_missing_ranks_are_missing_on_any_clock():
    # GIVEN a rank that shows nothing at all
    window = without_device_times(READS_LOSS.run(kernels=(SLOW_FORWARD,)), slice(None, 20), 3)
    for values in (window.durations_NRS, window.outside_NRG, window.between_NR):
        values[:20, 3] = np.nan
    # THEN the verdict has that
    assert classify(window).reasons == ("low_coverage",)


@pytest.mark.parametrize("kernels", [(), (SLOW_FORWARD,)], ids=["healthy", "slow"])
def test_if_clocks_disagree_the_verdict_shows_both_and_is_held(kernels):
    # GIVEN device times that lack more than half of the step: those of another stream, say
    window = READS_LOSS.run(kernels=kernels)
    window = replace(window, device_NRS=0.4 * window.device_NRS, device_outside_NRG=None, device_between_NR=None)
    # WHEN classified
    verdict = classify(window)
    # THEN it is held, with both clocks' numbers
    assert (verdict.label, verdict.reasons, verdict.clock) == ("needs_evidence", ("clock_limited",), "host")
    assert verdict.numbers["device_step_s"] == pytest.approx(0.4 * verdict.numbers["host_step_s"], rel=0.05)
    missed = [check.name for check in explain(verdict).checks if not check.met]
    assert "clock_agreement" in missed


def test_each_clock_has_its_own_baseline():
    # GIVEN a job whose healthy windows were judged on the device's clock
    past = past_of(READS_LOSS.run(seed=seed) for seed in range(10))
    assert past.device is not None
    assert past.baseline.n_windows == 0
    # WHEN a window comes without device times, and then one with them
    verdict, past = judge(READS_LOSS.run(seed=20, device=False), past, SETTINGS)
    assert (verdict.label, verdict.clock, verdict.numbers["has_baseline"]) == ("healthy", "host", 0.0)
    verdict, past = judge(READS_LOSS.run(seed=21), past, SETTINGS)
    # THEN each stands beside its own past
    assert (verdict.clock, verdict.numbers["has_baseline"]) == ("device", 1.0)
    assert (past.baseline.n_windows, past.device.baseline.n_windows) == (1, 11)


def test_a_verdict_has_its_clock_and_a_held_one_its_resolution():
    # GIVEN the same fault with device times and without
    on_device, held = (judged(READS_LOSS, 0, device, kernels=(SLOW_FORWARD,)) for device in (True, False))
    # THEN the sentences say so
    assert verdict_sentence(on_device).startswith("Rank 2 is slow in forward")
    assert verdict_sentence(on_device).endswith(", by the devices' clock.")
    assert verdict_sentence(held).startswith("Held: clock_limited in steps 0 to 49: ")
    assert explain(held).changes == (
        "judged by the devices' clock if this reached its threshold: steps whose device times are known",
    )


def test_reproduction_is_judged_on_the_clock_that_named_the_fault():
    # GIVEN a slow kernel that had led to a capture, and the captured steps on both clocks
    suspect = judged(READS_LOSS, 0, True, kernels=(SLOW_FORWARD,)).suspects[0]
    trigger = Trigger(
        0, 49, "suspect", suspect.scope, suspect.ranks, suspect.stage, suspect.gain_s, suspect.share, 1.0, "p", "", "r"
    )
    steps = replace(READS_LOSS, n_steps=5)
    # THEN it was there on the device's clock, and on the host's alone it is unknown
    assert reproduced(steps.run(kernels=(SLOW_FORWARD,)), trigger).answer == "yes"
    assert reproduced(steps.run(), trigger).answer == "no"
    assert reproduced(steps.run(kernels=(SLOW_FORWARD,), device=False), trigger) is None


@given(windows(missing=False), st.data())
def test_advances_sum_to_the_exposed_time_on_whichever_clock(window, data):
    # GIVEN any window at all, with any device times, some of them missing
    n_steps, n_ranks, _ = window.durations_NRS.shape
    times_NRS = data.draw(hnp.arrays(np.float64, window.durations_NRS.shape, elements=ORDINARY, fill=ORDINARY))
    gone_N = data.draw(hnp.arrays(np.bool_, n_steps))
    times_NRS[gone_N, data.draw(st.integers(0, n_ranks - 1))] = np.nan
    both = replace(window, on_device=True, device_NRS=times_NRS, device_between_NR=window.between_NR)
    # WHEN it is classified
    verdict = classify(both, Past(), SETTINGS)
    # THEN its advances are not negative and sum to its exposed time, which is that of one clock
    assert sum(verdict.advances_s.values()) == pytest.approx(verdict.exposed_s, rel=1e-9, abs=1e-300)
    assert min(verdict.advances_s.values()) >= 0.0
    if verdict.clock == "host":
        assert verdict.exposed_s * n_steps == pytest.approx(anchored(window).exposed_s, rel=1e-9)
        return
    between_NR = window.between_NR
    if between_NR is not None:
        between_NR = between_NR.copy()
        between_NR[1:][np.isnan(times_NRS[:-1]).all(axis=2)] = np.nan
    device = anchored(replace(window, durations_NRS=times_NRS, outside_NRG=None, between_NR=between_NR, ready_NR=None))
    assert verdict.exposed_s * device.n_steps == pytest.approx(device.exposed_s, rel=1e-9)
    assert gone_N.mean() <= 1.0 - SETTINGS.most_fraction
