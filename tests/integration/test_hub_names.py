"""Names that are hostile as paths, on a hub and on a terminal, all the way from a host to what is read."""

import urllib.request

import pytest

from sftriage.runs.recordings import load_recording
from sftriage.runtime.hosting import file_name
from sftriage.windows.gather import Shape
from tests.integration.hubs import Hosts
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.runs import captures

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
ESCAPES = "\x1b[31m\x1b]0;owned\x07\r\n\u202e\u2066<script>"
JOB_ID = f"../../x.*.> {ESCAPES}"
JOB = f"'\"{{{ESCAPES}{'long' * 2500}"
NAMES = (f"*.> host {ESCAPES}".replace("/", ""), "../../host-1 " + "long" * 2500)


class HostileHosts(Hosts):
    """Two hosts of a job, with everything called what nothing should be called."""

    def host(self, number):
        # (what the trainers say that their host is called, by the name of this directory)
        return self.directory / (f"host-{number}{ESCAPES}" if number else "...")

    def train(self, *numbers):
        for number in numbers:
            spool = self.place / "sftriage-runs" / f"{file_name(JOB_ID)}.hosts" / file_name(NAMES[number]) / "spool"
            spool.mkdir(parents=True, exist_ok=True)
            self.host(number).mkdir()
            (self.host(number) / "spool").symlink_to(spool)
        super().train(*numbers)

    @property
    def place(self):
        return self.directory / "work" / "here"

    @property
    def where(self):
        return "--job-id", JOB_ID, "--job", JOB, *super().where[2:]

    def start(self, *command):
        self.place.mkdir(parents=True, exist_ok=True)
        return super().start("env", "-C", self.place, *command)

    def start_controller(self, *options):
        return super().start_controller(
            *options, "--metrics-file", self.directory / "metrics.prom", "--metrics-per-rank"
        )

    def start_agent(self, number):
        return self.sftriage("agent", "--rings", self.host(number) / "rings", "--name", NAMES[number])


def harmless(text):
    """Nothing in it moves a cursor, turns a line around, or is more than a person reads."""
    assert all(line.isprintable() for line in text.split("\n"))
    assert "long" * 500 not in text


def test_no_name_leaves_its_place_or_reaches_a_terminal_as_it_is(tmp_path, environment, sftriage, serve, caplog):
    # GIVEN a job on two hosts, and a job id, a name, and names of hosts that are hostile
    hosts = HostileHosts(tmp_path, environment)
    try:
        # WHEN it is judged, and its slow rank captured, to its end
        wait_until(lambda: (hosts.run / "captures").is_dir() and captures(hosts.run), 90.0)
        steps = hosts.end()
    finally:
        hosts.close()
    (window,) = load_recording(hosts.run).windows(Shape(steps, steps, 0))
    assert len(set(window.hosts)) == 2
    # THEN nothing is anywhere but in its place, under names that are none of these
    place = hosts.place / "sftriage-runs"
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    ours = [path for path in made if path.parts[0] not in (hosts.host(0).name, hosts.host(1).name)]
    assert all(part.isascii() and part.isprintable() and len(part) < 120 for path in ours for part in path.parts)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["here"]
    assert [path.name for path in place.parent.iterdir()] == ["sftriage-runs"]
    assert len(list(next(place.glob("*.hosts")).iterdir())) == 2
    # AND no escape has come to a terminal, nor to what is read later
    harmless((tmp_path / "said").read_text(encoding="utf-8"))
    harmless((tmp_path / "metrics.prom").read_text(encoding="utf-8"))
    (capture,) = captures(hosts.run)
    looking = ("watch --once", "decisions", "traces list", f"explain {capture.capture_id}", "report --format md")
    for command in (*looking, f"traces show {capture.capture_id}"):
        code, said, problem = sftriage(*command.split(), "--run", hosts.run)
        assert code == 0, problem
        harmless(said + problem)
    harmless(caplog.text)
    # AND a page shows names as text
    _, url = serve("--run", hosts.run)
    page = urllib.request.urlopen(url, timeout=DEADLINE_S).read().decode()
    harmless(page)
    assert "??<script>" not in page
