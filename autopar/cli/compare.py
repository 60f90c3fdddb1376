"""``autopar compare``: compare the plan with DDP, ZeRO, tensor parallel and other baselines."""

from __future__ import annotations

import argparse

from autopar.cli import plan
from autopar.cli.progress import told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_arguments(parser, report=False)
    parser.epilog = (
        "example:\n  autopar compare gpt2 --mesh 2x4 --cluster dgx-h100\n\n"
        "The same solver completes every baseline, and the same cost model prices it.\n"
    )


def run(arguments: argparse.Namespace) -> int:
    from autopar.comparison import compare

    with told() as progress:
        options, where = plan.options_of(arguments), plan.where_of(arguments)
        model, inputs = plan.asked_model(arguments)
        compared = compare(model, inputs, *where, progress=progress, **options)
    print(compared)
    return 0
