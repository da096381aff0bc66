"""Any manifests, any question about them, and the answer worked out without a database."""

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from hypothesis import Phase
from hypothesis import strategies as st

from sftriage.traces.catalogue import CaptureQuery, Catalogue
from sftriage.traces.manifest import Artefact, Manifest, ReproducedInfo
from sftriage.traces.remote import CaptureKey
from tests.unit.conftest import manifest_of

# Without making a failure smaller, which takes minutes against a database.
QUICKLY = (Phase.explicit, Phase.reuse, Phase.generate)

NOON = datetime(2026, 11, 20, 12, tzinfo=timezone.utc)
LAST = 2**63 - 1

# Few of each, so that questions meet manifests; and such as break what is put together from text.
JOBS = st.sampled_from(["resnet", "Resnet", "gpt 7b", "a/b", "d'or", "ümlaut", "100%_", "日本語", "x" * 80])
RUNS = st.sampled_from(["r1", "r2", "R1"])
RANKS = st.integers(0, 3) | st.just(2**31 - 1)
STAGES = st.sampled_from([None, "data", "Data", "forward", "x' OR 1=1 --", "<b>"])
HOSTS = st.sampled_from(["node-1", "node-2", ""])
PROFILERS = st.sampled_from(["torch", "nsys", "stacks"])
ANSWERS = st.sampled_from(["yes", "no", "partly"])
LABELS = st.sampled_from(["suspect", "stalled"])
RULES = st.sampled_from(["slow-rank", "other"])
IDS = st.from_regex(r"[wW][0-9]-[_r][.0-1]", fullmatch=True)
MOMENTS = st.sampled_from([timedelta(), timedelta(microseconds=1), timedelta(hours=2), timedelta(days=400)]).map(
    lambda later: NOON + later
)


def _spans(steps: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(steps, steps).map(lambda two: (min(two), max(two)))


# The first steps of a job, and the last that a manifest can hold.
SPANS = _spans(st.integers(0, 5)) | _spans(st.integers(LAST - 3, LAST))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    (first, last), size_bytes = draw(SPANS), draw(st.integers(0, LAST))
    artefact = Artefact(name="t", role="trace", media_type="x", size_bytes=size_bytes, sha256="ab" * 32)
    drawn = {"stage": draw(STAGES), "window": draw(SPANS), "rule": draw(RULES), "profiler": draw(PROFILERS)}
    made = manifest_of(draw(IDS), artefact, first_step=first, steps=last - first + 1, **drawn)
    answer, label = draw(st.none() | ANSWERS), draw(LABELS)
    found = answer and ReproducedInfo(answer=answer, steps=5, steps_with=2, over_s=0.1, expected_s=0.1)
    gain_s = draw(st.floats(allow_nan=False, allow_infinity=False))
    changed = {
        "trigger": made.trigger.model_copy(update={"label": label, "gain_s": gain_s}),
        "capture": made.capture.model_copy(update={"rank": draw(RANKS), "host": draw(HOSTS), "world_size": 2**31}),
    }
    names = {"job": draw(JOBS), "run": draw(RUNS), "created_at": draw(MOMENTS), "reproduced": found}
    return made.model_copy(update=changed | names)


def sets_of_manifests() -> st.SearchStrategy[list[Manifest]]:
    """Manifests as a store of many runs holds them: no two of one job, run and id."""
    return st.lists(manifests(), max_size=6, unique_by=lambda one: (one.job, one.run, one.capture_id))


CONDITIONS = {
    "job": JOBS,
    "run": RUNS,
    "rank": RANKS,
    "stage": STAGES,
    "label": LABELS,
    "rule": RULES,
    "profiler": PROFILERS,
    "host": HOSTS,
    "reproduced": ANSWERS,
    "prefix": IDS.flatmap(lambda one: st.integers(0, 6).map(lambda length: one[:length])),
    "steps": SPANS,
    "since": MOMENTS,
}


def questions() -> st.SearchStrategy[CaptureQuery]:
    """Any question; of few conditions, so that something meets them."""
    some = st.lists(st.sampled_from(sorted(CONDITIONS)), max_size=2, unique=True)
    return some.flatmap(lambda names: st.builds(CaptureQuery, **{name: CONDITIONS[name] for name in names}))


def meets(manifest: Manifest, wanted: CaptureQuery) -> bool:
    trigger, capture = manifest.trigger, manifest.capture
    known = dict(trigger) | dict(capture) | dict(manifest)
    known["reproduced"] = manifest.reproduced and manifest.reproduced.answer
    if any(
        getattr(wanted, name) not in (None, known[name]) for name in CONDITIONS.keys() - {"prefix", "steps", "since"}
    ):
        return False
    if wanted.prefix is not None and not manifest.capture_id.startswith(wanted.prefix):
        return False
    if wanted.since is not None and manifest.created_at < wanted.since:
        return False
    return wanted.steps is None or any(
        steps.first_step <= wanted.steps[1] and wanted.steps[0] <= steps.last_step
        for steps in (trigger.window, capture)
    )


def answer(stored: list[Manifest], wanted: CaptureQuery) -> list[tuple[str, str, str]]:
    """Job, run and id of those that are wanted, in the order of time."""
    found = [(one.created_at, one.capture_id, one.job, one.run) for one in stored if meets(one, wanted)]
    return [(job, run, capture_id) for _, capture_id, job, run in sorted(found)]


def agrees(catalogue: Catalogue, stored: list[Manifest], questions: Sequence[CaptureQuery]) -> None:
    """An empty catalogue with these manifests answers as they would, and is empty again."""
    for manifest in (*stored, *stored):  # (adding again changes nothing)
        catalogue.add(manifest)
    try:
        for wanted in questions:
            found = [(row.job, row.run, row.capture_id) for row in catalogue.find(wanted)]
            assert found == answer(stored, wanted)
    finally:
        for manifest in stored:
            catalogue.drop(CaptureKey.of(manifest).key)
    assert catalogue.find() == []
