"""Traces of jobs whose stragglers are known: a hybrid-parallel job that never ran, with faults planted in it.

Which operation waits for which is written here from what such a job does (which microbatch goes where), and not from
the order and the times of a recording, which is all that sftriage has of one.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.stragglers.graph import graph_of, timeline
from sftriage.stragglers.kinds import attributed
from sftriage.stragglers.pipeline import TYPES, TraceRows
from sftriage.stragglers.slowdown import slowdown_of

FORWARD_S, BACKWARD_S, TRANSFER_S, COLLECTIVE_S = 0.010, 0.020, 0.0005, 0.003
FORWARD_SIDE = {"forward": (1, -1), "backward": (-1, 1)}


@dataclass
class Job:
    """A job of some shape, and what its operations take: (operations, steps, data-parallel ranks), seconds.

    ``overlap``: gradients leave while backward still computes. ``ragged``: transfers that go nowhere are partly not
    recorded, and some are that were never made, before all others and after them.
    """

    stages: int = 4
    dps: int = 4
    microbatches: int = 8
    chunks: int = 1
    steps: int = 6
    overlap: bool = False
    ragged: bool = False
    jitter: float = 0.01
    seed: int = 0
    names: list = field(default_factory=list)
    dependencies: list = field(default_factory=list)
    groups: list = field(default_factory=list)
    joined: list = field(default_factory=list)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.at = {}
        # Of each operation its type, stage, sequence number, chunk and microbatch.
        for stage in range(self.stages):
            self._stage(stage)
        self._pair_up()
        shape = (len(self.names), self.steps, self.dps)
        nominal = np.array([self._nominal(*one) for one in self.names])[:, None, None]
        self.work = nominal * self.random.uniform(1 - self.jitter, 1 + self.jitter, shape)

    def _nominal(self, kind, stage, seq, chunk, microbatch):
        if kind.endswith("-compute"):
            return (FORWARD_S if kind.startswith("forward") else BACKWARD_S) / self.chunks
        if kind == "gc":
            return 0.0
        return TRANSFER_S if kind.endswith(("send", "recv")) else COLLECTIVE_S

    def schedule(self, stage):
        """What a stage computes, in order: (forward or backward, chunk, microbatch); one forward, one backward."""
        total, width = self.microbatches * self.chunks, self.stages * self.chunks

        def virtual(number, way):
            if self.chunks == 1:
                return way, 0, number
            chunk = number % width // self.stages
            return (
                way,
                chunk if way == "forward" else self.chunks - 1 - chunk,
                number // width * self.stages + number % self.stages,
            )

        ahead = self.stages - stage - 1
        warm_up = min(total, ahead if self.chunks == 1 else 2 * ahead + (self.chunks - 1) * self.stages)
        order = [virtual(number, "forward") for number in range(warm_up)]
        for number in range(total - warm_up):
            order += [virtual(warm_up + number, "forward"), virtual(number, "backward")]
        return order + [virtual(number, "backward") for number in range(total - warm_up, total)]

    def add(self, kind, stage, seq, chunk=-1, microbatch=-1, *before):
        index = len(self.names)
        self.names.append((kind, stage, seq, chunk, microbatch))
        self.at[kind, stage, seq] = index
        self.dependencies += [(one, index) for one in before if one is not None]
        return index

    def _last(self, kind, stage, seq):
        return self.at.get((kind, stage, seq - 1))

    def _stage(self, stage):
        gathers = []
        for chunk in range(self.chunks):
            gathers.append(self.add("params-all-gather", stage, chunk, chunk, -1, *gathers[-1:]))
            self._alone(gathers[-1], joined=True)
        counts, before, computed = {"forward": 0, "backward": 0}, None, []
        last_of_chunk, scatters = {}, []
        if self.ragged:
            self._never_made("backward-send", stage)
        for way, chunk, microbatch in self.schedule(stage):
            seq = counts[way]
            counts[way] += 1
            kind = f"{way}-compute"
            earlier = self.at.get((kind, stage, seq - 1))
            index = self.add(kind, stage, seq, chunk, microbatch, before)
            if way == "forward" and not any(self.names[one][3] == chunk for one in computed):
                self.dependencies.append((gathers[chunk], index))
            # Of one chunk nothing is recorded past the ends of the pipeline; of several all is, also what goes nowhere.
            for side, distance in zip(("send", "recv"), FORWARD_SIDE[way], strict=True):
                layer = chunk * self.stages + stage
                if not 0 <= layer + distance < self.stages * self.chunks and (
                    self.chunks == 1 or (self.ragged and (way, seq) in (("forward", 0), ("forward", self._last_seq)))
                ):
                    continue
                comm = f"{way}-{side}"
                n_th = self.at.get(("count", comm, stage), 0)
                self.at["count", comm, stage] = n_th + 1
                one = self.add(comm, stage, n_th, -1, -1, self._last(comm, stage, n_th))
                if side == "send":
                    self.dependencies.append((index, one))
                else:
                    self.dependencies.append((one, index))
                    self.dependencies += [(earlier, one)] if earlier is not None else []
                if way == "backward" and seq == 0:
                    firsts = [at for at in computed if self.names[at][0] == "forward-compute"]
                    if len(computed) >= 2:
                        self.dependencies.append((firsts[-2], one))
                self.at["of", way, side, stage, chunk, microbatch] = one
            before = index
            computed.append(index)
            last_of_chunk[way, chunk] = index
        if self.ragged:
            self._never_made("forward-recv", stage, last_of_chunk["forward", self.chunks - 1])
        end = self.add("gc", stage, 0, -1, -1, before)
        norm = self.add("layernorm-grads-all-reduce", stage, 0, -1, -1, end)
        embedding = norm
        if stage in (0, self.stages - 1):
            embedding = self.add("embedding-grads-all-reduce", stage, 0, -1, -1, norm)
        for seq in range(self.chunks):
            chunk = self.chunks - 1 - seq
            first = [last_of_chunk["backward", chunk]] if self.overlap else [embedding] if not seq else []
            scatters.append(
                self.add("grads-reduce-scatter", stage, seq, chunk, -1, *first, *(scatters[-1:] or gathers[-1:]))
            )
            self._alone(scatters[-1], joined=True)
        tail = scatters[-1]
        if self.overlap:
            self.dependencies.append((scatters[-1], norm))
            tail = self.add("separate-grads-all-reduce", stage, 0, -1, -1, embedding)
            self._alone(tail, joined=True)
        clip = self.add("optimizer-clip-main-grad", stage, 0, -1, -1, tail)
        self.add("optimizer", stage, 0, -1, -1, clip)

    @property
    def _last_seq(self):
        return self.microbatches * self.chunks - 1

    def _never_made(self, kind, stage, *before):
        n_th = self.at.get(("count", kind, stage), 0)
        self.at["count", kind, stage] = n_th + 1
        self._alone(self.add(kind, stage, n_th, -1, -1, self._last(kind, stage, n_th), *before))

    def _alone(self, index, *, joined=False):
        self.groups.append([index])
        self.joined.append(joined)

    def _pair_up(self):
        paired = set()
        for key, sender in list(self.at.items()):
            if key[:1] != ("of",) or key[2] != "send":
                continue
            _, way, _, stage, chunk, microbatch = key
            layer = chunk * self.stages + stage + FORWARD_SIDE[way][0]
            if 0 <= layer < self.stages * self.chunks:
                to = ("of", way, "recv", layer % self.stages, layer // self.stages, microbatch)
                self.groups.append([sender, self.at[to]])
                self.joined.append(False)
                paired |= {sender, self.at[to]}
        for key, one in list(self.at.items()):
            if key[:1] == ("of",) and one not in paired:
                self._alone(one)
        ends = {self.at["embedding-grads-all-reduce", stage, 0] for stage in (0, self.stages - 1)}
        self.groups += [sorted(ends), [self.at["optimizer-clip-main-grad", stage, 0] for stage in range(self.stages)]]
        self.joined += [False, True]

    def ops(self, way=None, stage=None, kind=None):
        """Which operations: computations of a way, of a stage, of a type."""
        return np.array(
            [
                index
                for index, (its, pp, *_) in enumerate(self.names)
                if (way is None or its == f"{way}-compute") and stage in (None, pp) and kind in (None, its)
            ]
        )

    def times(self):
        """When each operation begins and ends."""
        graph = graph_of(len(self.names), self.dependencies, self.groups, self.joined)
        return timeline(graph, self.work)

    def rows(self, shuffled=False):
        """The recording, a row an operation."""
        start, end = self.times()
        optypes = list(TYPES)
        n_dps = start.shape[2]
        op, step, dp = (one.ravel() for one in np.indices(start.shape))
        if shuffled:
            order = self.random.permutation(op.size)
            op, step, dp = op[order], step[order], dp[order]
        kind, pp, seq, chunk, microbatch = (
            np.array(one) for one in zip(*[(optypes.index(name), *more) for name, *more in self.names], strict=True)
        )
        chunk_of, pp_of = chunk[op], pp[op]
        computes = np.isin(kind[op], [optypes.index("forward-compute"), optypes.index("backward-compute")])
        return TraceRows(
            optypes=optypes,
            optype_E=kind[op].astype(np.int8),
            dp_E=dp.astype(np.int8),
            pp_E=pp_of.astype(np.int8),
            step_E=(7 + 3 * step).astype(np.int64),
            start_E=start[op, step, dp],
            duration_E=(end - start)[op, step, dp],
            seq_E=seq[op].astype(np.int32),
            chunk_E=chunk_of.astype(np.int8),
            microbatch_E=microbatch[op].astype(np.int16),
            model_chunk_E=np.where(computes, chunk_of * self.stages + pp_of, -1).astype(np.int16),
            rank_E=(pp_of * n_dps + dp).astype(np.int16),
        )

    # What may be planted.

    def slow_worker(self, ratio=1.6):
        """One worker that takes longer for all it computes."""
        dp, pp = int(self.random.integers(self.dps)), int(self.random.integers(self.stages))
        for way in ("forward", "backward"):
            self.work[self.ops(way, pp), :, dp] *= ratio
        return dp, pp

    def last_stage(self, ratio=1.5):
        """A last stage that has more to compute."""
        for way in ("forward", "backward"):
            self.work[self.ops(way, self.stages - 1)] *= ratio

    def sequence_lengths(self, spread=0.6):
        """Microbatches that are long and short on all stages, and their own on each data-parallel rank."""
        lengths = self.random.lognormal(0.0, spread, (self.microbatches, self.steps, self.dps))
        for way in ("forward", "backward"):
            for op in self.ops(way):
                self.work[op] *= lengths[self.names[op][4]]

    def garbage_collection(self, pause_s=0.060, every=12):
        """Every worker stops now and then, each when its own time has come, while it launches a forward."""
        for stage in range(self.stages):
            forwards = self.ops("forward", stage)
            hit = self.random.random((len(forwards), self.steps, self.dps)) < 1.0 / every
            self.work[forwards] += pause_s * hit

    def communication(self, ratio=20.0, every=3):
        """In one step of several, the collectives over gradients take long on all workers."""
        scatters = self.ops(kind="grads-reduce-scatter")
        self.work[scatters[:, None], np.arange(0, self.steps, every)] *= ratio


class Planted:
    """A published trace, mended, with faults planted in what its computations took; seeded.

    Every mended worker takes what a healthy one of its stage took, step by step, and the stages are equal.
    """

    def __init__(self, operations, seed=0):
        self.random = np.random.default_rng(seed)
        self.phase_T = np.array([operations.types[index].phase for index in operations.type_T])
        self.pp_T, self.pps, self.operations = operations.pp_TW[:, 0], operations.pp_ranks, operations
        _, self.n_steps, self.n_dps = operations.shape
        self.work = operations.work_TNW.astype(np.float64)
        self.microbatches = sorted(set(operations.microbatch_T[self.phase_T != ""].tolist()))
        mean_s = {phase: self.work[self.ops(phase)].mean(axis=(1, 2)) for phase in ("forward", "backward")}
        for pp in self.pps:
            for phase in ("forward", "backward"):
                ops_M = self.ops(phase, pp)
                median_W = np.median(self.work[ops_M], axis=(0, 1))
                for column in range(self.n_dps):
                    if median_W[column] > 1.2 * median_W.min():
                        healthy = self.work[ops_M, :, int(median_W.argmin())]
                        self.work[ops_M, :, column] = healthy[:, self.random.permutation(self.n_steps)]
                self.work[ops_M] *= np.median(mean_s[phase]) / self.work[ops_M].mean()

    def ops(self, phase="", pp=None):
        """The computations of a phase, or of both, of a stage, or of all."""
        phases = [phase] if phase else ["forward", "backward"]
        return np.flatnonzero(np.isin(self.phase_T, phases) & (True if pp is None else self.pp_T == pp))

    def result(self):
        return replace(self.operations, work_TNW=self.work)

    def slower(self, worker, ratio, steps=slice(None)):
        column, pp = worker
        self.work[self.ops(pp=pp)[:, None], np.arange(self.n_steps)[steps], column] *= ratio
        return self.operations.dp_ranks[column], pp

    def workers(self, n):
        """Some workers (column, stage), each of another data-parallel rank and stage while there are."""
        dps, pps = self.random.permutation(self.n_dps), self.random.permutation(len(self.pps))
        return [(int(dps[k % len(dps)]), self.pps[pps[k % len(pps)]]) for k in range(n)]

    # What may be planted; each returns the kinds that there are then, the largest first, and the workers of the first.

    def nothing(self):
        return [], None

    def slow_worker(self, ratio=1.4):
        return ["slow_worker"], {self.slower(self.workers(1)[0], ratio)}

    def slow_worker_at_the_end(self):
        first = int(self.n_steps * self.random.uniform(0.8, 0.9))
        return ["slow_worker"], {self.slower(self.workers(1)[0], 1.5, slice(first, None))}

    def slow_worker_now_and_then(self):
        steps = self.random.choice(self.n_steps, max(3, round(0.1 * self.n_steps)), replace=False)
        return ["slow_worker"], {self.slower(self.workers(1)[0], 1.6, steps)}

    def two_slow_workers(self):
        return ["slow_worker"], {self.slower(worker, 1.3) for worker in self.workers(2)}

    def slow_worker_from_the_first_third_on(self):
        return ["slow_worker"], {self.slower(self.workers(1)[0], 1.5, slice(self.n_steps // 3, None))}

    def workers_slow_in_turn(self):
        turn = self.random.random(self.n_steps) < 0.5
        turns = zip(self.workers(2), (turn, ~turn), strict=True)
        return ["slow_worker"], {self.slower(worker, 1.6, np.flatnonzero(steps)) for worker, steps in turns}

    def slow_dp_rank(self, ratio=1.3, steps=slice(None)):
        dp = int(self.random.integers(self.n_dps))
        return ["slow_dp_rank"], {self.slower((dp, pp), ratio, steps) for pp in self.pps}

    def slow_dp_rank_from_the_middle_on(self):
        return self.slow_dp_rank(1.35, slice(self.n_steps // 2, None))

    def slow_dp_rank_in_a_fifth_of_the_steps(self):
        return self.slow_dp_rank(1.5, self.random.choice(self.n_steps, self.n_steps // 5, replace=False))

    def slow_stage(self):
        pp = int(self.random.integers(len(self.pps) - 1))
        return ["slow_stage"], {self.slower((dp, pp), 1.3) for dp in range(self.n_dps)}

    def last_stage(self):
        return ["last_stage"], {self.slower((dp, self.pps[-1]), 1.5) for dp in range(self.n_dps)}

    def last_stage_and_a_worker(self):
        self.last_stage()
        return ["slow_worker", "last_stage"], self.slow_worker(1.8)[1]

    def sequence_lengths(self, spread=0.3, columns=slice(None)):
        lengths = np.ones((len(self.microbatches), self.n_steps, self.n_dps))
        lengths[..., columns] = self.random.lognormal(0.0, spread, lengths[..., columns].shape)
        for op in self.ops():
            self.work[op] *= lengths[self.microbatches.index(self.operations.microbatch_T[op])]
        return ["sequence_lengths"], None

    def lengths_on_one_dp_rank(self):
        return self.sequence_lengths(0.6, [int(self.random.integers(self.n_dps))])

    def lengths_and_a_slow_worker(self):
        _, workers = self.slow_worker(1.5)
        self.sequence_lengths(0.25)
        return ["slow_worker", "sequence_lengths"], workers

    def lengths_and_a_last_stage(self):
        self.last_stage()
        self.sequence_lengths(0.4)
        return ["sequence_lengths", "last_stage"], None

    def _stalls(self, phase, every):
        ops_M = self.ops(phase)
        hit = self.random.random((len(ops_M), self.n_steps, self.n_dps)) < 1.0 / every
        self.work[ops_M] += 2.0 * np.median(self.work[ops_M]) * hit

    def garbage_collection(self):
        self._stalls("forward", 30)
        return ["garbage_collection"], None

    def backward_stalls(self):
        self._stalls("backward", 30)
        return ["stalls"], None

    def backward_stalls_and_lengths(self):
        self._stalls("backward", 25)
        self.sequence_lengths(0.25)
        return ["sequence_lengths", "stalls"], None

    def collections_and_a_slow_worker(self):
        self._stalls("forward", 20)
        return ["slow_worker", "garbage_collection"], self.slow_worker(1.4)[1]


PLANTED = (
    "nothing",
    "slow_worker",
    "slow_worker_at_the_end",
    "slow_worker_now_and_then",
    "two_slow_workers",
    "slow_dp_rank",
    "slow_stage",
    "last_stage",
    "sequence_lengths",
    "lengths_and_a_slow_worker",
    "lengths_and_a_last_stage",
    "garbage_collection",
    "backward_stalls",
    "slow_worker_from_the_first_third_on",
    "workers_slow_in_turn",
    "slow_dp_rank_from_the_middle_on",
    "slow_dp_rank_in_a_fifth_of_the_steps",
    "last_stage_and_a_worker",
    "lengths_on_one_dp_rank",
    "backward_stalls_and_lengths",
    "collections_and_a_slow_worker",
)


def result_of(operations, plant, seed):
    """What is named in a trace with a planted kind: kinds, workers of the first expected; then both as expected.

    None if the slowdown is too small to be attributed.
    """
    planted = Planted(operations, seed)
    expected, workers = getattr(planted, plant)()
    slowed = planted.result()
    found = slowdown_of(slowed)
    if found.m_w is None:
        return None
    kinds = attributed(slowed, found).kinds
    of_first = next((kind.workers for kind in kinds if kind.code in expected[:1]), ())
    return [kind.code for kind in kinds], of_first, expected, workers
