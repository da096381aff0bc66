"""Checks that the tree does not grow back: `python -m tests.house [--lower]`.

Counts the lines of each package, public class names of `sftriage/` that occur twice, and words that plain English does
without, and fails where a count is over its budget in `house_budgets.toml`. Budgets only go down: ``--lower`` sets each
to today's count where that is less. A commit that moves lines from one package to another moves their budget too.
Mechanisms outside `sftriage/base/` fail as well: see `house_mechanisms`.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests import house_mechanisms

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_name("house_budgets.toml")
HEADINGS = {
    "lines": "Lines of a package.",
    "classes": "Places in which a public class name occurs, where it is more than one: none should.",
    "words": "Words of a package that plain English does without: house.md, section 7.",
}
TOPS = ("sftriage", "tests", "bench")
WORDS = (
    *(
        "told",
        "said",
        "ask",
        "asks",
        "asked",
        "asking",
        "seen",
        "lane",
        "nobody",
        "somebody",
        "whom",
        "so many",
        "so long",
    ),
    *("waited for", "gone on with", "goes on with", "looked at", "comes to nothing", "came to nothing"),
)
_ANY = "|".join(f"[{word[0]}{word[0].upper()}]{word[1:]}".replace(" ", "[ _]") for word in WORDS)
_WORD = re.compile(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?:{_ANY})(?![a-z])")
"""A word begins after anything but a letter, or as the next part of a CamelCase name."""

MAX_LINES, MAX_PARAMETERS = 60, 8
LARGE = {
    ("trainer/monitor.py", "__init__"): "users give its arguments by name",
}
"""Functions that are longer, or have more parameters, and why. Parameters of commands are their options."""

Counts = dict[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower budgets to today's counts")
    options = parser.parse_args()
    counted, budgets = count(), tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    if options.lower:
        budgets = lowered(counted, budgets)
        BUDGETS.write_text(written(budgets), encoding="utf-8")
    sys.stdout.write("\n".join(report(counted, budgets)) + "\n")
    over = [*excesses(counted, budgets), *large_functions(), *house_mechanisms.mistakes()]
    for line in over:
        sys.stderr.write(f"house: {line}\n")
    return int(bool(over))


def count() -> dict[str, Counts]:
    """What there is today."""
    lines, words, classes = Counter[str](), Counter[str](), defaultdict[str, set[str]](set)
    for path in files():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        package = package_of(name)
        lines[package] += text.count("\n")
        if not name.startswith("tests/"):
            words[package] += len(_WORD.findall(text))
        if name.startswith("sftriage/"):
            for part in ast.parse(text).body:
                if isinstance(part, ast.ClassDef) and not part.name.startswith("_"):
                    classes[part.name].add(name)
    for top in TOPS:
        lines[f"{top} in all"] = sum(times for package, times in lines.items() if package.split("/")[0] == top)
    twice = {name: len(places) for name, places in classes.items() if len(places) > 1}
    return {"lines": dict(lines), "classes": twice, "words": dict(words)}


def large_functions() -> Iterator[str]:
    for path in sorted((ROOT / "sftriage").rglob("*.py")):
        name = path.relative_to(ROOT / "sftriage").as_posix()
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and (name, part.name) not in LARGE:
                lines = (part.end_lineno or 0) - part.lineno + 1
                listed = [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]
                parameters = len([one for one in listed if one.arg not in ("self", "cls")])
                if lines > MAX_LINES or (parameters > MAX_PARAMETERS and not name.startswith("commands/")):
                    yield f"sftriage/{name}:{part.lineno}: {part.name} has {lines} lines and {parameters} parameters"


def files() -> Iterator[Path]:
    """The Python files of the tree that git has, or would add."""
    command = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "sftriage/*.py",
        "tests/*.py",
        "bench/*.py",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    yield from (path for path in (ROOT / name for name in sorted(set(listed))) if path.exists())


def package_of(name: str) -> str:
    """The package of a file: a folder of the first level, and of ``tests/unit/`` of the second."""
    *folders, _ = name.split("/")
    if folders[0] == "bench":
        return "bench"
    return "/".join(folders[: 3 if folders[:2] == ["tests", "unit"] else 2])


def lowered(counted: dict[str, Counts], budgets: dict[str, Counts]) -> dict[str, Counts]:
    """Each budget, or today's count where that is less; what is gone has none."""
    return {
        kind: {name: min(most, counted[kind][name]) for name, most in of.items() if counted[kind].get(name)}
        for kind, of in budgets.items()
    }


def written(budgets: dict[str, Counts]) -> str:
    lines = ["# Budgets of tests/house.py. They only go down: `python -m tests.house --lower`."]
    for kind, heading in HEADINGS.items():
        lines += ["", f"# {heading}", f"[{kind}]"]
        lines += [f'"{name}" = {most}' for name, most in sorted(budgets[kind].items())]
    return "\n".join(lines) + "\n"


def report(counted: dict[str, Counts], budgets: dict[str, Counts]) -> Iterator[str]:
    """Lines and words of each package beside their budgets, and the sums."""
    yield f"{'package':28}{'lines':>8}{'budget':>8}{'words':>8}{'budget':>8}"
    lines, words = counted["lines"], counted["words"]
    for top in TOPS:
        packages = sorted(package for package in lines if package.split("/")[0] == top)
        for package in (*packages, f"{top} in all") if len(packages) > 1 else packages:
            figures = (lines[package], budgets["lines"].get(package), words.get(package), budgets["words"].get(package))
            yield f"{package:28}" + "".join(f"{'' if figure is None else figure:>8}" for figure in figures)
    yield f"public class names that occur twice: {len(counted['classes'])}"


def excesses(counted: dict[str, Counts], budgets: dict[str, Counts]) -> Iterator[str]:
    """What is over its budget."""
    for kind, of in counted.items():
        for name, times in sorted(of.items()):
            if times > (most := budgets[kind].get(name, 0)):
                yield f"{kind}: {name}: {times}, where {most} is the most"


if __name__ == "__main__":
    sys.exit(main())
