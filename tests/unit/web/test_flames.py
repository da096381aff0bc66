"""The flame graph: what is drawn is as wide as it took, and what a page shows of it can be read, chosen and fetched."""

import json
import shutil
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sftriage.reduce.samples import Frame, WorkerSamples, collapsed
from sftriage.traces.manifest import CauseInfo, PlaceInfo, ReproducedInfo
from sftriage.traces.store import FileToStore
from sftriage.web.flames import LEAST_WIDTH, MAX_BOXES, MAX_ROWS, Sampled, flame_graph
from tests.unit.conftest import manifest_of
from tests.unit.reduce.test_samples import DECODE, GET, LOOP, OPEN, samples
from tests.unit.web.client import NASTY, Tags, harmless, text_of
from tests.unit.web.test_charts import findings, side

PLACE = PlaceInfo(function=GET.function, file=GET.file, line=GET.line)
CAUSE = CauseInfo(code="sleep", sure=True, sentence="It sleeps.", next_step="Wake it.", place=PLACE)
FOUND = findings(side(2, stage_s=0.040), side(0, stage_s=0.010)).model_copy(update={"cause": CAUSE})
SUSPECT = manifest_of("w100-149-r2-slow-rank").model_copy(update={"findings": FOUND})
CONTROL = manifest_of("w100-149-r0-slow-rank", rank=0, role="control")
SLEEPS = samples(((LOOP, GET), 36), ((LOOP, OPEN), 4), step=160)
READS = samples(((LOOP, OPEN), 5), ((LOOP, DECODE), 5), step=160)
BOTH = Sampled(SUSPECT, SLEEPS), Sampled(CONTROL, READS)


def drawn(graph, number=0):
    return {box.label.partition(" ")[0]: box for box in graph.sides[number].boxes}


def test_both_are_on_one_scale_and_the_difference_has_a_colour():
    # GIVEN a suspect that sleeps for 36 of 40 ms, and a control that is at work for 10 ms
    graph = flame_graph(*BOTH, {})
    # THEN the suspect fills the drawing, and the control a quarter of it
    assert [(one.name, one.took_s) for one in graph.sides] == [("on rank 2", 0.040), ("on rank 0", 0.010)]
    assert [one.boxes[0].width for one in graph.sides] == pytest.approx([100, 25])
    suspect, control = drawn(graph), drawn(graph, 1)
    # AND what the suspect is longer in is red in both, what the control is longer in blue, where samples tell
    assert (suspect["main"].level, suspect["57:"].level, control["main"].level) == (4, 4, 4)
    assert suspect["60:"].level == 0
    assert control["decode;all"].level == -2
    # AND says how long it is, and by how much, in words
    assert suspect["57:"].label == "57: time.sleep(0.04) 36.0 ms (+36.0 ms)"
    assert "36.0 ms a step on rank 2, 0.00 ms on rank 0: 36.0 ms more" in suspect["57:"].title
    # AND the place that the cause names is marked
    assert {name for name, box in suspect.items() if box.marked} == {"Images.__getitem__", "57:"}
    assert graph.lines[0].where == "Images.__getitem__ (data.py:57)"


def test_a_capture_of_a_fault_that_comes_and_goes_is_compared_with_its_other_steps():
    taken = replace(SLEEPS, step_N=(160,) * 38 + (161,) * 2)
    again = ReproducedInfo(answer="partly", steps=2, steps_with=1, over_s=0.04, expected_s=0.04, fault_steps=(160,))
    manifest = SUSPECT.model_copy(update={"reproduced": again, "findings": None})
    graph = flame_graph(Sampled(manifest, taken), None, {})
    assert (graph.compared, [one.samples for one in graph.sides]) == ("steps", [38, 2])
    assert [one.name for one in graph.sides] == ["in steps with the fault", "in the others"]


def test_alone_it_has_no_colours_and_says_how_long_it_took():
    graph = flame_graph(BOTH[0], None, {})
    assert (graph.compared, len(graph.sides), {box.level for box in graph.sides[0].boxes}) == (None, 1, {0})
    # (a caller of one function only is listed above the drawing)
    assert [name for _, name in graph.callers] == ["", "main"]
    assert drawn(graph)["Images.__getitem__"].label == "Images.__getitem__ 40.0 ms"


CHOICES = [
    ({}, ("data", "MainThread", 2, False)),
    ({"stage": ""}, ("", "MainThread", 2, False)),
    ({"stage": "nowhere", "thread": "nobody", "frame": "nothing"}, ("data", "MainThread", 2, False)),
    ({"thread": "statistics"}, ("data", "statistics", 1, False)),
]


@pytest.mark.parametrize(("query", "shown"), CHOICES)
def test_what_is_not_there_is_as_if_it_had_not_been_asked_for(query, shown):
    graph = flame_graph(Sampled(SUSPECT, samples(((LOOP, GET), 30), ((LOOP, OPEN), 9), other=0.5)), None, query)
    assert (graph.stage, graph.thread, len(graph.callers), graph.zoomed) == shown
    assert (graph.stages, graph.threads) == (("data", ""), ("MainThread", "statistics"))


def test_a_function_that_is_chosen_is_as_wide_as_the_drawing():
    whole = flame_graph(*BOTH, {})
    get = drawn(whole)["Images.__getitem__"]
    graph = flame_graph(*BOTH, {"frame": get.path})
    assert graph.zoomed
    assert [name for _, name in graph.callers] == ["", "main"]
    assert (graph.sides[0].boxes[0].width, graph.sides[0].boxes[0].path) == (100, get.path)
    # AND back
    assert flame_graph(*BOTH, {"frame": graph.callers[0][0]}).sides[0].boxes[0].label.startswith("data 40.0 ms")


LETTERS = st.sampled_from([Frame(one, "/job/x.py", 1, "") for one in "abcdefgh"])
STACKS = st.lists(st.tuples(st.lists(LETTERS, min_size=1, max_size=60).map(tuple), st.integers(1, 3)), min_size=1)


@given(STACKS, STACKS)
def test_no_box_leaves_the_one_above_it_and_none_lies_on_another(taken, other):
    graph = flame_graph(Sampled(SUSPECT, samples(*taken)), Sampled(CONTROL, samples(*other)), {})
    for one in graph.sides:
        assert len(one.boxes) <= 2 * MAX_BOXES
        assert one.rows <= MAX_ROWS
        rows = {}
        for box in sorted(one.boxes, key=lambda box: (box.row, box.x)):
            assert box.width >= LEAST_WIDTH - 1e-3
            above = [up for up in rows.get(box.row - 1, ()) if up.x - 0.01 <= box.x]
            assert box.row == 0 or box.x + box.width <= above[-1].x + above[-1].width + 0.01
            assert not rows.get(box.row) or rows[box.row][-1].x + rows[box.row][-1].width <= box.x + 0.01
            rows.setdefault(box.row, []).append(box)


def document(taken, **names):
    threads = (taken.training, *taken.others)
    columns = {"time_ns": taken.time_ns_N, "step": taken.step_N, "stage": taken.stage_N, "since_ns": taken.since_ns_N}
    return {
        "shared": {"frames": [{"name": one.function, "file": one.file, "line": one.line} for one in taken.frames]},
        "profiles": [{"name": names.get(one.name, one.name), "samples": one.stacks_N} for one in threads],
        "sftriage": {
            **columns,
            "schema_version": 1,
            "period_s": taken.period_ns * 1e-9,
            "threads": [{"run_ns": one.run_ns_N, "waited_ns": one.waited_ns_N} for one in threads],
            "sampler": {"run_ns": taken.sampler.run_ns_N, "waited_ns": taken.sampler.waited_ns_N},
            "source": [one.source for one in taken.frames],
        },
    }


@pytest.fixture
def put_sampled(captured, store, trace, tmp_path):
    def put(manifest, text):
        path = tmp_path / "stacks.json"
        path.write_text(text)
        files = [FileToStore(trace), FileToStore(path, "stacks.speedscope.json", "application/json", compress=False)]
        store.put_files(
            manifest.capture_id, files, lambda artefacts: manifest.model_copy(update={"artefacts": artefacts})
        )
        return f"/captures/{manifest.capture_id}"

    return put


def test_a_capture_s_page_has_it_and_can_be_read_without_a_script(captured, put_sampled):
    # GIVEN a suspect and a control with stacks
    page = put_sampled(SUSPECT, json.dumps(document(SLEEPS)))
    control = put_sampled(CONTROL, json.dumps(document(READS)))
    # WHEN the page is requested THEN both are drawn, with links to every function, and a table of the lines
    answer = captured.get(page)
    assert answer.status == 200
    text = text_of(answer)
    assert "longer on rank 2" in text
    assert "57: time.sleep(0.04) 36.0 ms (+36.0 ms)" in text
    links = [a["href"] for tag, a in harmless(answer) if tag == "a" and "frame=" in a["href"]]
    assert links
    # AND each leads to the same page, with that function in full width
    assert "called by" in text_of(captured.get(links[-1].partition("#")[0]))
    # AND of the control's page the drawing is the same
    assert "57: time.sleep(0.04) 36.0 ms (+36.0 ms)" in text_of(captured.get(control))
    # AND the stacks are to be had in the form that others read
    folded = captured.get(f"{page}/stacks.folded")
    assert folded.headers["content-disposition"].endswith(f'"{SUSPECT.capture_id}-stacks.folded"')
    assert folded.text.splitlines()[0].endswith("Images.__getitem__ (data.py:57) 180000")


def test_names_and_lines_are_text_whatever_they_are(captured, put_sampled):
    nasty = Frame(NASTY, f"/job/{NASTY}", 1, NASTY)
    page = put_sampled(SUSPECT, json.dumps(document(samples(((nasty,), 9), other=0.1), MainThread=NASTY)))
    for query in ("", "?stage=&thread=statistics", f"?thread={NASTY}&stage={NASTY}&frame={NASTY}"):
        answer = captured.get(page + query)
        assert answer.status == 200
        harmless(answer)
        assert NASTY not in answer.text


@pytest.mark.parametrize("text", ["not JSON", "{}", "[" * 100_000])
def test_stacks_that_are_none_leave_the_rest_of_the_page(captured, put_sampled, text):
    page = put_sampled(SUSPECT, text)
    answer = captured.get(page)
    assert (answer.status, captured.get(f"{page}/stacks.folded").status) == (200, 422)
    assert "The sampled stacks cannot be shown: stacks.speedscope.json: not sampled stacks" in text_of(answer)


def test_a_capture_without_stacks_has_no_drawing(captured):
    assert "flame-graph" not in captured.get("/captures/c-1").text
    assert captured.get("/captures/c-1/stacks.folded").status == 404
    assert not [a for tag, a in Tags(captured.get("/captures/c-1").text).tags if "folded" in a.get("href", "")]


def test_a_store_s_page_and_a_report_draw_it_too(shelf, captured, put_sampled, sftriage):
    # GIVEN a suspect and a control in a run, and in a store of many
    for manifest, taken in ((SUSPECT, SLEEPS), (CONTROL, READS)):
        put_sampled(manifest, json.dumps(document(taken)))
        stored = captured.directory.path / "captures" / manifest.capture_id
        there = shelf.directory(manifest)
        shutil.copytree(stored, there)
    shelf.look()
    line = "57: time.sleep(0.04) 36.0 ms (+36.0 ms)"
    # WHEN the store's page of the suspect is read THEN it is drawn, and its links stay on that page
    answer = shelf.get(f"/captures/resnet/run-1/{SUSPECT.capture_id}")
    assert line in text_of(answer)
    links = [a["href"] for tag, a in harmless(answer) if tag == "a" and "frame=" in a["href"]]
    assert all(one.startswith(f"/captures/resnet/run-1/{SUSPECT.capture_id}?") for one in links)
    assert shelf.get(f"/captures/resnet/run-1/{SUSPECT.capture_id}/stacks.folded").status == 200
    # AND a report of it has it, without a link
    out = sftriage("report", SUSPECT.capture_id, "--run", captured.directory.path, "--format", "html").out
    assert line in out
    assert "a" not in {tag for tag, _ in Tags(out).tags}


def test_what_a_worker_did_is_drawn_in_the_stage_that_waited_for_it():
    # GIVEN a worker that has sampled itself at times of its own, and is still at it when the trainer's samples end
    busy = samples(((LOOP, OPEN), 8), every_ms=4)
    stacks = tuple(tuple(number + len(SLEEPS.frames) for number in one) for one in busy.training.stacks_N)
    training = structs.replace(busy.training, stacks_N=stacks)
    worker = WorkerSamples(1, 77, 0.004, (*busy.time_ns_N[:-1], 10**12), (training,), busy.sampler)
    taken = replace(SLEEPS, frames=(*SLEEPS.frames, *busy.frames), workers=(worker,))
    # WHEN it is chosen THEN its lines are those of the time in which the training thread was in the stage
    graph = flame_graph(Sampled(SUSPECT, taken), None, {"thread": "DataLoader worker 1"})
    assert (graph.thread, graph.stage, graph.sides[0].samples) == ("DataLoader worker 1", "data", 7)
    assert [line.source for line in graph.lines] == [OPEN.source]
    # AND it is among the collapsed stacks
    assert any(line.startswith("worker 1 MainThread;data;main") for line in collapsed(taken))
