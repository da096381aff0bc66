"""The command line: one module per subcommand. Only here do errors become exit codes."""

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``sftriage`` command."""
    if os.getpid() == 1:
        # PID 1 of a container ignores signals without a handler: its pod would hang until it is killed. Set this
        # first, because a pod may end while we start.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    from sftriage.commands.cli import main as run_command_line

    run_command_line()
