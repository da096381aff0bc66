"""``sftriage mcp``: runs and stores for an assistant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sftriage.commands.options import option
from sftriage.errors import UsageError
from sftriage.runs.directory import DEFAULT_ROOT


def mcp(
    runs: Annotated[Path, option("--runs DIR", "The directory of the runs, or one run directory.")] = Path(
        DEFAULT_ROOT
    ),
    store: Annotated[
        str | None,
        option(
            "--store URL",
            "A store of captures beside them: s3://, gs:// or az:// with bucket and prefix, or a directory.",
            False,
        ),
    ] = None,
) -> None:
    """Answer an assistant's questions about runs, over the Model Context Protocol: on stdin and stdout, read-only.

    An assistant starts it by itself (docs/assistants.md has the lines for its configuration). It reads the runs in one
    directory and the store that is named, and nothing else; it opens no port, starts no capture and changes no run.
    """
    if not runs.is_dir():
        raise UsageError(f"{runs}: no such directory; --runs names the one that `sftriage run` keeps its runs in")
    try:
        from sftriage.assistants.server import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "mcp":
            raise
        raise UsageError("an assistant's server needs the MCP SDK; install sftriage[mcp]") from error
    from sftriage.assistants.answers import RunLookup

    server(RunLookup(runs.resolve(), store)).run("stdio")
