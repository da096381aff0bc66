"""Traces whose names are written as they are, as torch writes them: what can be mended is, and the rest stays."""

import contextlib
import io
import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.agent.executor import verify_trace
from sftriage.errors import InputError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.reduce.reading import read_kineto
from sftriage.traces import jsonstream
from sftriage.traces.jsonstream import TraceReader, mended, whole
from tests.unit.reduce.heavy import named_events

# As torch 2.13 writes an event; as others do, on one line.
TORCH = """  {{
    "ph": "X",
    "cat": "{cat}",
    "name": "{name}",
    "pid": 7,
    "tid": 7,
    "ts": {ts}.250,
    "dur": 1.500
    ,
    "args": {{
      "External id": {ts},"Record function id": 0, "file": "{file}", "Ev Idx": {ts}
    }}
  }}"""
SHORT = (
    '{{"name":"{name}","ph":"X","pid":7,"args":{{"file":"{file}","n":[[1,2],[]]}},"cat":"{cat}","tid":7,"ts":{ts}.25,'
    '"dur":1.5}}'
)
STYLES = {TORCH: ",\n", SHORT: ","}
STEPS = (5, 6, 7)
REQUEST = CaptureRequest("w0-9-r2-x-1", 2, "torch", steps=3, warmup_steps=1, max_seconds=10, max_bytes=1 << 20)
RESULT = CaptureResult("w0-9-r2-x-1", 2, "stored", first_step=5, last_step=7)


def document(names: dict[int, str], style: str = TORCH, label: str = "", path: str = "t.json", n: int = 40) -> bytes:
    """A trace of some events, of which some have awkward names, written unescaped, as are a label and the path."""
    events = []
    for at in range(n):
        name = f"ProfilerStep#{STEPS[at]}" if at < len(STEPS) else names.get(at, f"good{at}")
        events.append(style.format(name=name, ts=at, cat="user_annotation", file=names.get(at, "a.py")))
    head = ' {\n    "schemaVersion": 1,\n      "label": "' + label + '",\n      "distributedInfo": {"rank": 2},\n'
    listed = STYLES[style].join(events)
    whole_text = head + '    "traceEvents": [\n    \n' + listed + '\n  ],"traceName": "' + path + '" }'
    return whole_text.encode(errors="surrogateescape")


def read(text: bytes) -> tuple[dict[int, str], tuple[str, ...]]:
    trace = read_kineto(io.BytesIO(text), "t.json")
    return {start // 1000: name for name, start, *_ in named_events(trace)}, trace.notes[:-1]


def copied(text: bytes) -> dict[str, Any]:
    """The document with its damage mended, as the reader says how."""
    parts, last = [], 0

    def edit(start: int, end: int, instead: bytes) -> None:
        nonlocal last
        assert last <= start < end
        parts.extend((text[last:start], instead))
        last = end

    TraceReader(io.BytesIO(text), "t.json", decode, lambda event: False, {}, edit).read()
    made = json.loads(b"".join((*parts, text[last:])).decode())
    assert isinstance(made, dict)
    return made


def event_at(text: bytes, number: int) -> int:
    return text.rindex(b'{\n    "ph"', 0, text.index(b'"ts": %d.' % number))


def decode(piece: bytes) -> None:
    piece.decode()
    msgspec.json.decode(piece)


# What is unescaped, and looks like no key; and what looks like one.
CLEAR = (*'"{}[],:\\', "\\u12", "C:\\new\\x.py", "\t", "\x01", "é", "\udce9", "'", "}]}", '" ')
LIKE_KEYS = (
    '", "n": 3',
    '", "pid": 3',
    '", "args": {"x": "',
    '"}, {"ph": "X", "cat"',
    '"},{"name":"b"',
    '"],"x":"',
    '"}',
)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60)
@given(data=st.data())
def test_names_without_keys_in_them_are_all_repaired(style, data):
    # GIVEN names of any text that has no quote before a comma or a bracket
    text = st.lists(st.sampled_from(CLEAR) | st.text("ab ", min_size=1, max_size=3), min_size=1, max_size=6)
    its_name = text.map("".join).filter(lambda name: not any(f'"{sign}' in name.replace(" ", "") for sign in ",}]"))
    # (torch leaves line breaks out, and a name of nothing but quotes ends like an empty one)
    names = data.draw(st.dictionaries(st.integers(3, 39), its_name, max_size=8))
    pieces = data.draw(st.sampled_from((64, 700, 1 << 17)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonstream, "PIECE_BYTES", pieces)
        # WHEN it is read, and copied
        found, notes = read(document(names, style))
        events = copied(document(names, style))["traceEvents"]
    # THEN all events are there, with their names as they were but for what is no UTF-8, or was a valid escape
    assert set(found) == set(range(40)), notes
    for at in range(40):
        name = names.get(at, f"good{at}").encode(errors="surrogateescape").decode(errors="replace")
        valid = whole(f'"{name}"'.encode())
        if at >= len(STEPS):
            assert found[at] == (json.loads(f'"{name}"') if valid else name)
    assert [event["ts"] for event in events] == [at + 0.25 for at in range(40)]


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60)
@given(data=st.data())
def test_names_that_look_like_the_events_around_them_cost_themselves_at_most(style, data):
    # GIVEN names that hold what looks like a key, or like the end of the event or of the list
    text = st.lists(st.sampled_from(CLEAR + LIKE_KEYS), min_size=1, max_size=5).map("".join)
    names = data.draw(st.dictionaries(st.integers(3, 39), text, max_size=5))
    pieces = data.draw(st.sampled_from((64, 700, 1 << 17)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonstream, "PIECE_BYTES", pieces)
        found, _ = read(document(names, style))
        events = copied(document(names, style))["traceEvents"]
    # THEN all others are there, in what is read and in the copy, which is valid JSON
    others = {at: f"good{at}" for at in range(len(STEPS), 40) if at not in names}
    assert others.items() <= found.items()
    assert {event["name"] for event in events if str(event.get("name")).startswith("good")} == set(others.values())


@settings(max_examples=80)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 40), st.binary(max_size=6)), max_size=3),
    style=st.sampled_from(list(STYLES)),
)
def test_any_damaged_trace_is_read_or_refused_in_words(cuts, style):
    # GIVEN a trace from which bytes were cut, and into which others were put
    text = document({}, style)
    for at, length, put in cuts:
        text = text[: at % len(text)] + put + text[at % len(text) + length :]
    # WHEN it is read THEN there are events, or it is refused
    with contextlib.suppress(InputError):
        assert len(read(text)[0]) > 0


def test_the_place_of_each_damage_is_reported_and_a_whole_file_is_not_cut_short():
    # GIVEN one name that can be repaired, and an event that cannot
    text = document({10: 'a "b"'})
    repaired = f"1 name repaired at byte {event_at(text, 10)}"
    assert read(text)[1] == (repaired,)
    at = text.index(b'"good20"') - 8
    broken = text[:at] + text[at:].replace(b'"name": "good20",\n    "pid"', b'"name" "good20\n    pid', 1)
    found, notes = read(broken)
    # THEN the first is there, the place of the second is reported, and all others are there
    assert set(range(40)) - set(found) == {20}
    assert notes == (repaired, f"1 event dropped at byte {event_at(text, 20)}")
    # AND only a file that really ends early is cut short
    with pytest.raises(InputError, match="cut short: it ends at byte 3000"):
        read(text[:3000])


@pytest.mark.parametrize("odd", ['a "b" c', "C:\\dir\\", 'x", "y": "z"}', "end\\", "\x07", 'one"', '[{"'])
def test_what_is_beside_the_events_is_mended_too(odd):
    # GIVEN a label and a path that torch has not escaped
    text = document({}, label=odd, path=odd)
    assert not whole(text)
    # WHEN it is read THEN the events are there, and the rank beside them
    trace = read_kineto(io.BytesIO(text), "t.json")
    assert (trace.rank, len(named_events(trace))) == (2, 40)
    made = copied(text)
    assert (len(made["traceEvents"]), made["distributedInfo"]) == (40, {"rank": 2})


def test_a_capture_with_awkward_names_is_stored_as_valid_json(tmp_path):
    # GIVEN a trace without damage THEN it is left as it is
    (path := tmp_path / "c-1.json").write_bytes(document({}))
    before = path.stat().st_ino
    assert verify_trace(path, REQUEST, RESULT) == ""
    assert (path.stat().st_ino, path.read_bytes()) == (before, document({}))
    # GIVEN a trace as torch has left it
    names = {9: 'gen {"device": "cpu", "n" 3(1): run', 12: "C:\\x\\y.py", 30: 'a " b'}
    path.write_bytes(document(names, path='/a "b"/c-1.json'))
    damage = verify_trace(path, REQUEST, RESULT)
    # THEN there is private JSON with all events, and the damage is reported
    events = json.loads(path.read_bytes())["traceEvents"]
    assert [event["name"] for event in events[8:13]] == ["good8", names[9], "good10", "good11", names[12]]
    assert damage.startswith("4 names repaired, the first at byte ")
    assert (path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o600, [path])


def test_much_damage_takes_no_more_memory_and_no_unbounded_time(monkeypatch):
    """GIVEN a trace of some pieces with every third name damaged THEN what is held of it stays a few pieces."""
    chosen = random.Random(3)
    names = {at: chosen.choice(CLEAR + LIKE_KEYS) for at in range(3, 6000, 3)}
    text = document(names, n=6000)
    held = []
    fill = TraceReader._fill

    def filled(reader: TraceReader) -> None:
        fill(reader)
        held.append(len(reader._text))

    monkeypatch.setattr(TraceReader, "_fill", filled)
    monkeypatch.setattr(jsonstream, "MEND_BYTES", 1 << 17)
    found, _ = read(text)
    assert {at for at in range(6000) if at not in names} <= set(found)
    assert max(held) < 5 * (1 << 17) < len(text)


def test_an_ambiguous_object_is_none():
    for text in (b"", b'{"a" 1}', b'{"a": 1', b'{"a": }', b'{"a": "b" "c": 1}'):
        assert mended(text) is None
