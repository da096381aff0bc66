"""Windows of a job on GPUs: every rank has a host that launches and a device that works, each with a clock of its own.

A host goes through its stages launching; a device does what was launched, in order, no sooner than it was launched and
no faster than that. In the sync stage the devices wait for one another, and no host does. A host waits for its device
at one place of the step (`loss.item()`), or only where it is too many steps ahead of it. Stage boundaries are taken on
both clocks, as the recorder does: the device gets there when it is through with what was launched before.
"""

from dataclasses import dataclass, replace

import numpy as np

from sftriage.model.windows import OTHER, StageSchema, Window
from tests.scenario import CALM, Drawn, Fault, Noise

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
