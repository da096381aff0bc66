"""Mechanisms have one home, sftriage/base: `make house` names each use elsewhere and fails."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "sftriage"

MECHANISMS = {
    "thread": "base.loops.Loop or start_thread",
    "lock": "base.process.locked",
    "temporary": "base.files.replacing",
    "rename": "base.files.replacing or write_atomically",
    "retry": "base.loops.Loop and Backoff",
}
"""What to use in place of each."""

_NATS = "a coroutine in the event loop of the hub's connection"
EXCEPTIONS = {
    ("agent/nsys.py", "rename"): "nsys wrote the file",
    ("agent/nsys_rank.py", "rename"): "a script that runs without sftriage; nsys wrote the file",
    ("agent/executor.py", "rename"): "the copy is written while the trace is read, and often dropped",
    ("agent/stacks.py", "retry"): "each of three tries reads the stacks in another way; none is repeated",
    ("demo/train.py", "thread"): "the demo's training script has threads as the field writes them",
    ("trainer/session.py", "rename"): "torch wrote the file",
    ("trainer/layout.py", "lock"): "a ring's record lock shows through PID namespaces, and forked children lack it",
    ("trainer/layout.py", "rename"): "a ring is allocated and locked before it has its name",
    ("runs/journal.py", "rename"): "the journal goes on with the descriptor that it has written",
    ("runtime/hub_server.py", "rename"): "the first of several hosts makes the secret; it appears once the hub answers",
    ("traces/catalogue.py", "rename"): "puts a damaged file aside",
    ("traces/store.py", "rename"): "of directories",
    **{(f"fleet/{n}.py", "retry"): _NATS for n in ("hub", "incoming", "over_nats", "shipping", "transfers")},
}
"""Uses that stay where they are, and why."""


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines that use a mechanism, and which."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func, args=args, keywords=keywords):
                name = ast.unparse(func).rpartition(".")[2]
                of = ast.unparse(func).rpartition(".")[0]
                if name == "Thread":
                    yield node.lineno, "thread"
                elif name in ("flock", "lockf"):
                    yield node.lineno, "lock"
                elif name in ("mkstemp", "NamedTemporaryFile"):
                    yield node.lineno, "temporary"
                # (a text's `replace` takes two)
                elif name in ("replace", "rename", "link") and not keywords and (of == "os" or (of and len(args) == 1)):
                    yield node.lineno, "rename"
            case ast.ClassDef(bases=bases) if any(ast.unparse(one).endswith("Thread") for one in bases):
                yield node.lineno, "thread"
            case ast.While() | ast.For() if _retries(node):
                yield node.lineno, "retry"


def _retries(loop: ast.While | ast.For) -> bool:
    """Whether a loop goes on after an exception, and waits."""
    inside = list(_own(loop))
    catches = any(isinstance(one, ast.ExceptHandler) and not _leaves(one) for one in inside)
    calls = (ast.unparse(one.func).rpartition(".")[2] for one in inside if isinstance(one, ast.Call))
    return catches and any(name in ("sleep", "wait") for name in calls)


def _own(loop: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(loop):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own(child)


def _leaves(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise | ast.Return | ast.Break)


def found() -> dict[tuple[str, str], list[int]]:
    """The uses outside base, by file and mechanism."""
    lines: dict[tuple[str, str], list[int]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        if not where.startswith("base/"):
            for line, mechanism in uses(ast.parse(path.read_text(encoding="utf-8"))):
                lines.setdefault((where, mechanism), []).append(line)
    return lines


def mistakes() -> Iterator[str]:
    """What is to be mended, a line each."""
    seen = found()
    for (where, mechanism), lines in seen.items():
        if (where, mechanism) not in EXCEPTIONS:
            at = ", ".join(map(str, lines))
            yield f"sftriage/{where}:{at}: {mechanism}: use sftriage.{MECHANISMS[mechanism]}"
    for where, mechanism in EXCEPTIONS.keys() - seen.keys():
        yield f"sftriage/{where}: no {mechanism} any more: remove its exception from tests/house_mechanisms.py"
