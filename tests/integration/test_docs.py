"""The documentation site that `make site` built, read from the disk in a browser without a network."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from sftriage.commands.cli import COMMANDS
from tests import needs
from tests.integration.browsing import PHONE, WIDE
from tests.integration.processes import ROOT

SITE = ROOT / "build" / "site"
PAGES = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html" and path.parent.name != "gallery")
pytestmark = [needs.chromium, pytest.mark.skipif(not PAGES, reason="no documentation site here: make site")]
SCREENS = {"desk": {"viewport": WIDE}, "phone": PHONE}
SCHEMES = {"light": "default", "dark": "slate"}


@pytest.fixture(params=SCREENS)
def page(request, browser) -> Iterator[Any]:
    """A page on a screen, which loads from the disk alone, without an error."""
    wrong: list[str] = []
    context = browser.new_context(**SCREENS[request.param], offline=True)
    context.on("request", lambda sent: sent.url.startswith(("file:", "data:", "blob:")) or wrong.append(sent.url))
    # (the next page cuts short what the one before still loads)
    context.on("requestfailed", lambda sent: "ABORTED" in str(sent.failure) or wrong.append(sent.url))
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield context.new_page()
    context.close()
    assert wrong == []


def test_each_page_fits_each_screen_light_and_dark_and_loads_nothing_from_elsewhere(page):
    wider = []
    for path in PAGES:
        page.goto(path.as_uri())
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_selector(f"body[data-md-color-scheme={SCHEMES[scheme]}]", state="attached")
            if not page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
                wider.append(path.name)
    assert wider == []


def test_search_finds_a_page_without_a_server(page):
    page.goto((SITE / "index.html").as_uri())
    page.keyboard.press("/")
    page.locator("input.md-search__input").press_sequentially("straggler")
    found = page.locator("a.md-search-result__link").first
    found.wait_for(timeout=60_000)
    found.click()
    page.wait_for_url(re.compile(r"h=straggler"))


def test_each_link_leads_to_a_page_and_each_anchor_to_a_heading():
    """All that the HTML links to: generated pages, navigation and the gallery too."""
    texts = {path: path.read_text(encoding="utf-8") for path in SITE.rglob("*.html")}
    ids = {path: set(re.findall(r'\b(?:id|name)="?([^"\s>]+)', text)) for path, text in texts.items()}
    broken, anchors = [], 0
    for path in PAGES:
        for link in re.findall(r'\b(?:href|src)="?([^"\s>]+)', texts[path]):
            to, anchor = urldefrag(urljoin(path.as_uri(), link))
            target = Path(unquote(to.removeprefix("file://")))
            if not to.startswith("file:") or not link.strip("#"):
                continue
            anchors += bool(anchor)
            if not target.is_file() or (anchor and anchor not in ids.get(target, ())):
                broken.append(f"{path.name}: {link}")
    assert broken == []
    assert anchors > 1000


@pytest.mark.parametrize(
    ("page", "what"),
    [
        ("cli", [f'id="sftriage-{entry.name.replace(" ", "-")}"' for entry in COMMANDS]),
        ("policy", ["overhead_budget", "How often chance alone"]),
        ("metrics", ["sftriage_suspect_gain_seconds"]),
        ("events", ["WindowJudged", "DifferencesFound"]),
        ("manifest", ["sha256"]),
        ("api", ["SyntheticJob", "Monitor", "log_verdicts"]),
    ],
)
def test_a_reference_page_has_what_the_code_has(page, what):
    text = (SITE / "reference" / f"{page}.html").read_text(encoding="utf-8")
    assert [one for one in what if one not in text] == []
