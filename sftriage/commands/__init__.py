"""The command line: one module a subcommand. Only here do errors become exit codes."""

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``sftriage`` command."""
    if os.getpid() == 1:
        # The first process of a container does not hear what it has not said that it listens to, and would hold its
        # pod up until that is killed. This early, for a pod may end while we still begin.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    from sftriage.commands.cli import main as run_command_line

    run_command_line()
