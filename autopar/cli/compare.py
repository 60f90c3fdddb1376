"""``autopar compare``: the chosen plan beside DDP, ZeRO, tensor parallel and their like."""

from __future__ import annotations

import argparse

from autopar.cli import plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_arguments(parser, report=False)


def run(arguments: argparse.Namespace) -> int:
    from autopar.comparison import compare

    model, inputs = plan.asked_model(arguments)
    print(compare(model, inputs, **plan.options_of(arguments)))
    return 0
