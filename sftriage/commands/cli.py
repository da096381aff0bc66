"""The command line: a table of subcommands, imported when they run, and errors turned into exit codes."""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import gc
import inspect
import logging
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ParameterInfo

from sftriage import __version__
from sftriage.errors import InputError, SftriageError, UsageError

# Plain text: at 80 columns, boxes leave half of a line for the explanation.
_MARKUP = None

READER_GONE = 128 + signal.SIGPIPE
"""Exit status of a command that SIGPIPE ended. The signal itself stays ignored, as is Python's default: a broken
connection would end a job's triage too."""


class ReaderGone(Exception):  # noqa: N818  # not an error: the reader of the results has gone
    """Nothing more is printed: `head` or `less` has closed the pipe."""


@contextlib.contextmanager
def raising_reader_gone() -> Iterator[None]:
    """Raise `ReaderGone` for a broken pipe before typer handles it, which exits with 1 as if something had failed."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Command(TyperCommand):
    """A subcommand whose module is imported when it runs or shows its help."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(name=entry.name, short_help=entry.summary, rich_markup_mode=_MARKUP)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the loaded command, which then runs."""
        return self._loaded.make_context(info_name, args, parent, **extra)

    @cached_property
    def _loaded(self) -> Any:
        entry = self._entry
        module, _, function = entry.home.partition(":")
        # (imports create little garbage, and collecting it takes a sixth of their time)
        gc.disable()
        try:
            home = import_module(f"sftriage.commands.{module}")
        finally:
            gc.enable()
        alone = typer.Typer(add_completion=False, rich_markup_mode=_MARKUP)
        examples = "\b\n" + "\n".join(("For example:", *(f"  {example}" for example in entry.examples)))
        settings = {"allow_interspersed_args": entry.home != "run:run"}
        alone.command(entry.name, epilog=examples, context_settings=settings)(flattened(getattr(home, function)))
        command: Any = typer.main.get_command(alone)
        for argument in command.params:
            if argument.param_type_name == "argument":
                # Its name is enough: `CAPTURE <str>` adds nothing.
                argument.display_type_rich = lambda ctx: None
        return command


class CommandLine(TyperGroup):
    """The whole command line. Help, version and results may go to a closed pipe."""

    make_context = raising_reader_gone()(TyperGroup.make_context)
    invoke = raising_reader_gone()(TyperGroup.invoke)


app = typer.Typer(
    cls=CommandLine,
    help="Names the hidden slow rank and stage of a distributed PyTorch job, and captures a trace of just that.",
    no_args_is_help=True,
    rich_markup_mode=_MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sftriage {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options before the subcommand."""


@cache
def command_line() -> Any:
    """The command line, built once per process; imports only what the subcommand needs."""
    root: Any = typer.main.get_command(app)
    shown: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": _MARKUP}
    for one in CONTENTS:
        if isinstance(one, Section):
            commands: dict[str, Any] = {entry.name: Command(entry) for entry in one.entries}
            root.add_command(TyperGroup(name=one.name, help=one.summary, commands=commands, **shown))
        else:
            root.add_command(Command(one))
    return root


def main() -> None:
    """Run the command line.

    Exit codes: 2 for errors a person can fix (usage, input), 1 for failures, 141 for a closed pipe.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by our parent, which is no reason to fail
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  # for as long as we run
    _print_in_any_encoding()
    # (a job's progress bar may be on the terminal's line)
    fresh = "\r\x1b[K" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
    logging.basicConfig(format=f"{fresh}sftriage: %(message)s", level=logging.WARNING)
    # A turn of the loop that takes longer than its interval needs no log line: the next one catches up.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    try:
        try:
            command_line()()
        finally:
            # Buffered output may go to a closed pipe or a full disk.
            sys.stdout.flush()
    except SftriageError as error:
        # A policy's mistakes begin with their file and line, which editors look for at the start of a line.
        code = 2 if isinstance(error, UsageError | InputError) else 1
        _end(str(error) if error.is_located else f"sftriage: {error}", code)
    except (ReaderGone, BrokenPipeError):
        _end("", READER_GONE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _end(f"sftriage: {error.strerror}", 1)


def kubectl_plugin() -> None:
    """Run `sftriage kube`: kubectl starts `kubectl-sftriage` for `kubectl sftriage`."""
    sys.argv[:1] = ["sftriage", "kube"]
    main()


def _end(message: str, code: int) -> None:
    """Exit with a message; output that cannot be written is dropped."""
    if message:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{message}\n")
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


_PLAINER = {"\N{MIDDLE DOT}": "-", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MULTIPLICATION SIGN}": "x"}


def _print_in_any_encoding() -> None:
    """Print characters that the output's encoding lacks as the nearest ASCII, or as ``?``, instead of failing.

    Also with UTF-8: a file name may hold invalid bytes. (Rich draws tables in ASCII in any other encoding.)
    """

    def plainer(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        found = (
            _PLAINER.get(one) or unicodedata.normalize("NFKD", one).encode("ascii", "ignore").decode() or "?"
            for one in error.object[error.start : error.end]
        )
        return "".join(found), error.end

    codecs.register_error("sftriage.plainer", plainer)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="sftriage.plainer")


class Entry(NamedTuple):
    """A subcommand: its name, ``module:function``, a one-line summary, and examples for its help."""

    name: str
    home: str
    summary: str
    examples: tuple[str, ...]


class Section(NamedTuple):
    """A group of subcommands."""

    name: str
    summary: str
    entries: tuple[Entry, ...]


_ENTRY = re.compile(r"^(\S+) +(\S+) +(.+)((?:\n +.+)+)", re.MULTILINE)


def _entries(text: str) -> tuple[Entry, ...]:
    return tuple(
        Entry(one[1], one[2], one[3], tuple(map(str.strip, one[4].splitlines()[1:]))) for one in _ENTRY.finditer(text)
    )


_COMMANDS = """
run        run:run                  Run a training job and watch it.
    sftriage run -- torchrun --nproc-per-node 8 train.py
    sftriage run --policy mine.yaml --store s3://our-traces -- torchrun train.py
    sftriage run --job-id 1234 --hub node-1 -- torchrun --nnodes 4 train.py
attach     run:attach               Take over a job whose `sftriage run` has ended.
    sftriage attach --run sftriage-runs/RUN
agent      run:agent                Watch one host of a job on many hosts.
    sftriage agent --job-id 1234 --hub node-1 --rings /dev/shm/my-rings
controller controller:controller    Watch a job on many hosts.
    sftriage controller --job-id 1234 --nats nats://nats:4222 --creds FILE
    sftriage controller --run sftriage-runs/1234 --hub node-1
operator   kube:operate             Run the operator of a Kubernetes cluster.
    sftriage operator --store s3://our-traces
    sftriage operator -n training
demo       demo:demo                Train a small model, slow one rank, and find it.
    sftriage demo
    sftriage demo --fault forward:2:60 --steps 600
    sftriage demo --fault none
analyze    analyze:analyze          Show where the time of a recording went.
    sftriage analyze sftriage-runs/RUN
    sftriage analyze durations.npz --window 20 --json
whatif     analyze:whatif           Estimate how fast a job would run without stragglers.
    sftriage whatif sftriage-runs/RUN
    sftriage whatif trace.parquet --json
    sftriage whatif rank*.json.gz
advise     analyze:advise           Estimate what would help against a straggler that stays.
    sftriage advise
    sftriage advise sftriage-runs/RUN --gradients 500Mi --bandwidth 12.5 --json
reduce     analyze:reduce           Reduce heavy traces to stages, and show what they contain.
    sftriage reduce rank*.json.gz
    sftriage reduce trace.json.gz --against sftriage-runs/RUN
decisions  decisions:decisions      List the decision about each window, with its reason.
    sftriage decisions
    sftriage decisions --run sftriage-runs/RUN --json
capture    capture:capture          Capture ranks of a running job, on demand.
    sftriage capture --rank 3 --reason "loss spikes"
    sftriage capture --rank 3 --rank 4 --steps 2 --reason "slow"
evidence   doctor:evidence          Show clocks, limits and errors of a job's GPUs.
    sftriage evidence
    sftriage evidence --run sftriage-runs/RUN --json
doctor     doctor:doctor            Check what works on this machine, or with a job.
    sftriage doctor
    sftriage doctor --steps 5 -- torchrun --nproc-per-node 2 train.py
explain    decisions:explain_decision Explain the verdict and decision of a window.
    sftriage explain 1042
    sftriage explain 1000-1049
    sftriage explain w1000-1049-r3-slow-rank-1
report     report:report            Write a report of a run or a capture, to share.
    sftriage report -o report.html
    sftriage report sftriage-runs/RUN --format md
    sftriage report w1000 -o capture.html
ui         ui:ui                    Show a run or a store as a web page.
    sftriage ui
    sftriage ui --run sftriage-runs/RUN --port 8000
    sftriage ui --host 0.0.0.0 --token-file TOKEN --allow-host gpu1.example
watch      watch:watch              Watch a job live in the terminal.
    sftriage watch
    sftriage watch --run sftriage-runs/RUN --once
mcp        ui:mcp                   Serve runs to an AI assistant (MCP).
    sftriage mcp --runs sftriage-runs
    sftriage mcp --runs sftriage-runs --store s3://our-traces
"""

_TRACES = """
list     traces:list_traces          List captures, oldest first.
    sftriage traces list
    sftriage traces list --stage data --since 2h
    sftriage traces list --step 1000..1100 --reproduced yes --json
    sftriage traces list --store s3://our-traces/pretraining --job train
for-step traces:traces_for_step      Find the captures of a step, or the reason there is none.
    sftriage traces for-step 1042
    sftriage traces for-step 1042 --run sftriage-runs/RUN --json
show     traces:show_trace           Show why a capture was made, and what it contains.
    sftriage traces show w1000
    sftriage traces show train/RUN/w1000-1049-r3-slow-rank-1 --store URL
get      traces:get_trace            Copy a capture's trace to a file, verified.
    sftriage traces get w1000
    sftriage traces get w1000 --all --out traces/
open     traces:open_trace           Open a capture's trace in Perfetto's viewer.
    sftriage traces open w1000
    sftriage traces open w1000 --offline
    sftriage traces open w1000 --no-browser     # over SSH: print the link
pin      traces:pin_trace            Keep a capture regardless of retention.
    sftriage traces pin w1000
unpin    traces:unpin_trace          Let retention remove a capture again.
    sftriage traces unpin w1000
prune    traces:prune_traces         Remove old or damaged captures.
    sftriage traces prune --age 14d --bytes 50Gi --dry-run
    sftriage traces prune --age 14d --bytes 50Gi
    sftriage traces prune --damaged
reindex  traces:reindex_traces       Rebuild the catalogue from the manifests.
    sftriage traces reindex
    sftriage traces reindex --store s3://our-traces/pretraining
upload   traces:upload_traces        Upload captures to a store, or finish an upload.
    sftriage traces upload
    sftriage traces upload --run DIR --store s3://our-traces/pretraining
schema   traces:show_schema          Print the JSON Schema of a manifest.
    sftriage traces schema > manifest.schema.json
"""

_POLICY = """
validate policy:validate      Check policies, and show every mistake.
    sftriage policy validate mine.yaml
    sftriage policy validate default mine.yaml --json
show     policy:show          Print a policy with its defaults filled in.
    sftriage policy show default
schema   policy:schema        Print the JSON Schema of a policy.
    sftriage policy schema > policy.schema.json
list     policy:list_policies List the policies that ship with sftriage.
    sftriage policy list
test     policy:try_out       Replay a policy over a recording.
    sftriage policy test mine.yaml --on sftriage-runs/RUN
    sftriage policy test mine.yaml --on sftriage-runs/RUN --expect expected.txt
"""

_KUBE = """
status     kube:status                List the watched jobs of a cluster and their health.
    sftriage kube status -n training
    sftriage kube status -A --json
traces     kube:traces                Show which steps of a job were slow, and list their traces.
    sftriage kube traces pretraining -n training
    sftriage kube traces pretraining --step 1042
get        kube:get                   Fetch a trace to this machine, verified.
    sftriage kube get look-x8z2k -n training
    sftriage kube get --job pretraining --step 1042 --out traces/
open       kube:open_capture          Open a trace in Perfetto's viewer.
    sftriage kube open look-x8z2k -n training
    sftriage kube open --job pretraining
capture    kube:capture               Capture a rank of a job in a cluster, on demand.
    sftriage kube capture resnet --rank 3 --reason "loss spikes"
    sftriage kube capture resnet --rank 3 --reason "slow" --no-wait
doctor     kube:doctor                Find out why jobs are not watched, and what to do.
    sftriage kube doctor -n training
    sftriage kube doctor -n training --json
controller controller:of_cluster      Watch one job of a cluster (started by the operator).
    sftriage kube controller --job-id ml/job/a --policies p --run r --creds hub
policy     kube:policies              List a cluster's policies, and whether they are in force.
    sftriage kube policy -n training
    sftriage kube policy -A --json
crds       kube:definitions           Print the custom resource definitions.
    sftriage kube crds > crds.yaml
inject     webhook:inject             Print a job as the webhook would change it.
    sftriage kube inject -f job.yaml > watched.yaml
    sftriage kube inject -n training --settings settings.yaml -f job.yaml
carry      webhook:carry              Copy what trainers need into a volume (run by injected pods).
    sftriage kube carry /sftriage --spool /sftriage-spool/spool
"""

_WEBHOOK = """
serve        webhook:serve        Serve admission reviews of new pods and captures.
    sftriage webhook serve --cert /certs --settings settings.yaml
certificates webhook:certificates Make the certificate, and have the API server trust it.
    sftriage webhook certificates
    sftriage webhook certificates -n sftriage-system
"""

CONTENTS: tuple[Entry | Section, ...] = (
    *_entries(_COMMANDS),
    Section("traces", "Find, show, fetch and keep captured traces.", _entries(_TRACES)),
    Section("policy", "Check policies, replay them on recordings, list shipped ones.", _entries(_POLICY)),
    Section("kube", "Jobs, captures and policies in a Kubernetes cluster.", _entries(_KUBE)),
    Section("webhook", "Inject sftriage into training pods of a Kubernetes cluster.", _entries(_WEBHOOK)),
)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, with each dataclass of options expanded into its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: of for name, of in hints.items() if is_dataclass(of)}
    parameters = []
    for one in inspect.signature(command).parameters.values():
        of = groups.get(one.name)
        types = hints if of is None else get_type_hints(of, include_extras=True)
        for its in (one,) if of is None else fields(of):
            default, annotation = its.default, types[its.name]
            if isinstance(default, ParameterInfo) and default.default is ...:
                default.default = False if annotation is bool else None
            parameters.append(one.replace(name=its.name, kind=_KEYWORD, default=default, annotation=annotation))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        made = {name: of(**{its.name: given.pop(its.name) for its in fields(of)}) for name, of in groups.items()}
        command(**given, **made)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def arguments(options: Any) -> dict[str, object]:
    """The options that differ from their default, by name."""
    given = {}
    for its in fields(options):
        value, default = getattr(options, its.name), its.default
        if value != (default.default if isinstance(default, ParameterInfo) else default):
            given[f"--{its.name.replace('_', '-')}"] = value
    return given
