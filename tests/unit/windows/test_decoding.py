"""The decoder of recorded steps: what was written comes out, and nothing that was not."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.model.windows import StageSchema, StepRecord
from sftriage.windows.decoding import checked, decode, slot_bytes, together
from tests.scenario import batch, raw

SCHEMA = StageSchema.closed(("data", "forward", "backward"), ("forward", "backward"))

times = st.integers(0, 2**62)
records = st.builds(
    StepRecord,
    rank=st.just(3),
    step=st.integers(-(2**62), 2**62),
    start_ns=st.integers(-(2**62), 2**62),
    between_ns=times,
    durations_ns=st.tuples(times, times, times, times),
    outside_ns=st.tuples(times, times),
    complete=st.booleans(),
    capturing=st.booleans(),
    ready_ns=st.none() | times,
    kind=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=16),
    work=times,
)


@given(st.lists(records, max_size=5))
def test_written_steps_are_read_back(written):
    # GIVEN slots as a rank publishes them
    steps, sound_B = checked(3, raw(1, *written), SCHEMA)
    # THEN all are sound, and step by step and column by column they are what was written
    assert sound_B.all()
    assert steps.records() == written
    assert steps.seq_B.tolist() == list(range(1, len(written) + 1))
    for name in ("step", "start_ns", "between_ns", "work", "complete", "capturing"):
        assert getattr(steps, f"{name}_B").tolist() == [getattr(one, name) for one in written]
    assert steps.ready_ns_B.tolist() == [-1 if one.ready_ns is None else one.ready_ns for one in written]
    assert (steps.durations_ns_BS.shape[1], steps.times_ns_BV.shape[1]) == (4, 6)


@settings(max_examples=200)
@given(st.lists(records, min_size=1, max_size=4), st.data())
def test_damaged_and_impossible_slots_are_left_out(written, data):
    # GIVEN slots of which any bytes are damaged, or any word is made another with a right checksum
    whole, size = raw(1, *written), slot_bytes(SCHEMA)
    content = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    seq, work = data.draw(st.integers(-1, 1)), data.draw(st.sampled_from([-1, 0]))
    # THEN those that are as they were are sound, and of the mistaken one it depends on what it says
    steps, sound_B = checked(3, bytes(content) + raw(seq, replace(written[0], work=work)), SCHEMA)
    intact = [content[at : at + size] == whole[at : at + size] for at in range(0, len(whole), size)]
    assert sound_B.tolist() == [*intact, seq >= 1 and work >= 0]
    left = [one for one, is_same in zip(written, intact, strict=True) if is_same]
    assert steps[sound_B].records()[: len(left)] == left


@given(st.lists(records, max_size=4), st.lists(records, max_size=4))
def test_ranks_beside_each_other_keep_their_steps(ones, others):
    others = [replace(one, rank=7) for one in others]
    # GIVEN the slots of two ranks, decoded together or each by itself
    both = decode([(3, raw(1, *ones)), (7, raw(1, *others))], SCHEMA)
    apart = together([batch(*ones, schema=SCHEMA), batch(*others, schema=SCHEMA)])
    # THEN they are the same steps
    assert both.records() == apart.records() == ones + others
    # AND in order they are sorted by number, the ranks' own order kept
    assert both.in_order().records() == sorted(ones + others, key=lambda one: one.step)
    # AND any of them can be chosen
    chosen_B = np.arange(len(both)) % 2 == 0
    assert both[chosen_B].records() == both.records()[::2]
