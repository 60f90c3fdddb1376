"""The main program of an emitted file: a training step on every process of a job."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.mesh import Mesh
from autopar.sharding.spec import ShardingSpec
from autopar.spmd.ranks import ProcessRank

Row = tuple[str, str, str, Sequence[int], str]
"""Kind, name, dtype, global shape and spec of an input or result."""

STATE = "--state"
"""Key among the given tensors that shows that parameters were given."""

FUNCTIONS = ("forward", "backward", "accumulate")
SECTION = re.compile(r'\bsection\((".*")\)')

MISSING = "Save it under this name in the file for --state."
UNSAVED = "Save it too: torch.save({**model.state_dict(), **dict(model.named_buffers())}, 'model.pt')"


def main(program: Mapping[str, Any]) -> None:
    """Join the job that torchrun started, take steps, and print the outputs.

    Args:
        program: the namespace of an emitted module.
    """
    parser = argparse.ArgumentParser(description=program["__doc__"], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--state", help="file of torch.save(model.state_dict(), ...); default random values")
    what = "the global batch, micro-batches concatenated" if "SUMS" in program else "the global batch"
    parser.add_argument("--batch", help=f"file of torch.save({{name: tensor}}, ...), {what}; default random values")
    parser.add_argument("--out", help="file for global outputs, gradients and buffers, written by rank 0")
    parser.add_argument("--seed", type=int, default=0, help="seed of dropout and of random values")
    parser.add_argument("--steps", type=int, default=1, help="steps to take; parameters do not change")
    arguments = parser.parse_args()
    rank = join(tuple(program["MESH"][0]), tuple(program["MESH"][1]))
    torch.manual_seed(arguments.seed)
    given: dict[str, Tensor] = {}
    for path in (arguments.state, arguments.batch):
        given |= torch.load(path, map_location="cpu", weights_only=True) if path else {}
    if arguments.state:
        given[STATE] = torch.empty(0)
    result: dict[str, dict[str, Tensor]] = {}
    for _ in range(arguments.steps):
        start = time.perf_counter()
        result = _step_naming_module_in_errors(program, rank, given, arguments.seed)
        if dist.get_rank() == 0:
            shown = ", ".join(f"{n} {t.item():.6f}" for n, t in result["outputs"].items() if t.numel() == 1)
            print(f"{shown or 'done'}  ({(time.perf_counter() - start) * 1e3:.1f} ms)", flush=True)  # noqa: T201
    if arguments.out and dist.get_rank() == 0:
        torch.save(result, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


def _step_naming_module_in_errors(
    program: Mapping[str, Any], rank: ProcessRank, given: Mapping[str, Tensor], seed: int
) -> dict[str, dict[str, Tensor]]:
    """Run ``step``, and add the model's module to its errors."""
    try:
        return step(program, rank, given, seed)
    except Exception as error:
        line, module = failed_at(error, program["__file__"], Path(program["__file__"]).read_text())
        if line:
            place = f"{module!r} of the model" if module else "the model's own forward"
            annotate(error, f"This is line {line} of the program, {place}")
        raise


def failed_at(error: BaseException, filename: str, source: str) -> tuple[int, str]:
    """Return the line of a program at which it failed (0 for none), and the model's module of that op."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    own = [f for f in frames if f.name in FUNCTIONS] or frames
    line = (own[-1].lineno if own else 0) or 0
    for text in reversed(source.splitlines()[:line]):
        found = SECTION.search(text)
        if found or text.startswith("def "):
            return line, json.loads(found.group(1)) if found else ""
    return line, ""


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an error."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def join(shape: tuple[int, ...], names: tuple[str, ...]) -> ProcessRank:
    """Join the job, and return this process as a rank of the program's mesh."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    size = Mesh(shape, names).size
    if dist.get_world_size() != size:
        raise SystemExit(
            f"This program is for {size} processes, but the job has {dist.get_world_size()}. "
            f"Use torchrun --nproc-per-node {size} ..."
        )
    return ProcessRank(init_device_mesh(kind, shape, mesh_dim_names=names))


def step(
    program: Mapping[str, Any], rank: ProcessRank, given: Mapping[str, Tensor], seed: int
) -> dict[str, dict[str, Tensor]]:
    """Run forward and backward of every micro-batch. Gradients are those of the sum of all losses.

    Returns:
        Global gradients, and global outputs and new buffers of the last micro-batch, by name.
    """
    count = program.get("MICRO_BATCHES", 1)
    held = {**program["CONSTANTS"], **given}
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for number in range(count - 1):
            _, buffers, back = _forward(program, rank, {**held, **_part(program, given, number)}, seed + number, sums)
            made = zip(program["SUMS"], program["accumulate"](rank, back), strict=True)
            sums = {name: t for (kind, name), t in made if kind == "accumulator"}
            held |= buffers
        held |= _part(program, given, count - 1)
        outputs, buffers, back = _forward(program, rank, held, seed + count - 1, sums)
        gradients = program["backward"](rank, back)
        grads = {
            name: _whole(t, shape, spec, rank)
            for t, (kind, name, _, shape, spec) in zip(gradients, program["GRADIENTS"], strict=True)
            if kind == "gradient"
        }
    return {"outputs": outputs, "grads": grads, "buffers": buffers}


def _part(program: Mapping[str, Any], given: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return a micro-batch's slice of inputs in which all micro-batches are concatenated along dim 0."""
    count, found = program.get("MICRO_BATCHES", 1), {}
    for kind, name, _, shape, _ in program["INPUTS"]:
        whole = given.get(name) if kind == "input" else None
        if whole is not None and count > 1 and len(shape) and tuple(whole.shape) == (count * shape[0], *shape[1:]):
            found[name] = whole[number * shape[0] : (number + 1) * shape[0]]
    return found


def _forward(
    program: Mapping[str, Any], rank: ProcessRank, held: Mapping[str, Tensor], seed: int, sums: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """Return global outputs, global new buffers, and the inputs of the backward, which include ``sums``."""
    made = program["forward"](rank, [_input_shard(row, rank, held, seed) for row in program["INPUTS"]])
    results = made[: len(program["OUTPUTS"])]
    back = [*made[len(results) :]]
    del made
    whole = [_whole(t, row[3], row[4], rank) for t, row in zip(results, program["OUTPUTS"], strict=True)]
    rows = [(row[0], row[1], t) for row, t in zip(program["OUTPUTS"], whole, strict=True)]
    back += [
        sums.pop(row[1]) if row[0] == "accumulator" and row[1] in sums else _tangent(row, rank)
        for row in program["TANGENTS"]
    ]
    outputs = {name: t for kind, name, t in rows if kind == "output"}
    return outputs, {name: t for kind, name, t in rows if kind == "mutation"}, back


def _input_shard(row: Row, rank: ProcessRank, given: Mapping[str, Tensor], seed: int) -> Tensor:
    """Return this rank's shard of an input."""
    kind, name, dtype, shape, spec = row
    if kind == "seed":
        return torch.tensor(seed, device=rank.device)
    whole = given.get(name)
    if whole is None and (kind in ("buffer", "constant") or (kind == "parameter" and STATE in given)):
        raise SystemExit(f"The {kind} {name} is in none of the given files. {UNSAVED if kind == 'buffer' else MISSING}")
    if whole is None:
        wanted = getattr(torch, dtype)
        random = torch.randn(shape).mul_(0.02 if kind == "parameter" else 1.0)
        whole = random.to(wanted) if wanted.is_floating_point else torch.zeros(shape, dtype=wanted)
    if tuple(whole.shape) != tuple(shape):
        raise SystemExit(f"{name} has shape {tuple(whole.shape)}, but the program is for {tuple(shape)}.")
    part = whole[ShardingSpec.parse(spec).local_slices(tuple(shape), rank.mesh, rank.coordinate)]
    return part.detach().to(rank.device, getattr(torch, dtype)).contiguous().clone()


def _tangent(row: Row, rank: ProcessRank) -> Tensor:
    """Return ones for the gradient of an output, and zeros to start an accumulator."""
    kind, _, dtype, shape, spec = row
    local = ShardingSpec.parse(spec).local_shape(tuple(shape), rank.mesh, rank.coordinate)
    fill = 0 if kind == "accumulator" else 1
    return torch.full(local, fill, dtype=getattr(torch, dtype), device=rank.device)


def _whole(shard: Tensor, shape: Sequence[int], spec: str, rank: ProcessRank) -> Tensor:
    """Return the global tensor from the shards of all ranks."""
    sharding = ShardingSpec.parse(spec)
    if not sharding.axes or dist.get_world_size() == 1:
        return shard.detach().cpu()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, shard.detach().cpu())
    whole = torch.zeros(tuple(shape), dtype=shard.dtype)
    for position in reversed(range(rank.mesh.size)):
        at = sharding.local_slices(tuple(shape), rank.mesh, rank.mesh.coordinate(position))
        whole[at] = found[position]
    return whole
