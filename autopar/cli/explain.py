"""``autopar explain``: show what each spec of a tensor would cost, and what the constraints cost."""

from __future__ import annotations

import argparse

from autopar.cli import plan
from autopar.cli.progress import told

EXAMPLES = """\
examples:
  autopar explain gpt2 --mesh 8 --cluster dgx-h100 --name transformer.wte.weight
  autopar explain gpt2 --mesh 2x4 --cluster dgx-h100 --constraint "lm_head.weight=S0R"

Each row is the best plan with that spec forced, so its cost includes every change that the spec causes elsewhere. Names
are the keys of plan.specs: parameters, input:NAME, output:NAME, modules, and nodes of the graph.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_arguments(parser, report=False)
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="a parameter, input:NAME, output:NAME, module or node; --name may be omitted if NAME comes last",
    )
    parser.set_defaults(last="name")


def run(arguments: argparse.Namespace) -> int:
    made = plan.planned(arguments)
    with told() as progress:
        progress("explain: plan again with each spec")
        text = made.explain(arguments.name)
    print(text)
    return 0
