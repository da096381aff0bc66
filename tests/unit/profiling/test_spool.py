from __future__ import annotations

import json
from pathlib import Path

import pytest

from sftriage.base.files import MODE_ENV
from sftriage.errors import CaptureError
from sftriage.profiling.spool import ends_whole, write_trace

TRACE = b'{"traceEvents": [{"name": "x"}],"traceName": "a]b.json.partial", "displayTimeUnit": "ms"}\n'


def writes(data: bytes):
    def export(path: str) -> None:
        # As Kineto does: a file of its own, with the process's umask.
        Path(path).unlink(missing_ok=True)
        Path(path).write_bytes(data)

    return export


def test_a_whole_trace_takes_its_name_and_is_private(tmp_path):
    assert write_trace(writes(TRACE), tmp_path, "c-1", 1000) == len(TRACE)
    (path,) = tmp_path.iterdir()
    assert (path.name, path.read_bytes(), path.stat().st_mode & 0o777) == ("c-1.json", TRACE, 0o600)


def test_an_agent_of_another_user_may_read_a_trace_where_the_files_are_for_others(tmp_path, monkeypatch):
    monkeypatch.setenv(MODE_ENV, "0666")
    write_trace(writes(TRACE), tmp_path, "c-1", 1000)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o666


def raises(path: str) -> None:
    raise RuntimeError("in Kineto")


@pytest.mark.parametrize(
    ("export", "max_bytes", "error", "reason"),
    [
        # A disk that was full at any moment.
        *((writes(TRACE[:length]), 1000, CaptureError, "not written whole") for length in range(0, len(TRACE) - 2, 5)),
        (writes(TRACE), len(TRACE) - 1, CaptureError, f"{len(TRACE)} bytes; {len(TRACE) - 1} are allowed"),
        (raises, 1000, RuntimeError, "in Kineto"),
        (lambda path: Path(path).unlink(), 1000, CaptureError, "No such file"),
    ],
)
def test_a_trace_that_is_not_whole_or_too_large_leaves_nothing(tmp_path, export, max_bytes, error, reason):
    with pytest.raises(error, match=reason):
        write_trace(export, tmp_path, "c-1", max_bytes)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_spool_is_said(tmp_path):
    with pytest.raises(CaptureError, match="missing cannot be written: No such file"):
        write_trace(writes(TRACE), tmp_path / "missing", "c-1", 1000)


def test_a_trace_never_takes_the_place_of_another(tmp_path):
    (tmp_path / "c-1.json").write_bytes(b"earlier")
    (tmp_path / "c-2.json.partial").write_bytes(b"of one that died")
    for capture_id in ("c-1", "c-2"):
        with pytest.raises(CaptureError):
            write_trace(writes(TRACE), tmp_path, capture_id, 1000)
    assert (tmp_path / "c-1.json").read_bytes() == b"earlier"
    assert (tmp_path / "c-2.json.partial").read_bytes() == b"of one that died"


@pytest.mark.parametrize("path", ['a "b" c', "C:\\dir", "end\\", '{"x": 1'])
def test_the_path_that_torch_writes_as_it_is_costs_no_trace(tmp_path, path):
    whole = b'{"traceEvents": [{"name": "x"}\n  ],"traceName": "' + path.encode() + b'" }'
    for length in range(len(whole) - 1):
        (tmp_path / "t.json").write_bytes(whole[:length])
        assert not ends_whole(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(whole)
    assert ends_whole(tmp_path / "t.json")


@pytest.mark.parametrize("events", [0, 1000])
def test_the_end_is_found_whatever_the_length(tmp_path, events):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "x" * 50}] * events, "traceName": "n", "more": {"a": [1]}}))
    assert ends_whole(path)
