"""The command line: `python -m fitflax COMMAND`: lists and compares checkpoints, and plots runs."""

import argparse
import inspect
import sys
from collections.abc import Sequence

from fitflax.commands import checkpoints, plot
from fitflax.errors import FitflaxError

_COMMANDS = (
    ("checkpoints", "list the checkpoints of a directory", checkpoints.add_list_arguments, checkpoints.run_list),
    ("compare", "show which arrays of two checkpoints differ", checkpoints.add_compare_arguments, checkpoints.run_compare),
    ("plot", "plot the curves of runs", plot.add_arguments, plot.run),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, or 1 if a checkpoint is damaged or two differ. Invalid arguments exit with 2."""
    parser = argparse.ArgumentParser(prog="python -m fitflax")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose, add_arguments, run in _COMMANDS:
        command = commands.add_parser(name, help=purpose, description=inspect.getdoc(run), formatter_class=argparse.RawDescriptionHelpFormatter)
        add_arguments(command)
        command.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except (FitflaxError, ImportError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
