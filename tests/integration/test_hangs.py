"""Real jobs of four ranks that hang: the first sentence says why, and where. test_demo.py has more kinds."""

import re

import msgspec
import pytest

from bench.hangs import AS_SHIPPED, one_row
from sftriage.model.hangs import HangEvidence
from sftriage.traces.store import LocalStore
from tests.integration.processes import FORKED

STALLED_AFTER_S, PAUSE_S = 3.0, 8.0
SENTENCE_S = 10.0
"""On an idle machine it takes less than 5."""

SENTENCES = {
    "between_steps": r"Rank 2 called all_gather of 1 float in evaluate \(hanging.py:\d+\) where the other 3 ranks "
    r"called all_reduce of 1 float in evaluate \(hanging.py:\d+\), #\d+ of the default group\.",
    "crossed_groups": r"Rank 3 waits for ranks 0 to 2 in all_reduce of 5 floats in other_group \(hanging.py:\d+\), "
    r"#1 of group .*",
    "tensor_parallel": r"Ranks? .* all_gather of 8 floats in tensor_parallel \(hanging.py:\d+\).* \(ranks 2 and 3\).*",
    "auto_collective": r"Rank 1 called all_gather of 4 floats in gather_norms \(hanging.py:\d+\) where the other 3 .*",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_job_that_hangs_has_a_sentence_with_its_kind_ranks_collective_and_line(kind, tmp_path):
    # GIVEN a job that hangs WHEN it has been still for some seconds, or the evidence proves it between steps
    # THEN there is a sentence soon, and it is right
    row = one_row(kind, tmp_path / kind, FORKED, None if kind in AS_SHIPPED else STALLED_AFTER_S)
    assert row.result == "right", row
    assert re.fullmatch(SENTENCES[kind], row.sentence), row.sentence
    assert row.sentence_s < SENTENCE_S
    # AND the evidence is kept, of all ranks, in one capture, beside that of a start that took as long
    store = LocalStore(tmp_path / kind / "run")
    (manifest,) = (found for found in store.manifests().manifests if found.capture.first_step > 1)
    assert [one.name for one in manifest.artefacts] == ["hang.json"]
    document = (tmp_path / kind / "run" / "captures" / manifest.capture_id / "hang.json").read_bytes()
    evidence = msgspec.json.decode(document, type=HangEvidence)
    assert [rank.rank for rank in evidence.ranks] == [0, 1, 2, 3]
    assert all(rank.answered for rank in evidence.ranks)
    assert evidence.hang is not None
    assert evidence.hang.kind == row.code


def test_a_job_that_only_pauses_is_reported_as_it_is(tmp_path):
    # GIVEN a job that saves on one rank for longer than a stall takes THEN nothing false is reported
    row = one_row("healthy_checkpoint", tmp_path / "job", FORKED, STALLED_AFTER_S, PAUSE_S)
    assert row.result == "right", row
