"""``autopar diff``: show what differs between two saved plans."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example:\n  autopar plan gpt2 --mesh 8 --cluster dgx-h100 --output a.json\n"
        "  autopar plan gpt2 --mesh 2x4 --cluster dgx-h100 --output b.json\n  autopar diff a.json b.json\n"
    )
    parser.add_argument("this", type=Path, metavar="PLAN.json", help="saved by autopar plan --output or plan.save")
    parser.add_argument("other", type=Path, metavar="OTHER.json", help="another saved plan")


def run(arguments: argparse.Namespace) -> int:
    from autopar.plans.pipeline import load_plan

    print(load_plan(arguments.this).diff(load_plan(arguments.other)))
    return 0
