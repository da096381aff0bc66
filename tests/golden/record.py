"""The golden record: what users and programs get from made-up runs, compared with the texts in ``recorded/``.

``make golden`` prints a unified diff of each text that differs and exits 1; ``make golden-accept`` records what there
is now, for a change that is meant: read what ``git diff tests/golden/recorded`` shows before you commit it.

The runs are made in `runs`, from fixed seeds, by the code of today: step logs, and a real controller over them.
Commands run in this process, with the clock standing still.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

REPO = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded")
WIDTH = 170
INLINE = "td|th|dt|dd|span|a|title|code|strong|label|input|button|rect|path|div"
"""Elements that begin no line."""
MOST = 12
"""Elements of a list that are shown: of a longer one the first, the middle and the last."""
READ = """
    decisions --run RUN
    watch --run RUN --once
    explain 60 --run RUN
    explain 200 --run RUN
    advise RUN --gradients 100MB --bandwidth 1
    whatif RUN
    report RUN --format md
    traces list --run RUN
    traces for-step 122 --run RUN
    traces for-step 150 --run RUN
    analyze RUN
    reduce TRACE --against RUN
""".strip().splitlines()
OF_CAPTURES = """
    traces show CAPTURE --run RUN
    traces get CAPTURE --all --out got-CAPTURE --run RUN
    report CAPTURE --run RUN --format md
    traces prune --run RUN --age 10m --dry-run
""".strip().splitlines()
"""Commands that only read, of a run and of each of its captures."""
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{5,}(?:e-?\d+)?(?![\w.])")
"""Where machines may differ in the last digits of a sum."""


def main() -> int:
    """Compare with what is recorded, or record it."""
    # (a program that is a module of a package calls itself so in its help)
    sys.modules["__main__"].__package__ = None
    os.environ.update(COLUMNS="100", TZ="UTC", NO_COLOR="1", TERM="dumb", LC_ALL="C.UTF-8")
    time.tzset()
    with tempfile.TemporaryDirectory(prefix="golden-") as made, chdir(made):
        root = Path(made).resolve()
        os.environ.update(XDG_STATE_HOME=str(root / "state"), XDG_CACHE_HOME=str(root / "cache"), HOME=str(root))
        os.environ.update(KUBECONFIG=str(root / "kubeconfig"), KUBERNETES_SERVICE_HOST="")
        texts = {name: normal(text, root) for name, text in record(root)}
    with tempfile.TemporaryDirectory(prefix="now-") as made:
        into = RECORDED if "--accept" in sys.argv else Path(made)
        for path in into.glob("*.txt"):
            path.unlink()
        for name, text in texts.items():
            (into / name).write_text(text, encoding="utf-8")
        differ = subprocess.run(["diff", "-ruN", RECORDED, into]).returncode
    said = "they differ; if that is meant: make golden-accept" if differ else f"{len(texts)} texts are as recorded"
    sys.stdout.write(f"golden: {said}\n")
    return differ


def normal(text: str, root: Path) -> str:
    """A text without what differs between machines, and versions of what is around us."""
    import sftriage

    text = text.replace(str(root), "$ROOT").replace(str(REPO), "$REPO").replace(sys.prefix, "$VENV")
    text = text.replace(sftriage.__version__, "$VERSION")
    text = re.sub(r"\b[0-9a-f]{64}\b", "$SHA256", text)
    text = NUMBER.sub(lambda found: f"{rounded(found[0])}", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


# What there is to record.


def record(root: Path) -> Iterator[tuple[str, str]]:
    """Every text by its name."""
    from tests.golden import clusters, runs, said, states

    with mock.patch("time.time", return_value=runs.NOW_S):
        yield "help.txt", "\n".join(helps(()))
        watched: dict[str, list[Any]] = {}
        for make in (runs.slow, runs.hosts, runs.device):
            name = make.__name__
            watched[name] = []
            made = make(root / name, watched[name].append)
            yield f"run-{name}.txt", "\n".join(texts_of(made))
            yield f"run-{name}-json.txt", "\n".join(texts_of(made, as_json=True))
            yield f"journal-{name}.txt", journal(made)
            newest = sorted((root / name).glob("captures/*/manifest.json"))[-1]
            yield f"manifest-{name}.txt", fitted(json.loads(newest.read_text(encoding="utf-8")))
        yield from pages(root)
        yield "states.txt", "\n".join(states.told(root / "states"))
        yield "queries.txt", "\n".join(states.queried(root))
        newest = min(root.glob("slow/captures/*/trace.json.gz"))
        yield "refused.txt", "\n".join(said.refused(root, newest, sftriage))
        yield "sentences.txt", "\n".join(said.sentences())
        yield from sinks(watched)
        yield "windows.txt", "\n".join(windows(root))
        yield "policies.txt", "\n".join(policies(root))
        yield "kube.txt", "\n".join(kube())
        yield "clusters.txt", "\n".join(clusters.texts())
        yield "assistants.txt", "\n".join(assistants(root))
        yield "explained.txt", "\n".join(said.explained(root, sftriage))
        yield "store.txt", "\n".join(store(root))


def sftriage(*arguments: object, quiet: bool = False) -> str:
    """A command as typed, what it printed, warnings with a ``!`` before, and its exit code if that is not 0."""
    from sftriage.commands import main as command

    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err), mock.patch("sys.argv", ["sftriage", *map(str, arguments)]):
        try:
            command()
        except SystemExit as ended:
            code = ended.code or 0
    if quiet:
        return out.getvalue()
    warned = "".join(f"! {line}\n" for line in err.getvalue().splitlines())
    return f"$ sftriage {' '.join(map(str, arguments))}\n{out.getvalue()}{warned}" + (f"exit {code}\n" if code else "")


def values(text: str) -> str:
    """JSON, one value or one a line, as few lines as it takes without any being long."""
    try:
        return fitted(json.loads(text))
    except ValueError:
        return "\n".join(fitted(json.loads(line)) for line in shown(text.splitlines()) if line[0] != "(")


def fitted(value: Any, indent: int = 0, room: int = WIDTH) -> str:
    """A value on one line where it fits, and otherwise its parts."""
    value = json.loads(json.dumps(value).replace(str(Path.cwd()), "$ROOT"), parse_float=rounded)
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= room or not isinstance(value, dict | list) or not value:
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {fitted(one, indent + 1)}" for name, one in value.items()]
    else:
        parts = [fitted(one, indent + 1) for one in shown(value)]
    lines, line = list[str](), ""
    for part in parts:
        # As many short parts on a line as fit.
        if line and ("\n" in part or len(line) + len(part) + 2 + indent > room):
            lines, line = [*lines, line], ""
        line = f"{line}, {part}" if line else part
        if "\n" in part:
            lines, line = [*lines, line], ""
    opens, closes = "{}" if isinstance(value, dict) else "[]"
    pad = " " * (indent + 1)
    return opens + f",\n{pad}".join([*lines, line] if line else lines) + closes


def rounded(text: str) -> float:
    """A number without digits in which machines differ; of moments, milliseconds."""
    return round(float(text), 3) if abs(float(text)) > 1e6 else float(f"{float(text):.6g}")


def shown(several: list[Any]) -> list[Any]:
    """Of many values some."""
    n = len(several)
    return several if n <= MOST else [several[0], several[n // 2], several[-1], f"({n} in all)"]


def helps(path: tuple[str, ...]) -> Iterator[str]:
    text = sftriage(*path, "--help")
    yield re.sub(r"\n\n|\n  -h, --help .*\n", "\n", text)
    _, _, listed = text.partition("\nCommands:\n")
    for name in re.findall(r"^  (\S+)", listed, re.M):
        yield from helps((*path, name))


def texts_of(made: Any, *, as_json: bool = False) -> Iterator[str]:
    """What the commands that only read print of a run, or as JSON; of one run all that they can."""
    directory = made.directory.path
    commands = READ if directory.name == "slow" or not as_json else READ[:4]
    for capture in sorted(path.parent.name for path in directory.glob("captures/*/manifest.json")):
        if directory.name == "slow":
            commands = [*commands, *(one.replace("CAPTURE", capture) for one in OF_CAPTURES)]
    for one in commands:
        trace = next(directory.glob("captures/*/trace.json.gz"), None)
        if trace is None and "TRACE" in one:
            continue
        line = one.replace("RUN", directory.name).replace("TRACE", str(trace and trace.relative_to(Path.cwd())))
        if not as_json:
            yield sftriage(*line.split())
        elif not re.search(r"--format|--out|prune", line):
            yield f"$ sftriage {line} --json\n" + values(sftriage(*line.split(), "--json", quiet=True))


def journal(made: Any) -> str:
    """The journal, an event a line, of its windows those where something was decided or has changed."""
    lines, before = list[str](), ""
    for line in made.directory.decisions.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["type"] == "window":
            decision = event["decision"]
            now = f"{decision['label']} {decision['outcome']} {decision['reason']}"
            if now == before:
                lines.append(f"window {decision['first_step']} to {decision['last_step']}: the same")
                continue
            before = now
        lines.append(fitted(event))
    return "\n".join(lines)


def pages(root: Path) -> Iterator[tuple[str, str]]:
    from sftriage.runs.directory import RunDirectory
    from sftriage.runs.source import RunSource
    from sftriage.web import run_page
    from sftriage.web.run_page import RunPage
    from sftriage.web.serving import Access
    from tests.golden.runs import NOW_S
    from tests.unit.web.client import fetch, readable
    from tests.unit.web.stored import shelf_at

    access = Access.to("127.0.0.1", None, "")
    # (a machine that is busy may take longer to draw a map than a page waits for it)
    run_page.HEAT_PATIENCE_S = 60.0

    def html(app: Any, target: str) -> str:
        text = re.sub(r"((?:\?|&amp;)v=|data-version=\")[\w-]+", r"\1$VERSION", fetch(app, target).text)
        text = re.sub(r"\s*\n\s*", "\n", text)
        # (what a script draws: its beginning will do)
        text = re.sub(r'(="\[[^"]{300})[^"]*', r"\1...", text)
        return re.sub(rf"\n(?=</|<(?:{INLINE})\b|[^<])", " ", text)

    def app(name: str) -> Any:
        return RunPage(RunSource(lambda: RunDirectory(root / name)), access, lambda: NOW_S).app

    slow, hosts = app("slow"), app("hosts")
    (capture,) = (root / "slow").glob("captures/w*")
    yield "page-overview.txt", html(slow, "/")
    yield "page-hosts.txt", html(hosts, "/?last=100")
    yield "page-decisions.txt", html(hosts, "/decisions")
    yield "page-capture.txt", html(slow, f"/captures/{capture.name}")
    yield "page-whatif.txt", html(slow, "/whatif")
    sftriage("traces", "upload", "--run", "slow", "--store", root / "share")
    shelf = shelf_at(root / "share", root / "catalogue.db")
    shelf.look()
    yield "page-store.txt", html(shelf.app, "/")
    asked = ("slow",), (capture.name, "--run", "slow")
    reports = (sftriage("report", *of, "--format", "html", quiet=True).replace(str(root), "$ROOT") for of in asked)
    yield "reports.txt", "\n\n".join("\n".join(readable(one)) for one in reports)


def sinks(watched: dict[str, list[Any]]) -> Iterator[tuple[str, str]]:
    """What subscribers make of the runs: the terminal, metrics, spans, webhooks."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from prometheus_client import generate_latest
    from rich.console import Console

    from sftriage.model.events import CauseFound, JobObserved, RemedyChanged, WindowJudged
    from sftriage.model.windows import ReadCounts
    from sftriage.sinks.metrics import Metrics
    from sftriage.sinks.spans import SpanSink
    from sftriage.sinks.terminal import Reporter
    from sftriage.sinks.webhooks import decided, explained, remedied
    from tests.golden.runs import NOW_S, T0_S

    printed, bodies, exposed = io.StringIO(), list[str](), list[str]()
    for name, events in watched.items():
        printed.write(f"# {name}\n")
        reporter = Reporter(Console(file=printed, width=100))
        metrics = Metrics("resnet", name, T0_S, per_rank=True)
        decision, spans = None, InMemorySpanExporter()
        tracing = SpanSink(lambda to=spans: SimpleSpanProcessor(to), "resnet", name, T0_S)
        tracing.start()
        for one in [*events, JobObserved(NOW_S, ReadCounts(4000, 3, 1), None, 0.5, 30.0, {("rank 1", "data"): 29.0})]:
            for sink in (reporter, metrics, tracing):
                sink.take(one)
            message = None
            if isinstance(one, WindowJudged) and one.decision.requests:
                decision = one.decision
                message = decided(one.verdict, decision)
            elif isinstance(one, CauseFound) and decision is not None:
                message = explained(one, decision)
            elif isinstance(one, RemedyChanged) and decision is not None:
                message = remedied(one, decision)
            if message is not None:
                bodies += [fitted(json.loads(message.event("resnet", name))), message.line("resnet").decode()]
        tracing.close()
        lines = generate_latest(metrics.registry).decode().splitlines()
        exposed += [line for line in lines if line not in exposed and not (exposed and "_bucket{" in line)]
        if name == "slow":
            yield "spans.txt", spans_of(spans.get_finished_spans())
    yield "metrics.txt", "\n".join(exposed)
    yield "terminal.txt", printed.getvalue()
    yield "webhooks.txt", "\n".join(bodies)


def spans_of(spans: Iterable[Any]) -> str:
    """The spans, each with its own and others' ids as numbers."""
    found = [json.loads(one.to_json(indent=None)) for one in spans]
    numbers, resource = dict[str, str](), dict[str, str]()
    for one in found:
        resource = one.pop("resource")["attributes"]
        numbers.setdefault(one["context"]["span_id"], f"span-{len(numbers) + 1}")
    ours = {name: value for name, value in resource.items() if name in ("service.name", "sftriage.job", "sftriage.run")}
    text = "\n".join(map(fitted, [ours, *found]))
    for span_id, number in numbers.items():
        text = text.replace(span_id, number)
    return text


def windows(root: Path) -> Iterator[str]:
    """Verdicts on windows of twenty jobs of `tests.simulated`: the first with the fault in it, and the last."""
    from sftriage.testing import save
    from tests.simulated.made_up import made_up

    for number in range(20):
        one = made_up(number)
        window = one.job.run(one.fault, *one.others, seed=number, split=one.split)
        save(window, root / "job.npz")
        verdicts = [json.loads(line) for line in sftriage("analyze", "job.npz", "--json", quiet=True).splitlines()]
        onset = next(at for at, verdict in enumerate(verdicts) if verdict["last_step"] >= one.onset + 20)
        yield f"# job {number}: {one.fault.stage} of rank {one.fault.rank}, {one.course} from step {one.onset} on"
        yield fitted({**there(verdicts[onset]), "numbers": len(verdicts[onset]["numbers"])})
        yield fitted(there(verdicts[-1]))
        yield " ".join(verdict["label"] for verdict in verdicts)


def there(value: Any) -> Any:
    """A value without what is null in it."""
    if isinstance(value, dict):
        return {name: there(one) for name, one in value.items() if one is not None}
    return [there(one) for one in value] if isinstance(value, list) else value


def policies(root: Path) -> Iterator[str]:
    """What the policies that ship say, and would have done in the runs."""
    yield sftriage("policy", "list")
    yield sftriage("policy", "validate", "default", "observe-only")
    yield values(sftriage("policy", "schema", quiet=True))
    for path in sorted((REPO / "policies").glob("*.yaml")):
        yield sftriage("policy", "validate", path.stem, "--json")
        if path.stem == "default":
            yield sftriage("policy", "show", path.stem)
        runs = {"default": ("slow", "hosts", "device"), "hang": ("slow", "hosts")}
        for run in runs.get(path.stem, ("slow",)):
            yield sftriage("policy", "test", path.stem, "--on", run)
    yield values(sftriage("policy", "test", "default", "--on", "slow", "--json", quiet=True))


def kube() -> Iterator[str]:
    """Custom resources, and what the webhook makes of jobs."""
    import yaml

    for definition in yaml.safe_load_all(sftriage("kube", "crds", quiet=True)):
        version = definition["spec"]["versions"][0]
        yield f"# {definition['metadata']['name']} {version['name']}"
        yield from fields(version["schema"]["openAPIV3Schema"], "")
    blocks = re.findall(r"```yaml\n(.*?)```", (REPO / "docs/kubernetes.md").read_text(encoding="utf-8"), re.DOTALL)
    Path("job.yaml").write_text(next(one for one in blocks if "kind: Job" in one), encoding="utf-8")
    Path("settings.yaml").write_text(next(one for one in blocks if "pull_policy:" in one), encoding="utf-8")
    sample, documented = ("-f", REPO / "k8s/samples/job.yaml"), ("--settings", "settings.yaml", "-f", "job.yaml")
    for options in (sample, documented):
        yield f"# {' '.join(map(str, options))}"
        yield from map(fitted, yaml.safe_load_all(sftriage("kube", "inject", *options, quiet=True)))


def fields(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Every field of a schema, with what it may be."""
    rules = {name: value for name, value in schema.items() if name not in ("properties", "items", "description")}
    yield f"{path or '.'} {json.dumps(rules)}"
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


def assistants(root: Path) -> Iterator[str]:
    import asyncio

    from mcp.server.mcpserver.exceptions import ToolError

    from sftriage.assistants.answers import Answers, server

    made = server(Answers(root))
    for tool in asyncio.run(made.list_tools()):
        yield fitted(tool.model_dump(exclude_none=True))
    calls: list[tuple[str, dict[str, Any]]] = [
        ("list_runs", {}),
        ("run_health", {"run": "slow"}),
        ("verdicts", {"first_step": 110, "run": "slow"}),
        ("explain_window", {"window": "115", "run": "slow"}),
        ("captures_of_step", {"step": 122, "run": "slow"}),
        ("list_captures", {"run": "slow"}),
        ("capture_findings", {"capture": "w", "run": "slow"}),
        ("whatif", {"run": "slow"}),
        ("advise", {"run": "slow"}),
        ("run_health", {"run": "nowhere"}),
    ]
    for name, about in calls:
        yield f"# {name} {json.dumps(about)}"
        try:
            answer: Any = asyncio.run(made.call_tool(name, about))
        except ToolError as error:
            yield f"! {error}"
            continue
        (content, *_) = getattr(answer, "content", answer)
        text = content.text
        yield values(text) if text.startswith("{") else text


def store(root: Path) -> Iterator[str]:
    shared = root / "share"
    yield sftriage("traces", "upload", "--run", "slow", "--store", shared)
    yield sftriage("traces", "list", "--store", shared)
    yield values(sftriage("traces", "list", "--store", shared, "--json", quiet=True))
    yield sftriage("traces", "reindex", "--run", "slow")
    yield sftriage("traces", "pin", "w70", "--run", "slow")
    yield sftriage("traces", "unpin", "w70", "--run", "slow")
    yield values(sftriage("traces", "schema", quiet=True))
    yield " ".join(one["what"] for one in json.loads(sftriage("doctor", "--json", quiet=True)))


if __name__ == "__main__":
    sys.exit(main())
