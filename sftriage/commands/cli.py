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
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ParameterInfo

from sftriage import __version__
from sftriage.errors import InputError, SftriageError, UsageError, missing_extra

# Plain text: at 80 columns, boxes leave half of a line for the explanation.
_MARKUP = None

READER_GONE = 128 + signal.SIGPIPE
"""Exit status of a command that SIGPIPE ended. The signal itself stays ignored, as is Python's default: a broken
connection would end a job's triage too."""


class ReaderGone(Exception):  # noqa: N818  # not an error
    """The reader of the results has closed the pipe, as `head` and `less` do."""


@contextlib.contextmanager
def raising_reader_gone() -> Iterator[None]:
    """Raise `ReaderGone` for a broken pipe: typer would exit with 1, as for a failure."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Command(TyperCommand):
    """A subcommand whose module is imported when it runs or shows its help."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(name=entry.name.split()[-1], short_help=entry.summary, rich_markup_mode=_MARKUP)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
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
        examples = "\n  ".join(("\b\nFor example:", *entry.examples))
        settings = {"allow_interspersed_args": entry.home != "run:run"}  # (a job's options follow its command)
        alone.command(self.name, epilog=examples, context_settings=settings)(flattened(getattr(home, function)))
        command: Any = typer.main.get_command(alone)
        for argument in command.params:
            if argument.param_type_name == "argument":
                # `CAPTURE <str>` would say no more than its name does.
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
    groups = {name: TyperGroup(name=name, help=summary, **shown) for name, summary in GROUPS.items()}
    for entry in COMMANDS:
        groups.get(entry.name.rpartition(" ")[0], root).add_command(Command(entry))
    for group in groups.values():
        root.add_command(group)
    return root


def main() -> None:
    """Run the command line.

    Exit codes: 2 for errors a person can fix (usage, input), 1 for failures, 141 for a closed pipe.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # (the parent process may have closed it)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  # for as long as we run
    _print_in_any_encoding()
    # (the job may have left a progress bar on the current line)
    fresh = "\r\x1b[K" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
    logging.basicConfig(format=f"{fresh}sftriage: %(message)s", level=logging.WARNING)
    # It warns if one turn of a loop takes longer than its interval; the next turn catches up.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    try:
        try:
            status = command_line()(prog_name="sftriage", standalone_mode=False)
        finally:
            # Buffered output may go to a closed pipe or a full disk.
            sys.stdout.flush()
        sys.exit(status)
    except _WrongArguments as error:
        _end(_one_line(error), 2)
    except SftriageError as error:
        # Editors expect the file and line of a policy's mistake at the start of a line.
        code = 2 if isinstance(error, UsageError | InputError) else 1
        _end(str(error) if error.is_located else f"sftriage: {error}", code)
    except ModuleNotFoundError as error:
        if not (advice := missing_extra(error)):
            raise
        _end(f"sftriage: {advice}", 2)
    except (ReaderGone, BrokenPipeError):
        _end("", READER_GONE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _end(f"sftriage: {error.strerror}", 1)


_WrongArguments: Any = typer.BadParameter.__base__
"""Typer's error for arguments that it cannot parse."""


def _one_line(error: Any) -> str:
    """The message, with the command whose help explains it; of a group without a subcommand, that help itself."""
    text = error.format_message()
    if text.startswith("Usage: "):
        return str(text)
    text = " ".join(text.replace(": Value error, ", ": ").replace(": Input ", ": input ").split()).removesuffix(".")
    return f"sftriage: {text[:1].lower()}{text[1:]} (see `{error.ctx.command_path} -h`)"


def kubectl_plugin() -> None:
    """Run for `kubectl sftriage`: ``get``, ``open`` and ``list`` are those of `sftriage traces`, the rest of `kube`."""
    group, *words = sys.argv[1:] if sys.argv[1:2] == ["traces"] else ["kube", *sys.argv[1:]]
    if words[:1] and words[0] in ("list", "get", "open"):
        group, words = "traces", [words[0], "--cluster", *words[1:]]
    sys.argv = ["sftriage", group, *words]
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
        characters = (
            _PLAINER.get(character)
            or unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            or "?"
            for character in error.object[error.start : error.end]
        )
        return "".join(characters), error.end

    codecs.register_error("sftriage.plainer", plainer)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="sftriage.plainer")


class Entry(NamedTuple):
    """A subcommand: its name, after that of its group; ``module:function``; a summary, and examples for its help."""

    name: str
    home: str
    summary: str
    examples: tuple[str, ...]


GROUPS = {
    "traces": "Find, show, fetch and keep captured traces.",
    "policy": "Check policies, replay them on recordings, list shipped ones.",
    "kube": "Jobs, captures and policies in a Kubernetes cluster.",
    "webhook": "Inject sftriage into training pods of a Kubernetes cluster.",
}
_TABLE = """
run  run:run  Run a training job and watch it.
    sftriage run -- torchrun --nproc-per-node 8 train.py
    sftriage run --policy mine.yaml --store s3://our-traces -- torchrun train.py
    sftriage run --job-id 1234 --hub node-1 -- torchrun --nnodes 4 train.py
attach  run:attach  Take over a job whose `sftriage run` has ended.
    sftriage attach --run sftriage-runs/RUN
agent  run:agent  Watch one host of a job on many hosts.
    sftriage agent --job-id 1234 --hub node-1 --rings /dev/shm/my-rings
controller  controller:controller  Watch a job on many hosts.
    sftriage controller --job-id 1234 --nats nats://nats:4222 --creds FILE
    sftriage controller --run sftriage-runs/1234 --hub node-1
operator  kube:operate  Run the operator of a Kubernetes cluster.
    sftriage operator -n training
demo  demo:demo  Train a small model, slow one rank, and find it.
    sftriage demo
    sftriage demo --fault forward:2:60 --steps 600
analyze  analyze:analyze  Show where the time of a recording went.
    sftriage analyze sftriage-runs/RUN
    sftriage analyze durations.npz --window 20 --json
whatif  analyze:whatif  Estimate how fast a job would run without stragglers.
    sftriage whatif sftriage-runs/RUN
    sftriage whatif rank*.json.gz
advise  analyze:advise  Estimate what would help against a straggler that stays.
    sftriage advise sftriage-runs/RUN --gradients 500Mi --bandwidth 12.5 --json
reduce  reduce:reduce  Reduce heavy traces to stages, and show what they contain.
    sftriage reduce rank*.json.gz
    sftriage reduce trace.json.gz --against sftriage-runs/RUN
decisions  decisions:decisions  List the decision about each window, with its reason.
    sftriage decisions --run sftriage-runs/RUN
capture  capture:capture  Capture ranks of a running job, on demand.
    sftriage capture --rank 3 --reason "loss spikes"
    sftriage capture --rank 3 --rank 4 --steps 2 --reason "slow"
evidence  doctor:evidence  Show clocks, limits and errors of a job's GPUs.
    sftriage evidence --run sftriage-runs/RUN
doctor  doctor:doctor  Check what works on this machine, or with a job.
    sftriage doctor
    sftriage doctor --steps 5 -- torchrun --nproc-per-node 2 train.py
explain  decisions:explain_decision  Explain the verdict and decision of a window.
    sftriage explain 1042
    sftriage explain w1000-1049-r3-slow-rank-1
report  report:report  Write a report of a run or a capture, to share.
    sftriage report -o report.html
    sftriage report w1000 -o capture.html
ui  ui:ui  Show a run or a store as a web page.
    sftriage ui --run sftriage-runs/RUN --port 8000
    sftriage ui --host 0.0.0.0 --token-file TOKEN --allow-host gpu1.example
watch  watch:watch  Watch a job live in the terminal.
    sftriage watch --run sftriage-runs/RUN --once
mcp  ui:mcp  Serve runs to an AI assistant (MCP).
    sftriage mcp --runs sftriage-runs --store s3://our-traces
traces list  traces:list_traces  List captures, oldest first.
    sftriage traces list --stage data --since 2h
    sftriage traces list --step 1000..1100 --reproduced yes --json
    sftriage traces list --store s3://our-traces --job train
    sftriage traces list --cluster -n training --job pretraining --step 1042
traces for-step  traces:traces_for_step  Find the captures of a step, or the reason there is none.
    sftriage traces for-step 1042 --run sftriage-runs/RUN
traces show  traces:show_trace  Show why a capture was made, and what it contains.
    sftriage traces show w1000
    sftriage traces show train/RUN/w1000-1049-r3-slow-rank-1 --store URL
traces get  opening:get_trace  Copy a capture's trace to a file, verified.
    sftriage traces get w1000
    sftriage traces get w1000 --all --out traces/
    sftriage traces get --cluster --job pretraining --step 1042
traces open  opening:open_trace  Open a capture's trace in Perfetto's viewer.
    sftriage traces open w1000
    sftriage traces open w1000 --no-browser     # over SSH: print the link
    sftriage traces open --cluster look-x8z2k -n training
traces pin  traces:pin_trace  Keep a capture regardless of retention.
    sftriage traces pin w1000
traces unpin  traces:unpin_trace  Let retention remove a capture again.
    sftriage traces unpin w1000
traces prune  traces:prune_traces  Remove old or damaged captures.
    sftriage traces prune --age 14d --bytes 50Gi --dry-run
traces reindex  traces:reindex_traces  Rebuild the catalogue from the manifests.
    sftriage traces reindex --store s3://our-traces/pretraining
traces upload  traces:upload_traces  Upload captures to a store, or finish an upload.
    sftriage traces upload --run DIR --store s3://our-traces/pretraining
traces schema  traces:show_schema  Print the JSON Schema of a manifest.
    sftriage traces schema > manifest.schema.json
policy validate  policy:validate  Check policies, and show every mistake.
    sftriage policy validate mine.yaml
    sftriage policy validate default mine.yaml --json
policy show  policy:show  Print a policy with its defaults filled in.
    sftriage policy show default
policy schema  policy:schema  Print the JSON Schema of a policy.
    sftriage policy schema > policy.schema.json
policy list  policy:list_policies  List the policies that ship with sftriage.
    sftriage policy list
policy test  policy:try_out  Replay a policy over a recording.
    sftriage policy test mine.yaml --on sftriage-runs/RUN
    sftriage policy test mine.yaml --on sftriage-runs/RUN --expect expected.txt
kube status  kube:status  List the watched jobs of a cluster and their health.
    sftriage kube status -n training
kube capture  kube:capture  Capture a rank of a job in a cluster, on demand.
    sftriage kube capture resnet --rank 3 --reason "loss spikes"
kube doctor  kube:doctor  Find out why jobs are not watched, and what to do.
    sftriage kube doctor -n training
kube controller  cluster_controllers:of_namespace  Watch the jobs of a namespace (started by the operator).
    sftriage kube controller --namespace ml --policies p --runs r --creds hub
kube policy  kube:policies  List a cluster's policies, and whether they are in force.
    sftriage kube policy -A
kube crds  kube:definitions  Print the custom resource definitions.
    sftriage kube crds > crds.yaml
kube inject  webhook:inject  Print a job as the webhook would change it.
    sftriage kube inject -f job.yaml > watched.yaml
    sftriage kube inject -n training --settings settings.yaml -f job.yaml
kube carry  webhook:carry  Copy what trainers need into a volume (run by injected pods).
    sftriage kube carry /sftriage --spool /sftriage-spool/spool
webhook serve  webhook:serve  Serve admission reviews of new pods and captures.
    sftriage webhook serve --cert /certs --settings settings.yaml
webhook certificates  webhook:certificates  Make the certificate, and have the API server trust it.
    sftriage webhook certificates -n sftriage-system
"""
_ENTRY = re.compile(r"^(\S.*?)  (\S+)  (.+)((?:\n +.+)+)", re.MULTILINE)
COMMANDS = tuple(
    Entry(name, home, summary, tuple(map(str.strip, examples.splitlines()[1:])))
    for name, home, summary, examples in _ENTRY.findall(_TABLE)
)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, with each dataclass of options expanded into its fields."""
    hints = get_type_hints(command, include_extras=True)
    for name, hint in hints.items():
        # (Python 3.10 makes Optional[Annotated[...]] of an annotation whose default is None)
        if get_args(hint)[1:] == (type(None),) and get_origin(get_args(hint)[0]) is Annotated:
            hints[name] = get_args(hint)[0]
    groups: dict[str, Any] = {name: of for name, of in hints.items() if is_dataclass(of)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        types = hints if group is None else get_type_hints(group, include_extras=True)
        for field in (parameter,) if group is None else fields(group):
            default, annotation = field.default, types[field.name]
            if isinstance(default, ParameterInfo) and default.default is ...:
                default.default = False if annotation is bool else None
            changes: dict[str, Any] = {"name": field.name, "default": default, "annotation": annotation}
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, **changes))

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        grouped = {
            name: of(**{field.name: values.pop(field.name) for field in fields(of)}) for name, of in groups.items()
        }
        command(**values, **grouped)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def arguments(options: Any) -> dict[str, object]:
    """The options of a group that differ from their default, by name."""
    changed = {}
    for field in fields(options):
        value, default = getattr(options, field.name), field.default
        if value != (default.default if isinstance(default, ParameterInfo) else default):
            changed[f"--{field.name.replace('_', '-')}"] = value
    return changed
