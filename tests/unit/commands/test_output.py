"""Progress is for a person who looks on, and for nobody else."""

import io

import pytest
from rich.console import Console

from sftriage.commands import output
from sftriage.reports.tables import titled


@pytest.fixture
def shown(monkeypatch):
    """What is shown on a terminal."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    monkeypatch.setattr(output, "notices", lambda: console)
    return file


def test_a_copy_shows_how_far_it_is(shown):
    with output.copying("trace.json.gz", 4096) as progress:
        progress(1024)
        progress(4096)
    assert "trace.json.gz" in shown.getvalue()
    assert "4.0/4.0 KiB" in shown.getvalue()


def test_manifests_are_counted(shown):
    with output.counting("Reading manifests") as progress:
        progress(1, 3)
        progress(3, 3)
    assert "Reading manifests" in shown.getvalue()
    assert "3/3" in shown.getvalue()


def test_where_nobody_looks_on_nothing_is_shown(capsys):
    with output.copying("trace.json.gz", 4096) as copied, output.counting("Reading manifests") as counted:
        copied(4096)
        counted(1, 1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "odd", ["log (train.py:100: x[i])", "a :warning: [bold]b[/bold]", "[/] :x: [link=y]z", "\\[red]"]
)
def test_text_from_outside_is_neither_markup_nor_emoji_in_lines_and_tables(capsys, monkeypatch, odd):
    monkeypatch.setenv("COLUMNS", "200")
    output.write(odd)
    output.tell(odd)
    output.lists().print(titled(odd, [odd]), odd)
    table = titled("cells", ["name"])
    table.add_row(odd)
    output.lists().print(table)
    written = capsys.readouterr()
    assert (written.out.count(odd), written.err.count(odd)) == (5, 1)
