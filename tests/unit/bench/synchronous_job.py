"""A synchronous job made up, as it would have been recorded."""

import numpy as np

from bench.resampled import own_times
from bench.rows import STAGES, SYNC
from sftriage.model.windows import StageSchema, Window

SCHEMA = StageSchema((*STAGES, "other"), SYNC)
TWO_SYNCS = StageSchema(("data", "gather", "forward", "backward", "optimizer", "other"), ("gather", "backward"))
OWN_MS = {"data": 20.0, "h2d": 5.0, "gather": 5.0, "forward": 30.0, "backward": 25.0, "optimizer": 8.0, "other": 1.0}
SYNC_MS = 10.0
LAST, FIRST_OTHER = 2, 1


def recorded(n_steps=200, n_ranks=4, *, schema=SCHEMA, jitter=0.02, split=True, kinds=None, seed=7):
    """A window of a synchronous job in which rank 2 is the last one in every step. All leave a sync together."""
    rng = np.random.default_rng(seed)
    own_S = np.array([OWN_MS[name] for name in schema.stages]) / 1e3
    values_NRS = own_S * (1.0 + jitter * rng.uniform(-1.0, 1.0, (n_steps, n_ranks, len(own_S))))
    values_NRS[:, LAST, 0] += 0.01
    outside_NRG = rng.uniform(0.0, 1e-4, (n_steps, n_ranks, len(schema.sync)))
    between_NR = rng.uniform(0.0, 1e-4, (n_steps, n_ranks))
    durations_NRS, ready_NR = values_NRS.copy(), None
    late_R = np.zeros(n_ranks)
    for n in range(n_steps):
        first = 0
        for g, sync in enumerate(schema.stages.index(stage) for stage in schema.sync_in_order):
            local_R = values_NRS[n, :, first : sync + 1].sum(axis=1) + outside_NRG[n, :, g]
            if g == 0:
                local_R = local_R + between_NR[n] + late_R
            durations_NRS[n, :, sync] += local_R.max() - local_R + SYNC_MS / 1e3
            first = sync + 1
        late_R = values_NRS[n, :, first:].sum(axis=1)
    durations_NRS[:, :, -1] += outside_NRG.sum(axis=2)
    if split:
        ready_NR = values_NRS[:, :, schema.stages.index(schema.sync_in_order[0])]
    return Window(schema, 0, durations_NRS, outside_NRG, between_NR, ready_NR, kinds=kinds)


def own(n_steps=200, n_ranks=4, **values):
    return own_times(recorded(n_steps, n_ranks, **values))
