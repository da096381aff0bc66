"""The page in a real browser, about a real job: from the timeline to the capture to the downloaded file."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftriage.traces.store import LocalStore
from tests import needs
from tests.golden import runs
from tests.integration.browsing import PHONE, downloaded, fits_and_can_be_read, live
from tests.integration.conftest import own_environment
from tests.integration.killing import attached, jobs
from tests.integration.processes import DEADLINE_S, ended, sftriage_process
from tests.integration.runs import verdicts

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

TOKEN = "correct-horse-battery-staple"
PERFETTO = """<!doctype html><script>
  addEventListener("message", (event) => {
    if (event.data === "PING") event.source.postMessage("PONG", event.origin);
    if (event.data.perfetto) {
      const { buffer, title, fileName } = event.data.perfetto;
      crypto.subtle.digest("SHA-256", buffer).then((sum) => {
        const sha256 = [...new Uint8Array(sum)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
        window.handed = { title, fileName, sha256 };
      });
    }
  });
</script>"""

pytestmark = needs.chromium


@pytest.fixture
def recorded(demonstrated) -> Path:
    """A job of four ranks, recorded: one of them becomes slow in data, and is captured."""
    return demonstrated.run


@pytest.fixture(scope="module")
def shown(demonstrated, tmp_path_factory) -> Iterator[str]:
    """Where the page of that run is, served once for all tests that only look at it."""
    environment = own_environment(tmp_path_factory.mktemp("shown"))
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    process = sftriage_process("ui", "--json", "--run", demonstrated.run, **options)
    with ended(process):
        yield json.loads(process.stdout.readline())["url"]


def onsets_of(run: Path) -> set[str]:
    windows = verdicts(run)
    suspects = (one["suspects"][0] for one in windows if one["suspects"])
    return {str(one["onset_step"]) for one in suspects if (one["rank"], one["stage"]) == (2, "data")}


def test_from_the_timeline_to_the_downloaded_file(page, shown, recorded, tmp_path):
    # GIVEN the page about a run in which a rank was captured
    (manifest,) = LocalStore(recorded).manifests().manifests
    live(page, shown)
    # THEN it answers at a glance: not healthy, since when, which rank and stage, the cost, and what was done
    answers = page.inner_text(".answers")
    assert page.inner_text("#headline") == "Slow, captured"
    assert re.search(r"step (\d+)", page.inner_text("#answer-since dd"))[1] in onsets_of(recorded)
    for words in ("rank 2 in data", "on host ", "rank-hours (4 ranks)", "Capture of rank 2 done"):
        assert words in answers
    # AND what to do next: first, open the trace
    command = f"sftriage traces open {manifest.capture_id} --run {recorded}"
    assert page.inner_text(".next li >> nth=0 >> code") == command
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".next li >> nth=0 >> button")
    expect(page.locator(".next li button").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == command
    # WHEN the user follows the capture's mark on the timeline to its page
    page.click(f'.marks a[href="/captures/{manifest.capture_id}"]', force=True)
    page.wait_for_selector("#tracks")
    assert page.inner_text("#capture-title") == (
        f"Capture of rank 2, steps {manifest.capture.first_step} to {manifest.capture.last_step}"
    )
    assert page.locator("#tracks .track").count() == 2
    # (and the manifest keeps what is drawn there, for a store)
    assert [[step.step for step in one.steps] for one in manifest.recorded.ranks] == [
        list(range(manifest.capture.first_step, manifest.capture.last_step + 1))
    ] * 2
    # AND downloads the trace
    path = downloaded(page, tmp_path)
    # THEN it is the trace of the manifest and of the page, complete
    artefact = manifest.artefacts[0]
    assert path.name == f"{manifest.capture_id}-{artefact.name}"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == artefact.sha256 == page.inner_text("[data-sha256]")
    assert json.loads(gzip.decompress(path.read_bytes()))["distributedInfo"]["rank"] == 2


def test_a_trace_is_handed_to_perfetto(page, shown, recorded):
    # GIVEN a capture's page, and Perfetto's viewer as its documentation has it: it answers PING, and takes a trace
    (manifest,) = LocalStore(recorded).manifests().manifests
    page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    page.goto(f"{shown}captures/{manifest.capture_id}")
    # WHEN the trace is opened in it
    with page.expect_popup() as popup:
        page.click("#perfetto")
    # THEN it gets the very bytes
    handed = popup.value.wait_for_function("window.handed").json_value()
    assert handed["sha256"] == manifest.artefacts[0].sha256
    assert handed["fileName"] == f"{manifest.capture_id}-trace.json.gz"
    page.wait_for_selector("text=Handed to Perfetto.")


def test_the_page_follows_the_run(page, serve, recorded, tmp_path):
    # GIVEN the page about a run that has come half-way
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    lines = run.joinpath("decisions.jsonl").read_bytes().splitlines(keepends=True)
    captures, kept = (run / name for name in ("captures", "kept"))
    captures.rename(kept)
    run.joinpath("decisions.jsonl").write_bytes(lines[0])
    live(page, serve("--run", run)[1])
    assert page.inner_text("#headline") != "Slow, captured"
    # AND a user who has opened the table and typed a step
    page.click("#timeline-table summary")
    page.fill("input[name=from]", "17")
    page.evaluate("window.same = true")
    # WHEN the run goes on
    with run.joinpath("decisions.jsonl").open("ab") as file:
        file.write(b"".join(lines[1:]))
    kept.rename(captures)
    # THEN the page says so by itself, without being loaded again
    expect(page.locator("#headline")).to_have_text("Slow, captured")
    expect(page).to_have_title("Slow, captured: demo - sftriage")
    assert page.evaluate("window.same")
    # AND so does a screen reader
    expect(page.locator("#spoken")).to_have_text("Slow, captured")
    # AND what was open is open, and what was typed is there
    assert page.evaluate("document.getElementById('timeline-table').open")
    assert page.input_value("input[name=from]") == "17"


def test_ages_go_on_without_a_reload(page, shown):
    # GIVEN the page about a run that has ended
    page.clock.install()
    page.goto(shown)
    ago = page.locator("#outlook .ago").last
    before = ago.inner_text()
    # WHEN hours pass THEN the page counts them
    page.clock.fast_forward("05:00:00")
    expect(ago).to_have_text("5 h ago")
    assert before != "5 h ago"


def test_a_page_that_waits_for_a_run_shows_it_once_it_is_there(page, serve, recorded, tmp_path):
    # GIVEN the page of a run whose directory is not there
    process, url = serve("--run", tmp_path / "run")
    live(page, url)
    assert page.inner_text("#headline") == "No run yet"
    assert f"No run in {tmp_path / 'run'} yet." in page.inner_text("#outlook")
    # WHEN it is there THEN the page shows it by itself, and the terminal says so
    shutil.copytree(recorded, tmp_path / "run")
    page.wait_for_selector("#timeline-cursor")
    expect(page.locator("#headline")).to_have_text("Slow, captured")
    # (a page that is still open would say that its server has gone)
    page.close()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert err.splitlines() == [f"now shows {tmp_path / 'run'}"]


def test_the_newest_run_is_followed_and_the_others_can_be_chosen(browser, start, recorded, tmp_path, environment):
    # GIVEN the page of a machine without runs
    process = start("ui")
    url = process.stdout.readline().strip()
    page = browser.new_page()
    live(page, url)
    # WHEN runs begin one after the other THEN the page shows each
    for name in ("first", "second"):
        shutil.copytree(recorded, tmp_path / name)
        info = json.loads((tmp_path / name / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps(info | {"run_id": name}))
        notes = Path(environment["XDG_STATE_HOME"], "sftriage", "runs.jsonl")
        notes.parent.mkdir(parents=True, exist_ok=True)
        with notes.open("a") as file:
            file.write(json.dumps({"path": str(tmp_path / name)}) + "\n")
        expect(page.locator("#run .quiet")).to_have_text(name)
    # AND says that it has gone on to another
    expect(page.locator("#newer")).to_contain_text("This run began after demo, first, which was shown here")
    # WHEN a user chooses the first with the keyboard THEN all pages stay with it
    page.focus("#runs-list summary")
    page.keyboard.press("Enter")
    links = page.locator("#runs-list a")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        expect(links.nth(2)).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    links.nth(2).click()
    page.wait_for_url(f"{url}runs/first/")
    live(page)
    page.click("text=Decisions")
    page.wait_for_url(f"{url}runs/first/decisions")
    assert "There is a newer run: demo, second" in page.inner_text("#newer")
    page.close()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert [line for line in err.splitlines() if "shows" in line] == [
        f"now shows {tmp_path / 'first'}",
        f"now shows {tmp_path / 'second'}, the newest run",
    ]


def test_an_unwatched_job_is_unknown_until_it_is_taken_over(page, serve, tmp_path, environment):
    # GIVEN a job under watch, and its page
    with jobs(tmp_path, environment) as start_job:
        running = start_job()
        page.goto(serve("--run", running.directory.path)[1])
        state = page.locator("#run .pill")
        expect(state).to_have_text("running")
        # WHEN sftriage is killed THEN the page says that the job is not watched, and what to do
        running.process.kill()
        running.process.wait(DEADLINE_S)
        expect(state).to_have_text("not watched")
        assert f"sftriage attach --run {running.directory.path}" in page.inner_text("#outlook .next")
        # AND the job's state is unknown, whatever it was
        expect(page.locator("#headline")).to_have_text(re.compile("Unknown"))
        assert "face-unknown" in page.get_attribute("#outlook", "class")
        # AND when another sftriage takes the job over, the page says so
        successor = attached(running, environment)
        expect(state).to_have_text("running, taken over")
        assert f"Process {successor.pid} took over this job" in page.inner_text("#outlook")
        # AND that it has ended
        running.release.touch()
        successor.communicate(timeout=DEADLINE_S)
        expect(state).to_have_text("ended")
        # AND a run that was watched to its end keeps its last verdict
        assert "Unknown" not in page.inner_text("#headline")


def test_it_can_be_used_without_a_pointer(page, shown, recorded):
    judged = verdicts(recorded)
    first_step, last_step = judged[0]["first_step"], judged[-1]["last_step"]
    live(page, shown)
    # GIVEN a user with a keyboard only: the first stop leads past the head of the page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    # WHEN they go on to the timeline, and along it
    while page.evaluate("document.activeElement.id") != "timeline-cursor":
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement !== document.body")
    page.keyboard.press("Home")
    first = page.inner_text("#timeline-readout")
    page.keyboard.press("ArrowRight")
    # THEN it reads out column by column, on the screen and to a screen reader
    assert first.startswith(f"step {first_step}: ")
    assert page.get_attribute("#timeline-cursor", "aria-valuenow") == "1"
    for _ in range(3):
        page.keyboard.press("PageDown")
    second = page.inner_text("#timeline-readout")
    assert second.startswith(f"step {first_step + 61}: ")
    assert page.get_attribute("#timeline-cursor", "aria-valuetext") == second
    # AND the map's cursor moves along: both have one axis, and show the same step
    expect(page.locator("#heat-readout")).to_have_text(re.compile(f"step {first_step + 61}, rank 2: "))
    assert page.get_attribute("#heat-cursor", "aria-valuenow") == "61"
    assert side(page, "timeline") == pytest.approx(side(page, "heat"), abs=1.0)
    # AND the map says how late the slow rank was at the last step that was judged
    page.focus("#heat-cursor")
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#heat-readout")).to_have_text(re.compile(f"step {last_step}, rank 1: "))
    page.keyboard.press("ArrowDown")
    expect(page.locator("#heat-readout")).to_have_text(re.compile(f"step {last_step}, rank 2: .* late"))


def side(page, chart: str) -> float:
    return page.locator(f"#{chart}-cursor .here").bounding_box()["x"]


def test_a_capture_and_the_fault_are_drawn_at_their_steps(page, shown, recorded):
    # GIVEN the page about a run in which a rank was captured
    (manifest,) = LocalStore(recorded).manifests().manifests
    live(page, shown)
    # WHEN one points at the capture's mark
    mark, chart = (page.locator(one).bounding_box() for one in (".stack .captured", "#timeline-cursor"))
    page.hover("#timeline-cursor", position={"x": mark["x"] + mark["width"] / 2 - chart["x"], "y": 40})
    # THEN that is one of the steps that it recorded, on the timeline as on the map
    expect(page.locator("#heat-readout")).to_have_text(re.compile("step "))
    step = int(re.match(r"step (\d+), ", page.inner_text("#heat-readout"))[1])
    assert manifest.capture.first_step <= step <= manifest.capture.last_step
    # AND every rank is named beside the map
    assert page.locator(".y-ranks text").all_text_contents() == [f"rank {rank}" for rank in range(4)]


def test_the_flame_graph_leads_to_the_line_by_pointer_by_keyboard_and_without_a_script(page, browser, shown, recorded):
    # GIVEN the page of a capture whose cause is known
    (manifest,) = LocalStore(recorded).manifests().manifests
    url = f"{shown}captures/{manifest.capture_id}"
    live(page, url)
    # THEN it names the cause, and frames its box
    place = manifest.findings.cause.place
    expect(page.locator("#capture")).to_contain_text(manifest.findings.cause.sentence)
    boxes = page.locator("#flame-graph svg a")
    where = boxes.filter(has=page.locator(".marked"))
    expect(where).to_contain_text(place.function)
    # WHEN the user points at it THEN it is named, and a click makes it as wide as the drawing
    where.hover()
    expect(page.locator("#flames-readout")).to_contain_text(f"{place.function} (")
    where.click()
    page.wait_for_url("**frame=**")
    expect(page.locator("#flame-graph svg svg").first).to_have_attribute("width", "100.0%")
    expect(page.locator(".callers")).to_contain_text("main")
    # AND back again, by the browser's own button
    page.go_back()
    expect(page).to_have_url(url)
    # AND with the keyboard alone, of another stage: arrows go from a function to what it called
    page.locator("#flames .choices a", has_text="whole step").press("Enter")
    page.wait_for_url("**stage=&**")
    expect(boxes.first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(boxes.first).not_to_be_focused()
    assert page.evaluate("document.activeElement.closest('#flame-graph') !== null")
    # AND without scripts there are links
    still = browser.new_page(java_script_enabled=False)
    still.goto(url)
    still.locator("#flame-graph svg a", has_text=place.function).first.click()
    still.wait_for_url("**frame=**")
    expect(still.locator(".callers")).to_contain_text("main")
    still.close()


@pytest.mark.parametrize("target", ["", "decisions", "captures/{}"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read_by_day_and_by_night(browser, shown, recorded, target, scheme):
    (manifest,) = LocalStore(recorded).manifests().manifests
    page = browser.new_page(**PHONE, color_scheme=scheme)
    live(page, shown + target.format(manifest.capture_id))
    assert fits_and_can_be_read(page)
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_stall_is_drawn_on_a_phone(browser, serve, tmp_path, scheme):
    # GIVEN a run of eight ranks of which rank 5 does not arrive
    run = runs.hosts(tmp_path / "run").directory.path
    page = browser.new_page(**PHONE, color_scheme=scheme)
    live(page, serve("--run", run)[1])
    # THEN its place in the step stands out from those of the ranks that wait
    grounds = page.eval_on_selector_all(
        ".stall tbody tr", "rows => rows.map((row) => getComputedStyle(row.cells[2]).backgroundColor)"
    )
    assert [n for n, ground in enumerate(grounds) if ground != grounds[0]] == [5]
    assert page.locator(".stall td.waiting").count() == 7
    assert fits_and_can_be_read(page)
    page.close()


PAINTED = """() => {
  const canvas = document.querySelector("#heat canvas");
  if (!canvas) return false;
  const row = (rank) => canvas.getContext("2d").getImageData(0, rank, canvas.width, 1).data;
  const opaque = (cells) => cells.filter((_, n) => n % 4 === 3 && cells[n] > 200).length;
  return opaque(row(2)) > canvas.width / 4 && opaque(row(0)) < canvas.width / 4;
}"""
"""Whether the map shows the slow rank's cells darker than another's."""


def test_a_page_for_others_asks_for_the_token(browser, serve, recorded, tmp_path, environment):
    # GIVEN a page that may be reached from elsewhere
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "token").chmod(0o600)
    _, url = serve("--run", recorded, "--host", "0.0.0.0", "--token-file", tmp_path / "token")
    # WHEN a client has no token THEN it must give one, and gets nothing
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=DEADLINE_S)
    assert caught.value.code == 401
    # AND with it a browser shows the page, and the page's own requests succeed
    page = browser.new_page(http_credentials={"username": "any", "password": TOKEN})
    live(page, url)
    page.wait_for_function(PAINTED)
    page.close()


def test_it_ends_on_a_signal_though_a_client_listens(serve, recorded, environment):
    # GIVEN a page with the token from the environment, and a client that listens to its events
    environment["SFTRIAGE_UI_TOKEN"] = TOKEN
    process, url = serve("--run", recorded)
    credentials = base64.b64encode(f":{TOKEN}".encode()).decode()
    request = urllib.request.Request(url + "events", headers={"Authorization": f"Basic {credentials}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as events:
        assert events.readline() == b"retry: 2000\n"
        # WHEN Ctrl-C is pressed THEN it ends, and says nothing of it
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in err
