"""A real browser, and `sftriage ui` for it to show."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs

WIDE = {"width": 1280, "height": 900}
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=60_000)
    with playwright.sync_playwright() as started:
        # (a container's root has no sandbox to put it into)
        browser = started.chromium.launch(executable_path=needs.CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, start) -> Iterator[Any]:
    """A page in which nothing may go wrong, unless a test says so; it is closed before the server is."""
    context = browser.new_context(viewport=WIDE, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert page.wrong == [], page.wrong


@pytest.fixture
def serve(start) -> Callable[..., tuple[Any, str]]:
    """Start `sftriage ui`; its process, and where its page is."""

    def serve(*arguments: object) -> tuple[Any, str]:
        process = start("ui", "--json", *arguments)
        return process, json.loads(process.stdout.readline())["url"]

    return serve


def live(page: Any, url: str = "") -> None:
    """Wait until the page, at a URL if there is one, hears from the server."""
    if url:
        page.goto(url)
    page.wait_for_selector('#link[data-state="on"]')


def downloaded(page: Any, folder: Path) -> Path:
    """The trace that the page offers, under the name that the browser gives it."""
    with page.expect_download() as download:
        page.click("text=Download trace.json.gz")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def fits_and_can_be_read(page: Any) -> bool:
    """Nothing is wider than the screen, and every text stands out from its ground (WCAG AA: 4.5, and 3 for large)."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth") and page.evaluate(CONTRASTS) == []


CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 10 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const found = parse(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] > 0.99) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    if (one.closest("svg") || ![...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(parse(style.color)), light(ground(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const which = `${one.className || one.tagName}: ${one.textContent.trim().slice(0, 30)}`;
    if (contrast < (large ? 3 : 4.5)) poor.push(`${which}: ${contrast.toFixed(2)}`);
  }
  return poor;
}"""
