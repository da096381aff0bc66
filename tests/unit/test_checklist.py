"""What README's tree, a heading of docs/ or --help names is in the golden checklist, with what shows that it works."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


def listed() -> list[tuple[str, list[str]]]:
    """All that the checklist has, and what shows it; of options each with each command."""
    found: list[tuple[str, list[str]]] = []
    for line in (GOLDEN / "checklist.txt").read_text(encoding="utf-8").splitlines():
        whats, bar, shown = line.partition(" | ")
        if line.startswith("--"):
            options, _, commands = whats.partition(" of ")
            names = [f"{option} of {command}" for option in options.split(", ") for command in commands.split(", ")]
        else:
            names = [whats] if bar else []
        found += [(name, shown.split()) for name in names]
    return found


def named() -> list[str]:
    """All that there is, as the checklist names it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"## Where things are\n\n```\nsftriage/\n(.*?)```", readme, re.DOTALL)
    assert tree is not None
    lines = re.findall(r"^( *)(\S+)", tree[1], re.MULTILINE)
    found = [f"README {'sftriage/' if indent else ''}{name}" for indent, name in lines]
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        found += [f"docs/{page.name} {heading}" for heading in re.findall(r"^#+ .*", text, re.MULTILINE)]
    helps = (GOLDEN / "recorded" / "help.txt").read_text(encoding="utf-8").split("$ sftriage ")[1:]
    for text in helps:
        command = text.partition("--help")[0].strip() or "sftriage"
        options = dict.fromkeys(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))
        found += [f"{option} of {command}" for option in options if option != "--help"]
    return found


def test_everything_is_in_the_checklist_once():
    whats = [what for what, _ in listed()]
    assert [what for what, times in Counter(whats).items() if times > 1] == []
    assert sorted(set(named()) - set(whats)) == []
    assert sorted(set(whats) - set(named())) == []


def test_what_shows_it_is_there():
    wrong = []
    for reference in sorted({one for _, shown in listed() for one in shown}):
        path, _, name = reference.partition("::")
        file = ROOT / path
        if not file.is_file() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
            wrong.append(reference)
    assert wrong == []
