"""Reducing heavy traces to the coarse stages that the recorder knows, so that the two can be compared.

`sources` opens files, `jsonstream` and `kineto` read torch.profiler's JSON as a stream, `nsys` an Nsight export; both
come to the `columns` of `events`, which are `packed`, so that a trace of any size fits into memory, and unpacked a part
at a time (`owning`: in order of time; `halves`: an event that is written as two; `links`: what ties events together).
`steps` and `stages` cut those into the stages of each step (`naming`: by which names; `inferring`: where there are
none), `together` puts ranks beside each other, `inside` says what filled a stage (`filling`: what was done in it), and
`agreeing` whether the trace says what the signal said. All times are whole nanoseconds (`intervals`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sftriage.traces.reduce.agreeing import Agreement, Agrees, StageAgreement, compare, overall
from sftriage.traces.reduce.events import Trace
from sftriage.traces.reduce.inside import find
from sftriage.traces.reduce.kineto import read_kineto
from sftriage.traces.reduce.naming import Names, load_names
from sftriage.traces.reduce.nsys import read_nsys
from sftriage.traces.reduce.sources import format_of
from sftriage.traces.reduce.stages import Reduction, reduce_trace
from sftriage.traces.reduce.together import missing_ranks, together

__all__ = [
    "Agreement",
    "Agrees",
    "Names",
    "Reduction",
    "StageAgreement",
    "Trace",
    "compare",
    "find",
    "load_names",
    "missing_ranks",
    "overall",
    "read_traces",
    "reduce_trace",
    "together",
]


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces of a file, whatever it is: one, or as many as an archive or an export holds.

    Raises:
        InputError: it cannot be read; the message says what it is, where and why.
    """
    return read_nsys(path) if format_of(path) == "sqlite" else read_kineto(path)
