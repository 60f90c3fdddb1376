"""``autopar emit``: the Python program that every rank of a saved plan runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.plan import check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example:\n  autopar plan gpt2 --mesh 2x4 --cluster dgx-h100 --output plan.json\n"
        "  autopar emit plan.json --output program.py\n\n"
        "The program is the plan's own: every rank runs these lines on its shards.\n"
    )
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="saved by autopar plan --output or plan.save")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default standard output")


def run(arguments: argparse.Namespace) -> int:
    from autopar.plans import Plan

    source = Plan.load(arguments.plan).source
    if arguments.output is None:
        print(source, end="")
        return 0
    check_writable([arguments.output])
    arguments.output.write_text(source)
    print(f"{arguments.output}: {source.count(chr(10))} lines")
    return 0
