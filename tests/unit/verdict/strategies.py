"""Any window there could be: not honest ones (see `windows`), but everything a verdict must survive."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sftriage.model.windows import OTHER, StageSchema, Window

NAMES = ("data", "h2d", "forward", "backward", "optimizer", "log")

ORDINARY = st.floats(0.0, 10.0, allow_subnormal=False)
ANY = st.one_of(ORDINARY, st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.1, 0.1, 1e9, 1e300]))


@st.composite
def schemas(draw):
    n_stages = draw(st.integers(1, len(NAMES)))
    stages = NAMES[:n_stages]
    sync = tuple(name for name in stages if draw(st.booleans()))
    return StageSchema.closed(stages, sync) if draw(st.booleans()) else StageSchema(stages, sync)


@st.composite
def missing_vectors(draw, n_steps, n_ranks):
    """Some of two steps in three; now and then the others. One number a step is drawn sooner than one a vector."""
    n_cases = 3 * 2**n_ranks
    # Small numbers are drawn more often than large ones: a large prime leaves every case, in another order.
    cases = [draw(st.integers(0, n_cases - 1)) * 2_654_435_761 % n_cases for _ in range(n_steps)]
    gone = [case if 3 * case < 2 * n_cases else 0 for case in cases]
    gone_NR = np.array([[bool(ranks >> rank & 1) for rank in range(n_ranks)] for ranks in gone])
    return gone_NR ^ (draw(st.integers(0, 4)) == 4)


@st.composite
def windows(draw, elements=ORDINARY, min_ranks=1, max_ranks=6, missing=True, refined=True):
    schema = draw(schemas())
    n_steps, n_ranks, n_stages = draw(st.integers(1, 6)), draw(st.integers(min_ranks, max_ranks)), len(schema.stages)
    n_sync = len(schema.sync)

    def array(*shape):
        return draw(hnp.arrays(np.float64, shape, elements=elements, fill=elements))

    durations_NRS = array(n_steps, n_ranks, n_stages)
    optional = {}
    if refined and OTHER in schema.stages and n_sync and draw(st.booleans()):
        optional["outside_NRG"] = array(n_steps, n_ranks, n_sync)
        durations_NRS[:, :, -1] += optional["outside_NRG"].sum(axis=2)
    if refined and OTHER in schema.stages and draw(st.booleans()):
        optional["between_NR"] = array(n_steps, n_ranks)
    if refined and n_sync and draw(st.booleans()):
        at = schema.stages.index(schema.split_sync)
        optional["ready_NR"] = durations_NRS[:, :, at] * draw(st.floats(0.0, 1.0))
    if missing:
        gone_NR = draw(missing_vectors(n_steps, n_ranks))
        for values in (durations_NRS, *optional.values()):
            values[gone_NR] = np.nan
    return Window(schema, draw(st.integers(0, 10**9)), durations_NRS, **optional)


@st.composite
def distinct_windows(draw):
    """Windows in which no two ranks tie, so that the leader is unique; some with a slow rank."""
    window = draw(windows(missing=False, refined=False, min_ranks=2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    durations_NRS = rng.gamma(20.0, 0.05, window.durations_NRS.shape)
    durations_NRS[:, -1, -1] += draw(st.sampled_from([0.0, 0.5, 5.0]))
    return Window(window.schema, window.first_step, durations_NRS)
