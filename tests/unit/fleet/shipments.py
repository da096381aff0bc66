"""What an agent ships, made up."""

import numpy as np

from sftriage.fleet.wire import Shipment
from sftriage.mitigate.switching import Request, SwitchStatus
from sftriage.model.windows import JobStatus, RankStatus, StageSchema
from sftriage.trainer.layout import RingInfo
from sftriage.windows.decoding import DURATIONS, READY, SEQ, START, STEP, StepArrays, slot_words
from sftriage.windows.rings import Rows, status_of

SCHEMA = StageSchema.closed(("data", "forward", "backward"), ("backward",))


def info(rank=0, *, world_size=4, attempt=0, pid=None, schema=SCHEMA, host="node-a") -> RingInfo:
    """The ring of a rank; its process is another one for each rank and attempt, unless it is named."""
    pid = 1000 + 100 * attempt + rank if pid is None else pid
    return RingInfo(rank, world_size, 0, attempt, "job", host, "", schema, 10**9, 17 * 10**17, pid, 7 * pid, "C", True)


def steps(ranks, first, count, schema=SCHEMA, first_seq=None) -> StepArrays:
    """Steps of some ranks, by rank; their sequence numbers are from 1 on where their own are from 0 on."""
    slots_BW = np.zeros((len(ranks) * count, slot_words(schema)), dtype=np.int64)
    number_B = np.tile(np.arange(first, first + count), len(ranks))
    slots_BW[:, STEP], slots_BW[:, START] = number_B, 10**12 + number_B * 10**9
    slots_BW[:, SEQ] = number_B + 1 if first_seq is None else number_B - first + first_seq
    slots_BW[:, READY] = -1
    slots_BW[:, DURATIONS:-1] = 10**6 + number_B[:, None]
    return StepArrays(schema, np.repeat(np.array(ranks, dtype=np.int64), count), slots_BW)


def rows(ranks=(0, 1), first=0, count=3, *, generation=0, world_size=4, **more) -> Rows:
    infos = {rank: info(rank, attempt=generation, world_size=world_size) for rank in ranks}
    return Rows(generation, SCHEMA, world_size, infos, steps(ranks, first, count), **more)


def status(ranks=(0, 1), attempt=0, **changes) -> JobStatus:
    about = {"stage": "backward", "stage_age_ns": 5, "step": 7, "step_age_ns": 9, "published": 7, "closed": False}
    about |= {"alive": True, **changes}
    return status_of(SCHEMA, 4, [RankStatus(rank=rank, host="node-a", **about) for rank in ranks], attempt)


def group(here=(), *, ranks=(0, 1, 2, 3), name="ranks-0.abcd", value=0, request=0, **more) -> SwitchStatus:
    """How a group of ranks stands, by those of one host."""
    return SwitchStatus(name, ranks, 40, 39, value, 17, Request(0, 0, request), 0.175, 1 << 20, here=here, **more)


def shipment(*some: Rows, **more) -> Shipment:
    return Shipment("node-a", "boot-a", "process-1", some, **more)
