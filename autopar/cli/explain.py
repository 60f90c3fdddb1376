"""``autopar explain``: what each spec of a tensor would cost, and what the constraints cost."""

from __future__ import annotations

import argparse

from autopar.cli import plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_arguments(parser, report=False)
    parser.add_argument(
        "--name", default="", metavar="NAME", help="a parameter, input:NAME, output:NAME, module or node"
    )


def run(arguments: argparse.Namespace) -> int:
    from autopar import api

    model, inputs = plan.asked_model(arguments)
    print(api.plan(model, inputs, **plan.options_of(arguments)).explain(arguments.name))
    return 0
