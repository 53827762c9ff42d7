"""The command line. Its commands are imported only when it runs: Ctrl-C is quiet from its first line on."""

from outrider_cli.interrupts import end_at_once, ending_at_once


def main() -> None:
    """Runs the command line: the `outrider` entry point."""
    with ending_at_once():
        from outrider_cli.app import app
    try:
        app(prog_name="outrider")
    finally:
        end_at_once()
