"""The main program of an emitted file: a training step on every process of a job."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.mesh import Mesh
from autopar.sharding.spec import ShardingSpec
from autopar.spmd.ranks import ProcessRank

Row = tuple[str, str, str, Sequence[int], str]
"""Kind, name, dtype, global shape and spec of an input or result."""

STATE = "--state"
"""Key among the given tensors that shows that parameters were given."""

FUNCTIONS = ("forward", "backward", "accumulate", "once")
SECTION = re.compile(r'\bsection\((".*")\)')

MISSING = "Save it under this name in the file for --state."
UNSAVED = "Save it too: torch.save({**model.state_dict(), **dict(model.named_buffers())}, 'model.pt')"


def main(program: Mapping[str, Any]) -> None:
    """Join the job that torchrun started, take steps, and print the outputs.

    Args:
        program: the namespace of an emitted module.
    """
    what = "the global batch, micro-batches concatenated" if "SUMS" in program else "the global batch"
    arguments = read_arguments(program["__doc__"], what)
    rank = ProcessRank(join(tuple(program["MESH"][0]), tuple(program["MESH"][1])))
    torch.manual_seed(arguments.seed)
    given = read_files(arguments)
    take_steps(lambda: _step_naming_module_in_errors(program, rank, given, arguments.seed), arguments)


def read_arguments(doc: str, batch: str) -> argparse.Namespace:
    """Read the command line.

    Args:
        batch: what the file of the batch holds.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--state", help="file of torch.save(model.state_dict(), ...); default random values")
    parser.add_argument("--batch", help=f"file of torch.save({{name: tensor}}, ...), {batch}; default random values")
    parser.add_argument("--out", help="file for global outputs, gradients and buffers, written by rank 0")
    parser.add_argument("--seed", type=int, default=0, help="seed of dropout and of random values")
    parser.add_argument("--steps", type=int, default=1, help="steps to take; parameters do not change")
    return parser.parse_args()


def read_files(arguments: argparse.Namespace) -> dict[str, Tensor]:
    """Read the tensors that the user gives."""
    given: dict[str, Tensor] = {}
    for path in (arguments.state, arguments.batch):
        given |= torch.load(path, map_location="cpu", weights_only=True) if path else {}
    if arguments.state:
        given[STATE] = torch.empty(0)
    return given


def take_steps(step: Callable[[], dict[str, dict[str, Tensor]]], arguments: argparse.Namespace) -> None:
    """Take steps, print their scalar outputs, and write the results of the last to a file if asked."""
    result: dict[str, dict[str, Tensor]] = {}
    for _ in range(arguments.steps):
        start = time.perf_counter()
        result = step()
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
        name_module(error, program["__file__"])
        raise


def name_module(error: BaseException, filename: str) -> None:
    """Add the model's module to an error of a program."""
    line, module = failed_at(error, filename, Path(filename).read_text())
    if line:
        place = f"{module!r} of the model" if module else "the model's own forward"
        annotate(error, f"This is line {line} of the program, {place}")


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


def join(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Join the job, and return the program's mesh."""
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
    return init_device_mesh(kind, shape, mesh_dim_names=names)


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
            name: whole(t, shape, spec, rank)
            for t, (kind, name, _, shape, spec) in zip(gradients, program["GRADIENTS"], strict=True)
            if kind == "gradient"
        }
    return {"outputs": outputs, "grads": grads, "buffers": buffers}


def _part(program: Mapping[str, Any], given: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return a micro-batch's slice of inputs in which all micro-batches are concatenated along dim 0."""
    count, found = program.get("MICRO_BATCHES", 1), {}
    for kind, name, _, shape, _ in program["INPUTS"]:
        value = given.get(name) if kind == "input" else None
        if value is not None and count > 1 and len(shape) and tuple(value.shape) == (count * shape[0], *shape[1:]):
            found[name] = value[number * shape[0] : (number + 1) * shape[0]]
    return found


def _forward(
    program: Mapping[str, Any], rank: ProcessRank, held: Mapping[str, Tensor], seed: int, sums: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """Return global outputs, global new buffers, and the inputs of the backward, which include ``sums``."""
    fed = [_input_shard(row, rank, held, seed) for row in program["INPUTS"]]
    if "ONCE" in program:
        fed += program["once"](rank, [_input_shard(row, rank, held, seed) for row in program["ONCE"]])
    made = program["forward"](rank, fed)
    results = made[: len(program["OUTPUTS"])]
    back = [*made[len(results) :]]
    del made
    found = [whole(t, row[3], row[4], rank) for t, row in zip(results, program["OUTPUTS"], strict=True)]
    rows = [(row[0], row[1], t) for row, t in zip(program["OUTPUTS"], found, strict=True)]
    back += [
        sums.pop(row[1]) if row[0] == "accumulator" and row[1] in sums else _tangent(row, rank)
        for row in program["TANGENTS"]
    ]
    outputs = {name: t for kind, name, t in rows if kind == "output"}
    return outputs, {name: t for kind, name, t in rows if kind == "mutation"}, back


def _input_shard(row: Row, rank: ProcessRank, given: Mapping[str, Tensor], seed: int) -> Tensor:
    """Return this rank's shard of an input."""
    if row[0] == "seed":
        return torch.tensor(seed, device=rank.device)
    return shard(value_of(row, given), row, rank)


def value_of(row: Row, given: Mapping[str, Tensor]) -> Tensor:
    """Return the global value of an input: a given one, or random numbers where that will do."""
    kind, name, dtype, shape, _ = row
    if name in given:
        return given[name]
    if kind in ("buffer", "constant") or (kind == "parameter" and STATE in given):
        raise SystemExit(f"The {kind} {name} is in none of the given files. {UNSAVED if kind == 'buffer' else MISSING}")
    wanted = getattr(torch, dtype)
    random = torch.randn(shape).mul_(0.02 if kind == "parameter" else 1.0)
    return random.to(wanted) if wanted.is_floating_point else torch.zeros(shape, dtype=wanted)


def shard(value: Tensor, row: Row, rank: ProcessRank) -> Tensor:
    """Return this rank's shard of a global value."""
    _, name, dtype, shape, spec = row
    if tuple(value.shape) != tuple(shape):
        raise SystemExit(f"{name} has shape {tuple(value.shape)}, but the program is for {tuple(shape)}.")
    part = value[ShardingSpec.parse(spec).local_slices(tuple(shape), rank.mesh, rank.coordinate)]
    return part.detach().to(rank.device, getattr(torch, dtype)).contiguous().clone()


def _tangent(row: Row, rank: ProcessRank) -> Tensor:
    """Return ones for the gradient of an output, and zeros to start an accumulator."""
    kind, _, dtype, shape, spec = row
    local = ShardingSpec.parse(spec).local_shape(tuple(shape), rank.mesh, rank.coordinate)
    fill = 0 if kind == "accumulator" else 1
    return torch.full(local, fill, dtype=getattr(torch, dtype), device=rank.device)


def whole(
    shard: Tensor, shape: Sequence[int], spec: str, rank: ProcessRank, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the global tensor from the shards of all ranks.

    Args:
        group: the ranks of the mesh, if others are in the job.
    """
    sharding = ShardingSpec.parse(spec)
    if not sharding.axes or rank.mesh.size == 1:
        return shard.detach().cpu()
    found: list[Any] = [None] * rank.mesh.size
    dist.all_gather_object(found, shard.detach().cpu(), group=group)
    made = torch.zeros(tuple(shape), dtype=shard.dtype)
    for position in reversed(range(rank.mesh.size)):
        at = sharding.local_slices(tuple(shape), rank.mesh, rank.mesh.coordinate(position))
        made[at] = found[position]
    return made
