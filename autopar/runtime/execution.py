"""Running a compiled program under autograd: one forward, one backward, and everything freed as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir import Input, Output
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec
from autopar.spmd.placements import to_placements
from autopar.spmd.ranks import Rank

Local = Callable[[Any, list[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class Executable:
    """A compiled program on this rank.

    Args:
        forward: ``forward(rank, inputs) -> (*results, *saved)``; empties the list ``inputs``.
        backward: ``backward(rank, saved_and_tangents) -> gradients``; empties its list.
        inputs: meaning and spec of each forward input.
        results: meaning, spec and global shape of each result before the saved tensors.
        tangents: names of the outputs whose gradients the backward takes, in order.
        gradients: meaning, spec and global shape of each gradient.
        whole: outputs given to the caller as plain tensors, by name; others are DTensors.
    """

    forward: Local
    backward: Local
    inputs: tuple[tuple[Input, ShardingSpec], ...]
    results: tuple[tuple[Output, ShardingSpec, tuple[int, ...]], ...]
    tangents: tuple[tuple[Input, ShardingSpec], ...]
    gradients: tuple[tuple[Output, ShardingSpec, tuple[int, ...]], ...]
    whole: frozenset[str]


class Host(Protocol):
    """What execution needs of the module that it runs for."""

    rank: Rank
    mesh: Mesh
    device_mesh: DeviceMesh

    def every_tangent(self) -> Executable:
        """The variant whose backward takes the gradient of every output."""
        ...


@dataclass
class Run:
    """One forward and what its backward needs. Autograd's context holds it; ``saved`` is emptied by the backward."""

    host: Host
    executable: Executable
    operands: tuple[Any, ...]
    saved: list[Any]
    done: bool = False


def as_dtensor(local: Tensor, spec: ShardingSpec, shape: Sequence[int], host: Host) -> DTensor:
    """Wrap this rank's shard of a tensor of global ``shape``."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, host.device_mesh, to_placements(spec, host.mesh, shape), run_check=False,
        shape=torch.Size(shape), stride=stride,
    )  # fmt: skip


def local_of(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def forward_values(host: Host, executable: Executable, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Run the forward. Returns outputs, mutations and saved tensors."""
    results = executable.forward(host.rank, [local_of(o) for o in operands])
    n = len(executable.results)
    outputs, mutations = [], []
    for (output, spec, shape), value in zip(executable.results, results[:n], strict=True):
        if output.kind == "mutation":
            mutations.append(value)
        elif output.name in executable.whole:
            outputs.append(value)
        else:
            outputs.append(as_dtensor(value, spec, shape, host))
    return outputs, mutations, list(results[n:])


class Step(torch.autograd.Function):
    """The whole program as one autograd node, from parameters and inputs to outputs."""

    @staticmethod
    def forward(ctx: Any, host: Host, executable: Executable, sink: list[Any], *operands: Any) -> tuple[Any, ...]:
        outputs, mutations, saved = forward_values(host, executable, operands)
        sink.extend(mutations)
        ctx.run = Run(host, executable, operands, saved)
        ctx.set_materialize_grads(False)
        floating = [o for o in outputs if isinstance(o, Tensor) and not o.is_floating_point()]
        ctx.mark_non_differentiable(*floating)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        run: Run = ctx.run
        names = [o.name for o, _, _ in run.executable.results if o.kind == "output"]
        given = {name: t for name, t in zip(names, tangents, strict=True) if t is not None}
        gradients = _gradients(run, given)
        return (None, None, None, *gradients)


def _gradients(run: Run, given: dict[str, Any]) -> list[Any]:
    """Gradients of every operand, None where there is none."""
    if run.done:
        raise AutoparError(
            "This loss was already used for a backward, and its activations are freed.",
            found="a second backward through the same step",
            hint="call the model again; retain_graph=True cannot keep what the plan frees.",
        )
    run.done = True
    executable, host = run.executable, run.host
    if set(given) - {i.name for i, _ in executable.tangents}:
        run.saved.clear()
        executable = host.every_tangent()
        _, _, run.saved = forward_values(host, executable, run.operands)
    feeds = run.saved
    run.saved = []
    shapes = {o.name: (s, shape) for o, s, shape in executable.results}
    like = next((o for o in (local_of(o) for o in run.operands) if isinstance(o, Tensor) and o.is_floating_point()), None)
    for meaning, spec in executable.tangents:
        feeds.append(_tangent(given.get(meaning.name), spec, shapes[meaning.name][1], host, like))
    made = executable.backward(host.rank, feeds)
    by_name = {(o.name): (g, s, shape) for (o, s, shape), g in zip(executable.gradients, made, strict=True)}
    return [_gradient_of(meaning, by_name, host) for meaning, _ in executable.inputs]


def _tangent(given: Any, spec: ShardingSpec, shape: Sequence[int], host: Host, like: Tensor | None) -> Tensor:
    """A tangent as the program takes it, zeros where the caller's loss does not use the output."""
    local = spec.local_slices(tuple(shape), host.mesh, host.rank.coordinate)
    if given is None:
        sizes = [s.stop - s.start for s in local]
        return torch.zeros(sizes, dtype=like.dtype if like is not None else None, device=like.device if like is not None else None)
    if isinstance(given, DTensor):
        return given.redistribute(host.device_mesh, to_placements(spec, host.mesh, shape)).to_local()
    return given[local] if tuple(given.shape) == tuple(shape) else given


def _gradient_of(meaning: Input, made: dict[str, Any], host: Host) -> Any:
    if meaning.kind == "parameter" and meaning.name in made:
        gradient, spec, shape = made[meaning.name]
        return as_dtensor(gradient, spec, shape, host)
    if meaning.kind == "input" and f"input:{meaning.name}" in made:
        return made[f"input:{meaning.name}"][0]
    return None
