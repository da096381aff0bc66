"""The page about a store of many jobs, in a real browser, about an S3 server: from the list to the downloaded file."""

import hashlib
import os
from pathlib import Path
from urllib.request import urlopen

import pytest

from sftriage.traces.catalogue import Catalogue
from sftriage.traces.remote import CaptureKey, RemoteStore
from tests import needs
from tests.integration.browsing import PHONE, downloaded, fits_and_can_be_read, live
from tests.integration.postgres import Postgres
from tests.integration.processes import DEADLINE_S, peak_bytes, wait_until
from tests.integration.s3 import BUCKET, Proxy, environment_of
from tests.unit.conftest import manifest_of
from tests.unit.web.stored import CONTENT, trace_of

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

URL = f"s3://{BUCKET}/shared"
JOBS = ("resnet", "gpt 7b/ü", "<b>bert</b>")
LARGE_BYTES = 96 * 2**20

pytestmark = needs.chromium


@pytest.fixture
def through(moto, environment):
    """A proxy before a bucket that is empty; what is started talks to it."""
    moto.clear()
    with Proxy(moto) as proxy:
        environment.update(environment_of(proxy.url))
        yield proxy


@pytest.fixture
def put(moto):
    def put(capture_id: str, job: str = JOBS[0], content: bytes = CONTENT, **about):
        manifest = manifest_of(capture_id, trace_of(content), **about).model_copy(update={"job": job})
        for name, body in (("trace.json.gz", content), ("manifest.json", manifest.to_json())):
            moto.client.put_object(Bucket=BUCKET, Key=f"shared/{CaptureKey.of(manifest).key}/{name}", Body=body)
        return manifest

    return put


def test_from_the_list_to_the_downloaded_file(page, through, put, serve, tmp_path):
    # GIVEN a bucket with captures of three jobs
    for n in range(9):
        manifest = put(f"c-{n}", JOBS[n % 3], rank=n % 4, stage="data" if n % 2 else "forward", second=n)
    _, url = serve("--store", URL)
    # WHEN the page is opened before the store was read THEN its captures come by themselves
    page.goto(url)
    expect(page.locator("table.list tbody tr")).to_have_count(9)
    live(page)
    # WHEN a user filters by job, with the keyboard only
    page.focus("input[name=job]")
    page.keyboard.type("<b>bert</b>")
    page.keyboard.press("Enter")
    page.wait_for_url("**job=*")
    expect(page.locator("table.list tbody tr")).to_have_count(3)
    # AND goes on to the newest of them
    page.click("table.list tbody a")
    assert page.inner_text("#capture-title") == "Capture of rank 0, steps 160 to 164"
    assert "No timeline here" in page.inner_text("#elsewhere")
    path = downloaded(page, tmp_path)
    # THEN what they have is what the manifest promises
    assert path.name == "c-8-trace.json.gz"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest.artefacts[0].sha256


def test_the_list_follows_the_store_and_keeps_what_is_typed(page, through, put, serve, monkeypatch):
    put("c-1")
    process, url = serve("--store", URL)
    page.goto(url)
    expect(page.locator("table.list tbody tr")).to_have_count(1)
    page.fill("input[name=stage]", "dat")
    # WHEN another capture comes THEN it is listed by itself, and what was typed is there
    put("c-2", second=5)
    expect(page.locator("table.list tbody tr")).to_have_count(2, timeout=90_000)
    assert page.input_value("input[name=stage]") == "dat"
    assert process.poll() is None


def test_a_store_that_is_away_and_there_again(page, through, put, serve):
    # GIVEN a store that answers nothing but errors
    put("c-1")
    through.plan = lambda method, path: "error"
    _, url = serve("--store", URL)
    # WHEN the page is opened THEN it says so
    page.goto(url)
    expect(page.locator("#headline")).to_have_text("The store cannot be reached", timeout=120_000)
    # AND shows the captures by itself once it is there
    through.plan = lambda method, path: None
    expect(page.locator("table.list tbody tr")).to_have_count(1, timeout=120_000)
    expect(page.locator("#away")).to_have_count(0)


@pytest.mark.parametrize("what", ["changed", "cut"])
def test_a_download_that_is_not_what_was_put_never_looks_whole(page, through, put, serve, moto, what, tmp_path):
    # GIVEN an artefact of several pieces that was changed at its end, or that the network cuts
    content = os.urandom(5 * 2**20)
    manifest = put("c-1", content=content)
    key = f"shared/{CaptureKey.of(manifest).key}/trace.json.gz"
    process, url = serve("--store", URL)
    page.goto(f"{url}captures/{CaptureKey.of(manifest).key}")
    if what == "changed":
        moto.client.put_object(Bucket=BUCKET, Key=key, Body=content[:-1] + bytes([content[-1] ^ 1]))
    else:
        through.plan = lambda method, path: "short" if path.split("?")[0].endswith("trace.json.gz") else None
    # WHEN it is downloaded THEN the browser says that it failed
    with page.expect_download() as download:
        page.click("text=Download trace.json.gz")
    assert download.value.failure() is not None
    # AND the server goes on, and logs why
    assert "Captures" in page.inner_text("nav")
    # (a page that is still open would say that its server has gone)
    page.close()
    page.wrong.clear()
    process.terminate()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "a download was cut short: " in err
    assert "Traceback" not in err


def test_a_large_artefact_passes_through_without_being_held(through, put, serve):
    # GIVEN an artefact of a hundred megabytes, and a page that has served a small one
    small, large = put("c-1"), put("c-2", content=os.urandom(LARGE_BYTES))
    process, url = serve("--store", URL)

    def fetched(manifest) -> str:
        with urlopen(f"{url}captures/{CaptureKey.of(manifest).key}/files/trace.json.gz", timeout=DEADLINE_S) as answer:
            digest = hashlib.sha256()
            while piece := answer.read(2**20):
                digest.update(piece)
        return digest.hexdigest()

    assert fetched(small) == small.artefacts[0].sha256
    before = peak_bytes(process.pid)
    # WHEN it is fetched THEN it is whole, and the page has not become larger by it
    assert fetched(large) == large.artefacts[0].sha256
    assert peak_bytes(process.pid) - before < LARGE_BYTES / 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read_by_day_and_by_night(browser, through, put, serve, scheme):
    # GIVEN a store with long names in it, and a phone
    name = "c-1-of-a-window-with-a-long-name-r2-slow-rank-1"
    manifest = put(name, "a-job-with-a-name-that-is-much-longer-than-most/ü", rank=2)
    _, url = serve("--store", URL)
    page = browser.new_page(**PHONE, color_scheme=scheme)
    page.goto(url)
    # THEN rank, stage, cost and whether the fault was there are visible without scrolling sideways
    row = page.locator("table.list tbody tr")
    for cell, words in enumerate(("rank 2", "data", "20.0 ms", "unknown")):
        box = row.locator("th, td").nth(cell).bounding_box()
        assert words in row.locator("th, td").nth(cell).inner_text()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["viewport"]["width"]
    of_capture = f"captures/{CaptureKey.of(manifest).key.replace('%', '%25')}"
    for target in ("", "?rank=x&since=2x", of_capture, "captures/x/y/z"):
        page.goto(url + target)
        assert fits_and_can_be_read(page)
    page.close()


def test_without_scripts_it_is_all_there(browser, through, put, serve):
    # GIVEN a browser without scripts
    put("c-1")
    _, url = serve("--store", URL)
    page = browser.new_page(java_script_enabled=False)

    def listed() -> bool:
        page.goto(url)
        return page.locator("table.list tbody tr").count() == 1

    # WHEN the store has been read THEN the list is there, its filter works, and a capture has its tables
    wait_until(listed)
    page.fill("input[name=rank]", "7")
    page.click("text=Show")
    assert "None of the" in page.inner_text("main")
    page.click("text=all captures")
    page.click("table.list tbody a")
    assert "sha256" in page.inner_text("#manifest")
    page.close()


@needs.postgres
def test_captures_of_stores_that_share_a_catalogue(page, through, put, serve, monkeypatch):
    # GIVEN a catalogue in PostgreSQL that knows of a capture in a bucket
    for name, value in environment_of(through.url).items():
        monkeypatch.setenv(name, value)
    manifest = put("c-1")
    server = Postgres()
    try:
        at = server.database()
        Catalogue(at, RemoteStore.open(URL)).add(manifest)
        # WHEN the page about the catalogue is opened
        process, url = serve("--catalogue", at)
        page.goto(url)
        # THEN the capture is listed and has its page, without a --store
        expect(page.locator("table.list tbody tr")).to_have_count(1)
        page.click("table.list tbody a")
        page.wait_for_selector("#manifest")
        with page.expect_download() as download:
            page.click("text=Download trace.json.gz")
        assert Path(download.value.path()).read_bytes() == CONTENT
        # AND the page says when the catalogue is unreachable
        page.goto(url)
        server.kill()
        expect(page.locator("#headline")).to_have_text("The store is unreachable")
        page.close()
        process.terminate()
    finally:
        server.close()
