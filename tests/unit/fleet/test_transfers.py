"""How far a trace is on its way is told every so often, and not of what is quick."""

from sftriage.fleet import transfers
from sftriage.fleet.transfers import TELL_S, CountedFile, Transfer
from sftriage.model.captures import CaptureResult

RESULT = CaptureResult("c-1", 3, "stored")


def test_a_transfer_that_takes_its_time_is_told_of_with_what_has_moved(tmp_path, monkeypatch):
    told, now_s = [], [0.0]
    monkeypatch.setattr(transfers.time, "monotonic", lambda: now_s[0])
    transfer = Transfer(RESULT, "fetching from node-b:", 48 << 20, told.append)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * (12 << 20))
    # GIVEN what is copied before anybody would wonder
    with source.open("rb") as reads, target.open("wb") as writes:
        counted, buffer = CountedFile(reads, transfer), bytearray(1 << 20)
        assert counted.readinto(buffer) == len(buffer)
        assert told == []
        # WHEN it goes on
        now_s[0] = TELL_S
        assert CountedFile(writes, transfer).write(bytes(11 << 20)) == 11 << 20
        transfer.moved(0)
    # THEN it is told of, once
    (report,) = told
    assert (report.result.capture_id, report.result.rank, report.result.state) == ("c-1", 3, "running")
    assert report.result.detail == "fetching from node-b: 12.0 MiB of 48.0 MiB"
    assert target.stat().st_size == 11 << 20
