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

# Plain text: at 80 columns a help in boxes leaves half of a line for what is explained.
_MARKUP = None

READER_GONE = 128 + signal.SIGPIPE
"""What a shell says of a command that SIGPIPE ended. The signal itself stays ignored, as Python has it: it would end a
job's triage too when somebody else's connection breaks."""


class ReaderGone(Exception):  # noqa: N818  # not an error: nobody reads the results any more
    """What is left to print is not printed: `head` and `less` go when they have seen enough."""


@contextlib.contextmanager
def told_of() -> Iterator[None]:
    """Say that a reader has gone before typer does, which ends with 1 as if something had failed."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Command(TyperCommand):
    """A subcommand whose module is imported once it is run, or asked for its help."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(name=entry.name, short_help=entry.summary, rich_markup_mode=_MARKUP)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself, which is then what is run."""
        return self._loaded.make_context(info_name, args, parent, **extra)

    @cached_property
    def _loaded(self) -> Any:
        entry = self._entry
        module, _, function = entry.home.partition(":")
        # (imports make much that stays and little that goes: to look for it meanwhile is a sixth of their time)
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
                # Its name says what it is; `CAPTURE <str>` says no more.
                argument.display_type_rich = lambda ctx: None
        return command


class CommandLine(TyperGroup):
    """All of it. Help, the version and what a command prints may meet a reader that has gone."""

    make_context = told_of()(TyperGroup.make_context)
    invoke = told_of()(TyperGroup.invoke)


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
    """The command line, of which nothing is imported that is not asked for. A process puts it together once."""
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

    Exit codes: 2 for what the person can mend (usage, input), 1 for what failed, 141 where nobody reads on.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us, which is no reason to fail
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  # for as long as we run
    _print_in_any_encoding()
    # (a job's progress bar may be on the terminal's line)
    fresh = "\r\x1b[K" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
    logging.basicConfig(format=f"{fresh}sftriage: %(message)s", level=logging.WARNING)
    # A turn of the loop that takes longer than its interval is no news: the next one catches up.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    try:
        try:
            command_line()()
        finally:
            # What waits there may be what nobody reads, or what finds no room.
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
    """Run `sftriage kube`: kubectl starts what is called `kubectl-sftriage` for `kubectl sftriage`."""
    sys.argv[:1] = ["sftriage", "kube"]
    main()


def _end(said: str, code: int) -> None:
    """End, whoever still listens; what could not be written is not tried again."""
    if said:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{said}\n")
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


_PLAINER = {"\N{MIDDLE DOT}": "-", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MULTIPLICATION SIGN}": "x"}


def _print_in_any_encoding() -> None:
    """Print what the output's encoding lacks as the nearest ASCII, or as ``?``; nothing ends for want of a character.

    Also of UTF-8: a file's name may hold bytes that are no text. (Rich draws tables in ASCII wherever it is not UTF-8.)
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
    """A subcommand: its name, its module and its function there, a line for a list, and examples for its own help."""

    name: str
    home: str
    summary: str
    examples: tuple[str, ...]


class Section(NamedTuple):
    """Subcommands that go by a common name."""

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
agent      run:agent                Watch one host of a job on many.
    sftriage agent --job-id 1234 --hub node-1 --rings /dev/shm/my-rings
controller controller:controller    Watch a job on many hosts.
    sftriage controller --job-id 1234 --nats nats://nats:4222 --creds FILE
    sftriage controller --run sftriage-runs/1234 --hub node-1
operator   kube:operate             Look after the policies and captures of a Kubernetes cluster.
    sftriage operator --store s3://our-traces
    sftriage operator -n training
demo       demo:demo                Train a small model, slow one rank, and find it.
    sftriage demo
    sftriage demo --fault forward:2:60 --steps 600
    sftriage demo --fault none
analyze    analyze:analyze          Say where the time of a recording went.
    sftriage analyze sftriage-runs/RUN
    sftriage analyze durations.npz --window 20 --json
whatif     analyze:whatif           Say what a job would run at without stragglers.
    sftriage whatif sftriage-runs/RUN
    sftriage whatif trace.parquet --json
    sftriage whatif rank*.json.gz
advise     analyze:advise           Say what would help against a straggler that stays.
    sftriage advise
    sftriage advise sftriage-runs/RUN --gradients 500Mi --bandwidth 12.5 --json
reduce     analyze:reduce           Reduce heavy traces to stages, and say what they show.
    sftriage reduce rank*.json.gz
    sftriage reduce trace.json.gz --against sftriage-runs/RUN
decisions  decisions:decisions      List what was decided about each window, and why.
    sftriage decisions
    sftriage decisions --run sftriage-runs/RUN --json
capture    capture:capture          Capture ranks of a running job, on demand.
    sftriage capture --rank 3 --reason "loss spikes"
    sftriage capture --rank 3 --rank 4 --steps 2 --reason "slow"
evidence   doctor:evidence          Ask the NVIDIA driver about the GPUs of a job.
    sftriage evidence
    sftriage evidence --run sftriage-runs/RUN --json
doctor     doctor:doctor            Say what works on this machine.
    sftriage doctor
    sftriage doctor --json
explain    decisions:explain_decision Say why a window was decided as it was.
    sftriage explain 1042
    sftriage explain 1000-1049
    sftriage explain w1000-1049-r3-slow-rank-1
report     report:report            Write a report of a run or a capture, to hand on.
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
mcp        ui:mcp                   Answer an assistant's questions about runs.
    sftriage mcp --runs sftriage-runs
    sftriage mcp --runs sftriage-runs --store s3://our-traces
"""

_TRACES = """
list     traces:list_traces          List captures, oldest first.
    sftriage traces list
    sftriage traces list --stage data --since 2h
    sftriage traces list --step 1000..1100 --reproduced yes --json
    sftriage traces list --store s3://our-traces/pretraining --job train
for-step traces:traces_for_step      Find the captures of a step, or why there is none.
    sftriage traces for-step 1042
    sftriage traces for-step 1042 --run sftriage-runs/RUN --json
show     traces:show_trace           Show why a capture was made and what it holds.
    sftriage traces show w1000
    sftriage traces show train/RUN/w1000-1049-r3-slow-rank-1 --store URL
get      traces:get_trace            Copy a capture's trace to a file, verified.
    sftriage traces get w1000
    sftriage traces get w1000 --all --out traces/
open     traces:open_trace           Open a capture's trace in Perfetto's viewer.
    sftriage traces open w1000
    sftriage traces open w1000 --offline
    sftriage traces open w1000 --no-browser     # over SSH: print the link
pin      traces:pin_trace            Keep a capture, whatever retention says.
    sftriage traces pin w1000
unpin    traces:unpin_trace          Leave a capture to retention again.
    sftriage traces unpin w1000
prune    traces:prune_traces         Remove old captures, or those that are damaged.
    sftriage traces prune --age 14d --bytes 50Gi --dry-run
    sftriage traces prune --age 14d --bytes 50Gi
    sftriage traces prune --damaged
reindex  traces:reindex_traces       Build the catalogue again from the manifests.
    sftriage traces reindex
    sftriage traces reindex --store s3://our-traces/pretraining
upload   traces:upload_traces        Upload captures to a store, or finish doing so.
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
status     kube:status                List the jobs of a cluster, and say how they stand.
    sftriage kube status -n training
    sftriage kube status -A --json
traces     kube:traces                Say which steps of a job were slow, and list their traces.
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
doctor     kube:doctor                Find out why nothing happens, and what to do.
    sftriage kube doctor -n training
    sftriage kube doctor -n training --json
controller controller:of_cluster      Watch one job of a cluster: what the operator starts.
    sftriage kube controller --job-id ml/job/a --policies p --run r --creds hub
policy     kube:policies              List a cluster's policies, and say whether they are in force.
    sftriage kube policy -n training
    sftriage kube policy -A --json
crds       kube:definitions           Print the custom resource definitions.
    sftriage kube crds > crds.yaml
inject     webhook:inject             Print a job with its pods as the webhook would have them.
    sftriage kube inject -f job.yaml > watched.yaml
    sftriage kube inject -n training --settings settings.yaml -f job.yaml
carry      webhook:carry              Copy what trainers need into a volume (injected pods run it).
    sftriage kube carry /sftriage --spool /sftriage-spool/spool
"""

_WEBHOOK = """
serve        webhook:serve        Answer an API server's reviews of new pods and captures.
    sftriage webhook serve --cert /certs --settings settings.yaml
certificates webhook:certificates Make its certificate, and have the API server trust it.
    sftriage webhook certificates
    sftriage webhook certificates -n sftriage-system
"""

CONTENTS: tuple[Entry | Section, ...] = (
    *_entries(_COMMANDS),
    Section("traces", "Find, look at and fetch the traces that were captured.", _entries(_TRACES)),
    Section("policy", "Check policies, try them on recordings, list those there are.", _entries(_POLICY)),
    Section("kube", "Jobs, captures and policies in a Kubernetes cluster.", _entries(_KUBE)),
    Section("webhook", "Have training pods of a Kubernetes cluster watched.", _entries(_WEBHOOK)),
)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: where it takes a dataclass of options, it has these options."""
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
    """What of some options is not as it is by default, by the option that says it."""
    given = {}
    for its in fields(options):
        value, default = getattr(options, its.name), its.default
        if value != (default.default if isinstance(default, ParameterInfo) else default):
            given[f"--{its.name.replace('_', '-')}"] = value
    return given
