"""The command line: one module a subcommand. Only here do errors become exit codes."""


def main() -> None:
    """Entry point of the ``sftriage`` command."""
    from sftriage.commands.cli import main as run_command_line

    run_command_line()
