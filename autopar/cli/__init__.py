"""The ``autopar`` command. Each subcommand is a module of this package and an entry in `COMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from autopar.errors import AutoparError

COMMANDS = {
    "plan": "plan how a model trains on a cluster, and print the plan",
    "explain": "show what each spec of a tensor would cost, and what the constraints cost",
    "compare": "compare the plan with DDP, ZeRO, tensor parallel and other baselines",
    "diff": "show what differs between two saved plans",
    "emit": "write the Python program that every rank of a plan runs",
    "profile": "measure this machine's collectives and kernels, and write a cluster file",
    "check": "show what works on this machine, and verify the plan of a small model",
}
"""Help text of each subcommand. Its module defines ``add_arguments(parser)`` and ``run(arguments) -> int``."""

EXAMPLES = """\
examples (none needs a GPU):
  autopar check                                              what works on this machine
  autopar plan gpt2 --mesh 2x4 --cluster dgx-h100            a Hugging Face model type with its defaults
  autopar plan llama-3-405b --mesh 2048x8 --cluster dgx-h100 --batch 2048x8192 --report plan.html
  autopar plan config.json --mesh 32x8 --cluster dgx-h100 --batch 256x4096 --budget 70GiB --output plan.json
  autopar plan mypackage.train:model_and_inputs --mesh dp=2,tp=4 --cluster dgx-a100
  autopar explain gpt2 --mesh 8 --cluster dgx-h100 --name transformer.wte.weight
  autopar diff plan.json other.json

See autopar COMMAND --help for the options of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 1 after an error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parse(given)
    chosen.given = given
    try:
        status: int = importlib.import_module(f"autopar.cli.{chosen.command}").run(chosen)
        sys.stdout.flush()
    except AutoparError as error:
        print(f"autopar {chosen.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"autopar {chosen.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  raised by the user's model or a library; AUTOPAR_TRACEBACK shows the traceback
        return _report_unexpected(chosen.command, error)
    return status


def _report_unexpected(command: str, error: Exception) -> int:
    last = traceback.extract_tb(error.__traceback__)[-1]
    print(f"autopar {command}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"  found: raised in {last.filename}, line {last.lineno}", file=sys.stderr)
    print("  hint:  set AUTOPAR_TRACEBACK=1 to see the traceback.", file=sys.stderr)
    if os.environ.get("AUTOPAR_TRACEBACK"):
        traceback.print_exception(error)
    return 1


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. A surplus word becomes the value of the option that the command names in ``last``."""
    parser = _parser(given)
    chosen, more = parser.parse_known_args(given)
    last = getattr(chosen, "last", "")
    if len(more) == 1 and not more[0].startswith("-") and last and not getattr(chosen, last):
        setattr(chosen, last, more[0])
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    return chosen


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="An automatic parallelization compiler for PyTorch.",
        epilog=EXAMPLES,
        formatter_class=plain,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(
            name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", formatter_class=plain
        )
        if given[:1] == [name]:  # importing the other commands would import most of torch
            importlib.import_module(f"autopar.cli.{name}").add_arguments(command)
    return parser


def _version() -> str:
    from autopar import __version__

    return f"autopar {__version__}"
