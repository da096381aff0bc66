"""Steps as rings and step logs hold them."""

from struct import unpack
from zlib import crc32

import numpy as np

from sftriage.model.windows import StageSchema, StepRecord
from sftriage.windows.decoding import CAPTURING, INCOMPLETE, UNKNOWN, StepArrays, decode


def raw(first_seq: int, *records: StepRecord) -> bytes:
    """Whole slots, as a rank publishes them, numbered from ``first_seq`` on."""
    slots = []
    for seq, record in enumerate(records, start=first_seq):
        slot_W = np.array(
            (
                *(seq, record.step, record.start_ns, record.between_ns),
                (0 if record.complete else INCOMPLETE) | (CAPTURING if record.capturing else 0),
                *unpack("=2q", record.kind.encode()[:16].ljust(16, b"\0")),
                record.work,
                UNKNOWN if record.ready_ns is None else record.ready_ns,
                *record.durations_ns,
                *record.outside_ns,
                0,
            ),
            dtype=np.int64,
        )
        slot_W[-1] = crc32(slot_W[:-1].tobytes())
        slots.append(slot_W.tobytes())
    return b"".join(slots)


def of_rank(first_seq: int, *records: StepRecord, schema: StageSchema) -> StepArrays:
    """Steps of one rank, at least one, as they are taken from its ring."""
    return decode([(records[0].rank, raw(first_seq, *records))], schema)


def batch(*records: StepRecord, schema: StageSchema | None = None) -> StepArrays:
    """Steps of any ranks; of as many stages as they have durations, without a schema."""
    if schema is None:
        n_stages, n_sync = (len(records[0].durations_ns), len(records[0].outside_ns)) if records else (1, 0)
        stages = tuple(f"s{n}" for n in range(n_stages))
        schema = StageSchema(stages, stages[:n_sync])
    return decode([(record.rank, raw(1, record)) for record in records] or [(0, b"")], schema)
