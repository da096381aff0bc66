"""The command line: subcommands put together, and errors turned into exit codes. Here and nowhere else."""

from __future__ import annotations

import logging
import sys

import typer

from sftriage import __version__
from sftriage.commands.analyze import analyze
from sftriage.commands.attach import attach
from sftriage.commands.capture import capture
from sftriage.commands.decisions import decisions
from sftriage.commands.demo import demo
from sftriage.commands.evidence import evidence
from sftriage.commands.explain import explain_decision
from sftriage.commands.for_step import traces_for_step
from sftriage.commands.opening import open_trace
from sftriage.commands.policy import policies
from sftriage.commands.reduce import reduce
from sftriage.commands.reindex import reindex_traces
from sftriage.commands.retention import pin_trace, prune_traces, unpin_trace
from sftriage.commands.run import run
from sftriage.commands.traces import traces
from sftriage.commands.traces_get import get_trace
from sftriage.commands.traces_show import manifest_schema, show_trace
from sftriage.commands.traces_upload import upload_traces
from sftriage.commands.ui import ui
from sftriage.commands.watch import watch
from sftriage.errors import InputError, SftriageError, UsageError
from sftriage.policy import PolicyError

app = typer.Typer(
    help="Names the hidden slow rank and stage of a distributed PyTorch job, and captures a trace of just that.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Options after the launcher's name are the launcher's.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(attach)
app.command()(demo)
app.command()(analyze)
app.command()(reduce)
app.command()(decisions)
app.command()(capture)
app.command()(evidence)
app.command("explain")(explain_decision)
app.command()(ui)
app.command()(watch)
for name, command in (
    ("for-step", traces_for_step),
    ("show", show_trace),
    ("get", get_trace),
    ("open", open_trace),
    ("pin", pin_trace),
    ("unpin", unpin_trace),
    ("prune", prune_traces),
    ("reindex", reindex_traces),
    ("upload", upload_traces),
    ("schema", manifest_schema),
):
    traces.command(name)(command)
app.add_typer(traces, name="traces")
app.add_typer(policies, name="policy")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sftriage {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options before the subcommand."""


def main() -> None:
    """Run the command line. Exit codes: 2 for what the person can mend (usage, input), 1 for what failed."""
    logging.basicConfig(format="sftriage: %(message)s", level=logging.WARNING)
    # A turn of the loop that takes longer than its interval is no news: the next one catches up.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    try:
        app()
    except SftriageError as error:
        # A policy's mistakes begin with their file and line, which editors look for at the start of a line.
        said = str(error) if isinstance(error, PolicyError) else f"sftriage: {error}"
        sys.stderr.write(f"{said}\n")
        sys.exit(2 if isinstance(error, UsageError | InputError) else 1)
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough.
        sys.stderr.close()
        sys.exit(0)
