"""``autopar emit``: write the Python program that every rank of a saved plan runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.plan import check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example:\n  autopar plan gpt2 --mesh 2x4 --cluster dgx-h100 --output plan.json\n"
        "  autopar emit plan.json --output program.py\n\n"
        "The file of --output runs under torchrun and needs only torch. Standard output gets the bare program,\n"
        "plan.source. You may edit either and run it instead: autoparallelize(..., source=FILE).\n"
    )
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="saved by autopar plan --output or plan.save")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write the program (default standard output)"
    )


def run(arguments: argparse.Namespace) -> int:
    from autopar.codegen import check_text
    from autopar.plans.pipeline import PipelinePlan, load_plan

    plan = load_plan(arguments.plan)
    if arguments.output is None:
        for stage in plan.stages if isinstance(plan, PipelinePlan) else (plan,):
            check_text(stage.source)
            print(stage.source, end="")
        return 0
    check_writable([arguments.output])
    plan.emit(arguments.output)
    print(f"{arguments.output}: torchrun --nproc-per-node {plan.mesh.size} {arguments.output}")
    return 0
