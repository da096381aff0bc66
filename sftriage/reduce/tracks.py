"""Sampled stacks as tracks of a trace: nested slices of each thread, and the steps and stages that the samples know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path, PurePath

from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, read_samples
from sftriage.traces.viewing import StackSlice, StackTrack, StackTracks


def stack_tracks(path: Path) -> StackTracks:
    """The tracks of a file of sampled stacks.

    Raises:
        InputError: it cannot be read, or is no such file.
    """
    return tracks_of(read_samples(path))


def tracks_of(samples: StackSamples) -> StackTracks:
    """A track a thread, the training thread's first, those of the DataLoader's workers last, by process."""
    frames, time_ns = samples.frames, samples.time_ns_N
    starts_ns = _starts(time_ns, samples.period_ns)
    # A stage begins with a stack of its own.
    own_ns = [max(one, since) for one, since in zip(starts_ns, samples.since_ns_N, strict=True)]
    tracks = [_track(frames, samples.training, time_ns, own_ns)]
    tracks += [_track(frames, thread, time_ns, starts_ns) for thread in samples.others]
    for worker in samples.workers:
        starts_ns = _starts(worker.time_ns_W, worker.period_ns)
        process = f"DataLoader worker {worker.number} (pid {worker.pid})"
        tracks += [_track(frames, thread, worker.time_ns_W, starts_ns, process) for thread in worker.threads]
    return StackTracks(tuple(tracks), tuple(_marks(samples)))


def _starts(time_ns: Sequence[int], period_ns: int) -> list[int]:
    return [time_ns[0] - period_ns, *time_ns[:-1]] if time_ns else []


def _track(
    frames: Sequence[Frame], thread: ThreadSamples, time_ns: Sequence[int], starts_ns: Sequence[int], process: str = ""
) -> StackTrack:
    found = sorted(_slices(frames, thread.stacks_N, time_ns, starts_ns), key=lambda one: (one[1].start_ns, one[0]))
    name = thread.name.removeprefix(process).lstrip(": ")
    return StackTrack(name, process, tuple(one for _, one in found))


def _slices(
    frames: Sequence[Frame], stacks: Sequence[Sequence[int]], time_ns: Sequence[int], starts_ns: Sequence[int]
) -> Iterator[tuple[int, StackSlice]]:
    """A slice for each frame, as long as one sample after the other has it in the same frames; and how deep it is."""
    opened: list[tuple[int, int]] = []
    for stack, start_ns in zip((*stacks, ()), (*starts_ns, *time_ns[-1:]), strict=False):
        pairs = zip(opened, stack, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        while len(opened) > kept:
            number, began_ns = opened.pop()
            one = frames[number]
            if start_ns > began_ns:
                name = f"{one.function} ({PurePath(one.file).name}:{one.line})"
                args = {"file": f"{one.file}:{one.line}", "source": one.source}
                yield len(opened), StackSlice(name, began_ns, start_ns - began_ns, args)
        opened += [(number, start_ns) for number in stack[kept:]]


def _marks(samples: StackSamples) -> Iterator[StackSlice]:
    met = list(dict.fromkeys(zip(samples.step_N, samples.stage_N, samples.since_ns_N, strict=True)))
    if not met:
        return
    last = (-1, "", samples.time_ns_N[-1])
    began: dict[int, int] = {}
    for (step, stage, since_ns), (after, _, ends_ns) in pairwise((*met, last)):
        began.setdefault(step, since_ns)
        yield StackSlice(f"sftriage:{stage}", since_ns, max(0, ends_ns - since_ns), {})
        if after != step:
            yield StackSlice(f"ProfilerStep#{step}", began[step], max(0, ends_ns - began[step]), {})
