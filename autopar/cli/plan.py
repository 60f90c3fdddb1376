"""``autopar plan``: plan a model and print the plan."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from typing import Any

from autopar.cli import models
from autopar.errors import AutoparError


def add_arguments(parser: argparse.ArgumentParser, *, report: bool = True) -> None:
    """What says how to plan; with ``report`` also what to do with the plan."""
    models.add_arguments(parser)
    parser.add_argument("--mesh", metavar="NxM", help="its shape, or dp=2,tp=4; default chosen for the cluster")
    parser.add_argument("--cluster", metavar="NAME", help="dgx-h100, dgx-h100:32, or a file of autopar profile")
    parser.add_argument(
        "--budget", "--memory-budget", dest="memory_budget", metavar="SIZE",
        help="memory on each device, such as 60GiB; default all it has",
    )  # fmt: skip
    parser.add_argument("--mixed-precision", metavar="bf16|fp16", help="autocast around every call")
    parser.add_argument("--optimizer", default="adamw", help="whose state is counted (default adamw)")
    parser.add_argument(
        "--constraint", action="append", default=[], metavar="GLOB=SPEC",
        help="a spec such as S0R, or column, row, shard, replicate; may be repeated",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="for the solver (default 60)")
    if report:
        parser.add_argument("--output", metavar="FILE", help="save the plan as JSON")
        parser.add_argument("--source", action="store_true", help="print the local program too")


def run(arguments: argparse.Namespace) -> int:
    from autopar import api

    model, inputs = asked_model(arguments)
    plan = api.plan(model, inputs, **options_of(arguments))
    print(plan)
    if arguments.source:
        print(f"\n{plan.source}")
    if arguments.output:
        plan.save(arguments.output)
    return 0


def asked_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model that the command names, and its inputs, without values."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return models.load_model(arguments, meta=True)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command says about planning, as `autopar.plan` takes it."""
    return dict(
        mesh=mesh_of(arguments.mesh), cluster=arguments.cluster, memory_budget=arguments.memory_budget,
        optimizer=arguments.optimizer, constraints=constraints_of(arguments.constraint),
        mixed_precision=arguments.mixed_precision,
        time_limit=arguments.time_limit, progress=lambda stage: print(f"{stage} ...", file=sys.stderr),
    )  # fmt: skip


def mesh_of(text: str | None) -> object:
    """``"2x4"``, ``"2,4"`` or ``"dp=2,tp=4"`` as `autopar.plan` takes it.

    Raises:
        AutoparError: it is neither.
    """
    if text is None:
        return None
    if re.fullmatch(r"\d+(x\d+)*", text):
        text = text.replace("x", ",")
    parts = [part.partition("=") for part in text.split(",")]
    named = all(sign for _, sign, _ in parts)
    sizes = [size if named else name for name, sign, size in parts if named or not sign]
    if len(sizes) != len(parts) or not all(size.isdecimal() for size in sizes):
        raise AutoparError("--mesh is no shape.", found=text, hint="write --mesh 2x4 or --mesh dp=2,tp=4.")
    if named:
        return {name: int(size) for name, _, size in parts}
    return tuple(int(size) for size in sizes)


def constraints_of(texts: list[str]) -> dict[str, str]:
    """``GLOB=SPEC`` pairs.

    Raises:
        AutoparError: one has no ``=``.
    """
    pairs = [text.rpartition("=") for text in texts]
    for text, (_, sign, _) in zip(texts, pairs, strict=True):
        if not sign:
            raise AutoparError("--constraint is no pair.", found=text, hint='write --constraint "lm_head.weight=S0R".')
    return {glob: spec for glob, _, spec in pairs}
