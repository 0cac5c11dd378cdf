"""Finds the command that was asked for, and loads no other: each starts as fast as what it imports.

A command is a module of this package with ``arguments(parser)``, which adds its options, and ``run(options)``, which
returns the exit status; its docstring is its help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from smpar.errors import SmparError

# Name, which is also the module's -> what it does, in the list of commands.
COMMANDS = {
    "plan": "find how a model trains fastest on a cluster, and write the plan",
    "probe": "measure the devices and links of a torchrun job, and write a cluster file",
    "profile": "measure a model's layers on this device, and write a profile",
    "simulate": "show a plan's timetable, and let local processes execute it",
}

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
WRONG = 2  # exit status when something is wrong with what was given, as argparse has it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: its name and arguments; None takes the process's.

    Returns:
        the exit status. An error that smpar raises on purpose is printed without a traceback, as is an interrupt.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
    top = argparse.ArgumentParser(
        "smpar",
        description="Plan how a model trains on a cluster, and measure what a plan needs to know.",
        epilog=f"commands:\n{listed}\n\nsmpar COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("command", metavar="COMMAND", choices=COMMANDS)
    name = top.parse_args(given[:1]).command
    try:
        command = importlib.import_module(f"smpar.cli.{name}")
        parser = argparse.ArgumentParser(
            f"smpar {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.arguments(parser)
        status: int = command.run(parser.parse_args(given[1:]))
    except SmparError as error:
        print(f"smpar {name}: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print(f"smpar {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status
