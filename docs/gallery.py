"""Makes docs/gallery.md: runs real jobs with a fault, writes their reports, and takes a picture of each.

`make gallery` runs it: as root, because one job is on three hosts, made of network namespaces.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from playwright.sync_api import Page, sync_playwright

from sftriage import __version__
from tests.integration.conftest import own_environment
from tests.integration.namespaces import hosts_of
from tests.integration.processes import DEADLINE_S, JOBS, ROOT, output_of, wait_until
from tests.integration.runs import verdicts

PAGE, FOLDER = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
REPORT_BYTES, PICTURE_BYTES = 1_000_000, 100_000
SIZE = {"width": 960, "height": 720}


class Exhibit(NamedTuple):
    """A report: the name of its files, a title, what was started and what was wrong, and what runs the job."""

    name: str
    title: str
    command: str
    fault: str
    run: Callable[[Path], None]


def demo(*options: str) -> Callable[[Path], None]:
    """Runs the demo in a folder, as its run ``run``."""

    def run(folder: Path) -> None:
        command = (sys.executable, "-m", "sftriage", "demo", *options, "--out", folder / "run")
        output_of(*command, env=own_environment(folder), cwd=folder)

    return run


def slow_link(folder: Path) -> None:
    """A job on three hosts, one of which sends at 200 Mbit/s, until eight windows show it."""
    run, release = folder / "run", folder / "release"
    (folder / "policy.yaml").write_text((ROOT / "policies" / "default.yaml").read_text())
    with hosts_of(3) as hosts:
        hosts.limit(1, "200mbit")
        options = ("--job-id", "bulk")
        script, environment = (JOBS / "bulk.py", release), own_environment(folder)
        started = hosts.torchrun(folder, environment, options, *script, ranks=1, port=29517)
        journal = run / "decisions.jsonl"
        wait_until(lambda: journal.exists() and sum(one["link"] is not None for one in verdicts(run)) >= 8)
        release.touch()
        for process in started:
            process.wait(DEADLINE_S)


EXHIBITS = (
    Exhibit(
        "slow-data",
        "One rank's dataset waits for storage",
        "sftriage demo --cause slow-dataset:2",
        "From step 120 on, the dataset of rank 2 sleeps in each batch.",
        demo("--cause", "slow-dataset:2"),
    ),
    Exhibit(
        "slow-compute",
        "One rank computes more",
        "sftriage demo --cause extra-operator:1",
        "From step 120 on, the model of rank 1 runs an extra operator.",
        demo("--cause", "extra-operator:1"),
    ),
    Exhibit(
        "hang",
        "A job hangs",
        "sftriage demo --cause hang-collective:1",
        "In an evaluation, rank 1 calls another collective than the other ranks.",
        demo("--cause", "hang-collective:1"),
    ),
    Exhibit(
        "slow-link",
        "One host's link is slow",
        "sftriage run --job-id bulk --hub 10.97.0.1 -- torchrun --nnodes 3 --nproc-per-node 1 bulk.py",
        "Three hosts, which are network namespaces; node-b sends at 200 Mbit/s, by `tc`.",
        slow_link,
    ),
)


def main(names: list[str]) -> None:
    """Make the exhibits of these names, or all."""
    FOLDER.mkdir(exist_ok=True)
    with browser_page() as page:
        for exhibit in EXHIBITS:
            if not names or exhibit.name in names:
                with tempfile.TemporaryDirectory() as folder:
                    exhibit.run(Path(folder))
                    report, picture = (FOLDER / f"{exhibit.name}.{kind}" for kind in ("html", "jpg"))
                    words = (sys.executable, "-m", "sftriage", "report", "run", "-o", report, "--force")
                    output_of(*words, cwd=folder)
                page.goto(report.as_uri())
                page.screenshot(path=picture, type="jpeg", quality=70)
                if report.stat().st_size > REPORT_BYTES or picture.stat().st_size > PICTURE_BYTES:
                    sys.exit(f"{report}, {picture}: too large to keep")
    PAGE.write_text(text(), encoding="utf-8")


@contextmanager
def browser_page() -> Iterator[Page]:
    """A page of a browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser.new_page(viewport=SIZE)
        browser.close()


def text() -> str:
    """The page."""
    python, cores = platform.python_version(), os.cpu_count()
    lines = [
        "# Gallery",
        "",
        f"Reports of real jobs with a fault, as `sftriage report` of version {__version__} wrote them. `make gallery`",
        f"runs the jobs and writes this page; here on {cores} cores without a GPU, under Python {python} and torch",
        f"{torch.__version__}. Each picture leads to its report.",
    ]
    for exhibit in EXHIBITS:
        picture = f"gallery/{exhibit.name}.jpg"
        lines += ["", f"## {exhibit.title}", "", exhibit.fault, "", "```", exhibit.command, "```", ""]
        lines += [f"[![The report]({picture})](gallery/{exhibit.name}.html)"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
