"""What rings and step logs hold, step by step."""

from pathlib import Path
from typing import NamedTuple

from sftriage.recorder import RingInfo, RingReader
from sftriage.records import StepRecord
from sftriage.windows.decoding import decode
from sftriage.windows.logs import LogReader


def records_in(raw: bytes, info: RingInfo) -> list[StepRecord]:
    """The steps in whole slots of one rank."""
    return decode([(info.rank, raw)], info.schema).records()


def new_records(reader: RingReader) -> list[StepRecord]:
    """The steps that a ring has since it was last read."""
    return records_in(reader.read().raw, reader.info)


class Logged(NamedTuple):
    info: RingInfo
    records: list[StepRecord]
    skipped: int


def read_log(path: Path) -> Logged:
    """Every step of a log that can be read, and how many slots could not."""
    reader = LogReader(path)
    records: list[StepRecord] = []
    while steps := reader.read(3):
        records += steps.records()
    return Logged(reader.info, records, reader.skipped)
