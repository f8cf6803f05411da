"""The command line: `python -m fitflax COMMAND`: lists and compares checkpoints, and plots runs."""

import argparse
import sys
from collections.abc import Sequence

import fitflax.commands.checkpoints as checkpoints
import fitflax.commands.compare as compare
import fitflax.commands.plot as plot
from fitflax.errors import FitflaxError

__all__ = ["main"]

_COMMANDS = {
    "checkpoints": (checkpoints, "list the checkpoints of a directory"),
    "compare": (compare, "show which arrays of two checkpoints differ"),
    "plot": (plot, "plot the curves of runs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, or 1 if a checkpoint is damaged or two differ. Invalid arguments exit with 2."""
    parser = argparse.ArgumentParser(prog="python -m fitflax")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, purpose) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=purpose, description=module.__doc__))
    options = parser.parse_args(argv)
    try:
        return int(_COMMANDS[options.command][0].run(options))
    except (FitflaxError, ImportError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
