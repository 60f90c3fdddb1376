"""``autopar plan``: plan a model and print the plan."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from autopar.cli import models
from autopar.cli.progress import told
from autopar.cost_models import optimizer_state_bytes
from autopar.errors import AutoparError
from autopar.pipelines.request import AUTO, Pipeline
from autopar.plans.table import trace_table

EXAMPLES = """\
examples:
  autopar plan gpt2 --mesh 2x4 --cluster dgx-h100
  autopar plan llama-3-8b --mesh 8 --cluster dgx-h100 --batch 8x4096 --budget 70GiB --report plan.html
  autopar plan config.json --mesh 32x8 --cluster my-cluster.toml --output plan.json
  autopar plan train:model_and_inputs --mesh dp=2,tp=4 --constraint "lm_head.weight=S0R"
  autopar plan llama-3-8b --mesh pp=4,dp=2,tp=2 --cluster dgx-h100 --batch 64x4096 --pipeline micro_batches=16

A mesh arranges the devices along axes. 32x8 is 32 groups of 8; the last axis varies fastest, so with 8 devices per node
it lies inside nodes. In a spec, S0R means that dim 0 is cut by mesh axis 0 and dim 1 is whole; see docs/explanation.
Ctrl-C during the search prints the best plan so far, with its gap to the bound.
"""


def add_arguments(parser: argparse.ArgumentParser, *, report: bool = True) -> None:
    """Add the planning arguments; with ``report`` also those for what to do with the plan."""
    models.add_arguments(parser)
    parser.add_argument(
        "--mesh", metavar="NxM", help="shape of the mesh, or dp=2,tp=4 (default: chosen for the cluster)"
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="dgx-h100, dgx-h100:32 (devices), or a file of autopar profile (default: this machine)",
    )
    parser.add_argument(
        "--budget",
        "--memory-budget",
        dest="memory_budget",
        metavar="SIZE",
        help="memory budget of each device, such as 60GiB (default: all of its memory)",
    )
    parser.add_argument("--mixed-precision", metavar="bf16|fp16", help="run every call under autocast")
    parser.add_argument("--optimizer", default="adamw", help="optimizer whose state is counted (default adamw)")
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar="GLOB=SPEC",
        help="force a spec such as S0R, or a style: column, row, shard, replicate; may be repeated",
    )
    parser.add_argument(
        "--pipeline",
        metavar="auto|N|KEY=VALUE,...",
        help="cut the model into stages: auto, their number, or stages=4,micro_batches=16,schedule=1f1b,chunks=2,"
        "split=model.layers.8+model.layers.16 (default: as the mesh says, whose axis pp is the pipeline)",
    )
    parser.add_argument(
        "--expert-room",
        type=_room,
        default="auto",
        metavar="X|auto|none",
        help="room of a rank for tokens of its experts, over the mean; none: tokens stay (default auto: 1.5)",
    )
    parser.add_argument(
        "--search", default="joint", help="search method: joint, two-stage, or baseline:NAME (default joint)"
    )
    parser.add_argument("--solver", default="auto", help="highs, cbc, or another solver that PuLP knows (default auto)")
    parser.add_argument(
        "--time-limit", type=_seconds, default=60.0, metavar="S", help="seconds for the solver (default 60)"
    )
    if report:
        parser.epilog = EXAMPLES
        parser.add_argument("--output", type=Path, metavar="FILE", help="save the plan as JSON")
        parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report that opens offline")
        parser.add_argument("--progress", action="store_true", help="print what each phase of the search found")
        parser.add_argument("--source", action="store_true", help="also print the local program")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds: write, say, 60")
    return seconds


def _room(text: str) -> float | str | None:
    if text in ("auto", "none"):
        return None if text == "none" else text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no room for experts: write, say, 1.5, auto or none") from None


def run(arguments: argparse.Namespace) -> int:
    check_writable([f for f in (arguments.output, arguments.report) if f is not None])
    plan = planned(arguments)
    print(plan)
    stages = getattr(plan, "stages", (plan,))
    if arguments.progress:
        print(*(f"\n{trace_table(stage)}" for stage in stages), sep="\n")
    if arguments.source:
        print(*(f"\n{stage.source}" for stage in stages), sep="\n")
    if arguments.output:
        plan.save(arguments.output)
    if arguments.report:
        plan.report(arguments.report)
    return 0


def planned(arguments: argparse.Namespace) -> Any:
    """The plan that the command line asks for; Ctrl-C ends the search with the best so far."""
    from autopar import api

    with told() as progress:
        # Mistakes in the options are reported before the model is loaded, which takes time.
        options, where = options_of(arguments), where_of(arguments)
        model, inputs = asked_model(arguments)
        return api.plan(model, inputs, *where, progress=progress, **options)


def check_writable(files: Sequence[Path]) -> None:
    """Check that the files can be written, before the slow part.

    Raises:
        AutoparError: if a file cannot be written.
    """
    for file in files:
        folder = file.parent
        if file.is_dir() or not folder.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise AutoparError(
                "The file cannot be written.",
                found=str(file),
                hint=f"check that the directory {folder} exists and is writable.",
            )


def asked_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model that the command names, and its inputs, on the meta device."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return models.load_model(arguments, meta=True)


def where_of(arguments: argparse.Namespace) -> tuple[object, str | None]:
    """The mesh and the cluster that the command names."""
    return mesh_of(arguments.mesh), arguments.cluster


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command says about planning, as `autopar.PlanOptions`."""
    return dict(
        memory_budget=arguments.memory_budget,
        optimizer=_optimizer(arguments.optimizer),
        constraints=constraints_of(arguments.constraint),
        mixed_precision=arguments.mixed_precision,
        search=arguments.search,
        time_limit=arguments.time_limit,
        solver=arguments.solver,
        pipeline=pipeline_of(arguments.pipeline),
        expert_room=arguments.expert_room,
    )


def pipeline_of(text: str | None) -> str | int | Pipeline | None:
    """Parse ``"auto"``, a number of stages, or ``"stages=4,micro_batches=16,split=a+b"``.

    Raises:
        AutoparError: if the text has none of these forms.
    """
    if text is None or text == AUTO:
        return text
    if text.isdecimal():
        return int(text)
    named = dict(part.partition("=")[::2] for part in text.split(","))
    known = {f.name for f in fields(Pipeline)} - {"two_phase"}
    if not named.keys() <= known or not all(named.values()):
        raise AutoparError(
            "--pipeline is no request for a pipeline.",
            found=text,
            hint="write auto, a number of stages, or --pipeline stages=4,micro_batches=16,schedule=1f1b.",
        )
    read: dict[str, Any] = {k: int(v) if v.isdecimal() else v for k, v in named.items()}
    if ("split" in read and "+" in str(read["split"])) or "." in str(read.get("split", "")):
        read["split"] = str(read["split"]).split("+")
    return Pipeline(**read)


def _optimizer(text: str) -> str | float:
    """Parse an optimizer's name, or a number of state bytes per element.

    Raises:
        AutoparError: if the text is neither.
    """
    try:
        return float(text)
    except ValueError:
        optimizer_state_bytes(text, 1, "float32")
        return text


def mesh_of(text: str | None) -> object:
    """Parse ``"2x4"``, ``"2,4"``, ``"(2, 4)"`` or ``"dp=2,tp=4"`` into the mesh argument of `autopar.plan`.

    Raises:
        AutoparError: if the text has none of these forms.
    """
    if text is None:
        return None
    text = re.sub(r"[\s()]", "", text)
    if re.fullmatch(r"\d+(x\d+)*", text):
        text = text.replace("x", ",")
    parts = [part.partition("=") for part in text.split(",")]
    named = all(sign for _, sign, _ in parts)
    sizes = [size if named else name for name, sign, size in parts if named or not sign]
    if len(sizes) != len(parts) or not all(size.isdecimal() and int(size) for size in sizes):
        raise AutoparError("--mesh is not a mesh shape.", found=text, hint="write --mesh 2x4 or --mesh dp=2,tp=4.")
    if named:
        return {name: int(size) for name, _, size in parts}
    return tuple(int(size) for size in sizes)


def constraints_of(texts: list[str]) -> dict[str, str]:
    """Parse ``GLOB=SPEC`` pairs.

    Raises:
        AutoparError: if one has no ``=``.
    """
    pairs = [text.rpartition("=") for text in texts]
    for text, (_, sign, _) in zip(texts, pairs, strict=True):
        if not sign:
            raise AutoparError(
                "--constraint is not a GLOB=SPEC pair.", found=text, hint='write --constraint "lm_head.weight=S0R".'
            )
    return {glob: spec for glob, _, spec in pairs}
