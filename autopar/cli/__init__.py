"""The command ``autopar``: one module and one line of `COMMANDS` for each subcommand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from autopar.errors import AutoparError

COMMANDS = {
    "plan": "plan how a model trains on a cluster, and print the plan",
    "compare": "compare the plan with DDP, ZeRO, tensor parallel and their like",
    "explain": "show what each spec of a tensor would cost, and what the constraints cost",
    "profile": "measure this machine's collectives and kernels, into a cluster file",
    "check": "check that planned programs compute here what the model computes",
}
"""Each is a module of this package with ``add_arguments(parser)`` and ``run(arguments) -> int``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, or 1 after an error that the user can mend."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="autopar", description="An automatic parallelization compiler for PyTorch.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose.capitalize() + ".")
        if given[:1] == [name]:  # the modules of the others stay unread, and with them most of torch
            importlib.import_module(f"autopar.cli.{name}").add_arguments(command)
    chosen = parser.parse_args(given)
    chosen.given = given
    try:
        status: int = importlib.import_module(f"autopar.cli.{chosen.command}").run(chosen)
    except AutoparError as error:
        print(f"autopar {chosen.command}: {error}", file=sys.stderr)
        return 1
    return status


def _version() -> str:
    from autopar import __version__

    return f"autopar {__version__}"
