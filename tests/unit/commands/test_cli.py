"""The command line as a whole: what each command says of itself, and that what it names is there."""

import re
import shlex

import pytest

from sftriage.commands.cli import CONTENTS, Command, Entry, Section, command_line

ENTRIES = [
    (f"{one.name} {entry.name}" if isinstance(one, Section) else entry.name, entry)
    for one in CONTENTS
    for entry in (one.entries if isinstance(one, Section) else (one,))
]
NAMES = [name for name, _ in ENTRIES]


def test_a_list_of_commands_has_a_line_for_each(sftriage, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command, listed in (
        ([], CONTENTS),
        *(([one.name], one.entries) for one in CONTENTS if isinstance(one, Section)),
    ):
        outcome = sftriage(*command, "--help")
        assert outcome.code == 0
        lines = outcome.out.splitlines()
        for one in listed:
            assert [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"  {one.name} ")] == [one.summary]
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_each_command_explains_itself_in_80_columns(sftriage, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = sftriage(*name.split(), "-h")
    assert (outcome.code, outcome.err) == (0, "")
    described, _, examples = outcome.out.partition("For example:")
    # THEN nothing is cut off, an option says by a name what it takes, and a flag that it takes nothing
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert name == "reduce" or not re.search(r"<(bool|str|int|float|path|list|datetime)\b", described)
    # AND every option is explained
    assert not re.search(r"^  -\S+( \S+)?\n  -", described, re.MULTILINE)
    assert examples.strip().startswith("sftriage ")


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=NAMES)
def test_each_example_is_a_command_that_there_is(name: str, entry: Entry):
    for example in entry.examples:
        words = shlex.split(example.partition(" > ")[0], comments=True)
        assert words[: 1 + len(name.split())] == ["sftriage", *name.split()]
        # Only read, and not run: an option that there is not, or a value that cannot be, is refused by that.
        context = Command(entry).make_context(entry.name, words[1 + len(name.split()) :])
        assert context.command.name == entry.name


def test_every_command_is_in_the_list(sftriage):
    root = command_line()
    assert list(root.commands) == [one.name for one in CONTENTS]
    assert sftriage("--version").out.startswith("sftriage ")
