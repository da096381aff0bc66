"""Run directories of released versions are read as those versions read them (docs/stability.md)."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.releases.record import HERE, answers

RELEASES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))


@pytest.fixture(scope="module", params=RELEASES)
def release(request, tmp_path_factory) -> tuple[Path, dict]:
    """A run of a release, unpacked, and what that release answered about it."""
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(HERE / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "run", json.loads((HERE / f"{request.param}.json").read_text(encoding="utf-8"))


def test_what_a_release_recorded_is_read_as_it_read_it(release, sftriage):
    run, recorded = release
    assert answers(lambda *words: sftriage(*words).json, run) == recorded


def test_every_view_of_a_releases_run_names_the_rank_and_its_capture(release, sftriage, tmp_path):
    run, recorded = release
    (capture,), (cause,) = recorded["traces list"], recorded["causes"]
    name = capture["capture_id"]
    # GIVEN its screen, reports and explanations THEN each names the slow rank, its line of code or its capture
    line, of_run = cause["source"], ("--run", run)
    for words, shown in (
        (("watch", "--once", *of_run), ("Rank 2 is slow in data", line)),
        (("report", run), ("Rank 2 is slow in data", line)),
        (("report", name, *of_run), ("Rank 2 is slow in data", line)),
        (("traces", "show", name, *of_run), ("Rank 2 is slow in data", line)),
        (("explain", name, *of_run), ("rank 2", "data")),
        (("traces", "for-step", capture["first_step"], *of_run), (name,)),
    ):
        out = " ".join(sftriage(*words).out.replace("\\", "").split())
        assert [one for one in shown if one not in out] == [], words
    sftriage("report", run, "-o", tmp_path / "report.html")
    assert cause["source"] in (tmp_path / "report.html").read_text(encoding="utf-8")
    # AND the trace is whole, by its checksum, and agrees with the run
    sftriage("traces", "get", name, "--run", run, "--out", tmp_path / "trace.json.gz")
    assert "rank 2" in sftriage("reduce", tmp_path / "trace.json.gz", "--against", run).out


def test_a_releases_run_is_judged_again_and_a_policy_replayed_on_it(release, sftriage):
    run, recorded = release
    (capture,) = recorded["traces list"]
    verdicts = [json.loads(line) for line in sftriage("analyze", run, "--json").out.splitlines()]
    named = {(one["suspects"][0]["rank"], one["suspects"][0]["stage"]) for one in verdicts if one.get("suspects")}
    assert (capture["rank"], capture["stage"]) in named
    replayed = sftriage("policy", "test", "default", "--on", run, "--json").json
    requests = [request["rank"] for one in replayed["windows"] for request in one["decision"]["requests"]]
    assert requests == [capture["rank"]]
    assert sftriage("whatif", run, "--json").json["kinds"][0]["saves_s"] > 0
