"""Steps as rings and step logs hand them to the agent."""

from zlib import crc32

import numpy as np

from sftriage.recorder.layout import CAPTURING, DURATIONS, INCOMPLETE, SEQ, UNKNOWN, kind_words
from sftriage.records import StepRecord


def batch(*records: StepRecord) -> tuple[np.ndarray, np.ndarray]:
    """The rank of each step, and the words of its slot; sequence numbers and checksums are the readers' business."""
    slots = [
        (
            *(0, record.step, record.start_ns, record.between_ns),
            (0 if record.complete else INCOMPLETE) | (CAPTURING if record.capturing else 0),
            *kind_words(record.kind),
            record.work,
            UNKNOWN if record.ready_ns is None else record.ready_ns,
            *record.durations_ns,
            *record.outside_ns,
            0,
        )
        for record in records
    ]
    ranks = np.array([record.rank for record in records], dtype=np.int64)
    return ranks, np.array(slots, dtype=np.int64).reshape(len(records), -1 if records else DURATIONS)


def raw(first_seq: int, *records: StepRecord) -> bytes:
    """Whole slots of one rank, as a ring publishes them, numbered from ``first_seq`` on."""
    _, slots_BW = batch(*records)
    slots_BW[:, SEQ] = np.arange(first_seq, first_seq + len(records))
    for slot_W in slots_BW:
        slot_W[-1] = crc32(slot_W[:-1].tobytes())
    return slots_BW.tobytes()
