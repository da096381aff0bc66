"""A damaged ring costs its own rank, with a record of it, and no other rank."""

import json
import struct
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftriage.agent.reading import RankRings
from sftriage.trainer.layout import ADDITIONS_AT, CLAIMED, HEADER_BYTES, LIVE_AT, LOG_AT, WORD_BYTES
from sftriage.trainer.monitor import Monitor

RANKS, DAMAGED = (0, 1, 2), 1
BEFORE, AFTER = 40, 90


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of three ranks' rings after `BEFORE` steps, and after `AFTER`."""
    rings = tmp_path_factory.mktemp("rings")
    ranks = [
        Monitor(("data", "backward"), ("backward",), rank=rank, world_size=3, rings=rings, slots=128) for rank in RANKS
    ]
    states = []
    for first, end in ((0, BEFORE), (BEFORE, AFTER)):
        for _ in range(first, end):
            for one in ranks:
                with one.step(), one.stage("data"), one.stage("backward"):
                    pass
        states.append({path.name: path.read_bytes() for path in sorted(rings.glob("rank-*.ring"))})
    yield states
    for one in ranks:
        one.close()


@pytest.fixture
def place(tmp_path_factory):
    """Where a job's rings and kept steps lie, empty at each call."""

    def place() -> tuple[Path, Path]:
        made = tmp_path_factory.mktemp("job")
        for name in ("rings", "steps"):
            (made / name).mkdir()
        return made / "rings", made / "steps"

    return place


def put(rings: Path, state: dict[str, bytes]) -> None:
    """Overwrite files in place, as their writers do."""
    for name, content in state.items():
        with (rings / name).open("r+b" if (rings / name).exists() else "wb") as file:
            file.write(content)
            file.truncate()


def taken(reader: RankRings) -> dict[int, list[int]]:
    """The steps that one look finds, by rank."""
    found: dict[int, list[int]] = {rank: [] for rank in RANKS}
    for rows in reader.rows():
        for rank, step in zip(rows.steps.rank_B.tolist(), rows.steps.step_B.tolist(), strict=True):
            found[rank].append(step)
    return found


WORDS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 63).map(lambda bit: 1 << bit),
    st.sampled_from([2**62 - 512, 2**62 - 1, 2**63, 2**64 - 1, 512, 1024]),
)
PLACES = st.one_of(
    st.integers(0, HEADER_BYTES // WORD_BYTES - 1),
    st.integers(0, 8).map(lambda word: LIVE_AT // WORD_BYTES + word),
    st.integers(0, 63).map(lambda word: ADDITIONS_AT // WORD_BYTES + word),
    st.integers(0, 1200).map(lambda word: LOG_AT // WORD_BYTES + word),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(PLACES, WORDS, st.booleans()), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, LOG_AT + 9600),
    before=st.booleans(),
)
def test_a_damaged_ring_does_not_stop_the_steps_of_others(written, place, flips, cut, before):
    # GIVEN three rings that are read, one of them damaged before or between two looks
    first, second = written
    name = f"rank-{DAMAGED}.0.ring"

    def damaged(state: dict[str, bytes]) -> dict[str, bytes]:
        content = bytearray(state[name])
        for at, value, replaces in flips:
            known = int.from_bytes(content[at * WORD_BYTES : (at + 1) * WORD_BYTES], "little")
            new = value if replaces else known ^ value
            content[at * WORD_BYTES : (at + 1) * WORD_BYTES] = new.to_bytes(WORD_BYTES, "little")
        return {**state, name: bytes(content[:cut])}

    rings, steps = place()
    put(rings, damaged(first) if before else first)
    reader = RankRings(rings, steps)
    observed, statuses = [taken(reader)], [reader.statuses()]
    put(rings, damaged(second))
    observed += [taken(reader)]
    statuses += [reader.statuses()]
    reader.close()
    # THEN each look has all steps of the other two, and what these do now
    for rank in set(RANKS) - {DAMAGED}:
        assert [one[rank] for one in observed] == [list(range(BEFORE)), list(range(BEFORE, AFTER))]
        assert all(rank in job.rank_R for job in statuses)
    # AND of the damaged one no more than its ring holds
    assert len(observed[0][DAMAGED]) + len(observed[1][DAMAGED]) <= 2 * len(first[name]) // WORD_BYTES
    assert set(reader.telemetry().problems) <= {str(rings / name)}


@pytest.mark.parametrize("claimed", [2**62 - 512, 0])
def test_a_ring_whose_words_cannot_be_is_given_up_once_and_says_why(written, place, claimed, caplog):
    first, second = written
    rings, steps = place()
    put(rings, first)
    reader = RankRings(rings, steps)
    taken(reader)
    content = bytearray(second["rank-1.0.ring"])
    struct.pack_into("=q", content, LIVE_AT + CLAIMED * WORD_BYTES, claimed)
    put(rings, {**second, "rank-1.0.ring": bytes(content)})
    for _ in range(3):
        taken(reader)
    (reason,) = reader.telemetry().problems.values()
    assert "rank-1.0.ring: " in reason
    assert [one.getMessage() for one in caplog.records] == [f"{reason}; its rank counts as missing"]
    reader.close()


@pytest.mark.parametrize(
    "lie",
    [
        {"stages": ["load", "backward", "other"]},
        {"sync": [0]},
        {"sync": [9]},
        {"world_size": 2**40},
        {"rank": 2},
        {"attempt": 5},
        {"log_words": 2**30},
        {"stages": "data"},
        [],
    ],
    ids=str,
)
def test_a_header_that_lies_costs_its_own_rank(written, place, lie):
    # GIVEN the first rank's header says what is not so, with a right checksum
    first, _ = written
    content = first["rank-0.0.ring"]
    length = struct.unpack_from("=I", content, 16)[0]
    document = json.loads(content[24 : 24 + length])
    body = json.dumps({**document, **lie} if lie else lie).encode()
    head = content[:16] + struct.pack("=II", len(body), crc32(body)) + body
    rings, steps = place()
    put(rings, {**first, "rank-0.0.ring": head.ljust(LIVE_AT, b"\0") + content[LIVE_AT:]})
    reader = RankRings(rings, steps)
    found = taken(reader)
    assert (found[1], found[2]) == (list(range(BEFORE)), list(range(BEFORE)))
    assert reader.statuses().rank_R.tolist()[-2:] == [1, 2]
    assert [Path(path).name for path in reader.telemetry().problems] == ["rank-0.0.ring"]
    reader.close()
