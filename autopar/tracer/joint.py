"""Traces the exported forward into a normalized joint forward and backward graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import JointInput, JointOutput, joint_graph, storage_key, torch_decompositions
from autopar.ops.registration import HALF
from autopar.structure import Structure
from autopar.tracer.normalize import Normalizing

aten = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """The joint graph with the meaning of its inputs and outputs, under the model's own names of parameters."""

    graph_module: fx.GraphModule
    inputs: list[JointInput]
    outputs: list[JointOutput | None]
    constants: Mapping[str, torch.Tensor]
    loss: int | None
    differentiable: tuple[int, ...]


class Rewritten(nn.Module):
    """The exported graph as a module of its own parameters, run op by op by ``Normalizing``.

    Differentiable outputs that alias each other or an input are cloned, since torch gives them no tangent otherwise;
    those in ``detached`` get no tangent either.
    """

    def __init__(self, program: torch.export.ExportedProgram, model: nn.Module, detached: Collection[int]) -> None:
        super().__init__()
        self._program = program.graph_module
        self._detached = detached
        self.names: dict[str, str] = {}
        self._lifted: list[str | None] = []
        self.constants: dict[str, torch.Tensor] = {}
        canonical = {id(p): n for n, p in (*model.named_parameters(), *model.named_buffers())}
        for spec in program.graph_signature.input_specs:
            kind = spec.kind.name
            if kind == "USER_INPUT":
                self._lifted.append(None)
                continue
            target = str(spec.target)
            if kind in ("PARAMETER", "BUFFER"):
                tensor = _lookup(model, target.removeprefix("model."))
                fqn = canonical.get(id(tensor), target.removeprefix("model."))
            else:
                tensor, fqn = program.constants[target], f"constant.{target}"
                self.constants[fqn] = tensor
            self._lifted.append(self._register(fqn, tensor))

    def _register(self, fqn: str, tensor: torch.Tensor) -> str:
        flat = next((f for f, n in self.names.items() if n == fqn), f"t{len(self.names)}")
        if flat not in self.names:
            self.names[flat] = fqn
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(flat, tensor)
            else:
                self.register_buffer(flat, tensor)
        return flat

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        *users, seed = inputs
        remaining = iter(users)
        lifted = [getattr(self, name) if name is not None else next(remaining) for name in self._lifted]
        outputs = Normalizing(self._program, seed).run(*lifted)
        return separate(outputs, (*lifted, seed), self._detached)


def _lookup(model: nn.Module, fqn: str) -> torch.Tensor:
    owner, _, name = fqn.rpartition(".")
    tensor = getattr(model.get_submodule(owner), name)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def separate(outputs: Sequence[Any], inputs: Sequence[torch.Tensor], detached: Collection[int]) -> tuple[Any, ...]:
    """Return the outputs, none of which aliases another or an input, with those at positions ``detached`` detached."""
    taken = {storage_key(t) for t in inputs}
    result: list[Any] = []
    for i, out in enumerate(outputs):
        if isinstance(out, torch.Tensor):
            if i in detached:
                out = out.detach()
            if storage_key(out) in taken:
                out = out.clone()
            taken.add(storage_key(out))
        result.append(out)
    return tuple(result)


def loss_of(returned: Structure, values: Sequence[Any], differentiable: Sequence[bool]) -> int | None:
    """Return the position of the loss among the outputs, or None.

    It is a differentiable scalar that is called loss, comes first in a tuple or dataclass, or is the only output. Other
    scalars, such as a learned temperature, are plain outputs.
    """
    scalars = [i for i, (v, d) in enumerate(zip(values, differentiable, strict=True)) if d and v.ndim == 0]
    named = [i for i in scalars if returned.paths[i].split(".")[-1] == "loss"]
    placed = [i for i in scalars if returned.paths[i] == returned.first or len(returned.paths) == 1]
    return next(iter(named or placed), None)


def _mean(
    x: torch.Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute a mean as a sum and a division, which sharding needs; half precision could not hold the sum."""
    dims = list(range(x.ndim)) if dims is None or dims == [] else list(dims)
    count = 1
    for d in dims:
        count *= x.shape[d] if x.ndim else 1
    kind = dtype or x.dtype
    wide = torch.float32 if kind in HALF else dtype
    total: torch.Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=wide)
    return (total / count).to(kind)


def _mean_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _mean(x, None, dtype=dtype)


def _sum_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Sum half precision in float32: for one number that costs nothing, and a loss should be rounded only once."""
    if x.dtype not in HALF or dtype is not None:
        return NotImplemented
    total: torch.Tensor = aten.sum.default(x, dtype=torch.float32)
    return total.to(x.dtype)


def _conjugated(x: torch.Tensor) -> torch.Tensor:
    """Conjugate eagerly: a graph does not show whether a conjugate is a view, and some ops do not take such views."""
    result: torch.Tensor = aten._conj_physical.default(x)
    return result


def _diagonal_copy(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """Decompose the op of torch.diag into a view, which has a rule, and a copy."""
    return x.diagonal(offset, dim1, dim2).clone()


def _det(a: torch.Tensor) -> Any:
    return torch.ops.autopar.linalg_det(a, contiguous=a.is_contiguous())


def _slogdet(a: torch.Tensor) -> Any:
    return torch.ops.autopar.linalg_slogdet(a, contiguous=a.is_contiguous())


def _solve(a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    return torch.ops.autopar.linalg_solve(a, b, left=left, contiguous=a.is_contiguous())


DECOMPOSITIONS: dict[Any, Any] = {
    **torch_decompositions(
        aten.rot90.default,
        aten.block_diag.default,
        aten.addr.default,
        aten.renorm.default,
        aten.channel_shuffle.default,
        aten.linalg_cross.default,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor,
        aten.affine_grid_generator.default,
    ),
    aten._conj.default: _conjugated,
    aten.diagonal_copy.default: _diagonal_copy,
    aten.mean.dim: _mean,
    aten.mean.default: _mean_all,
    aten.sum.default: _sum_all,
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
    aten._linalg_solve_ex.default: _solve,
}
"""Ops that are decomposed into others, which have rules."""


def joint_of(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    seed: torch.Tensor,
    loss: int | None,
    differentiable: tuple[int, ...],
    detached: Collection[int],
) -> Joint:
    """Trace the joint graph, whose backward starts from the outputs that are not ``detached``."""
    module = Rewritten(program, model, detached)
    graph_module, ins, outs = joint_graph(module, (*inputs, seed), DECOMPOSITIONS)
    rename = module.names

    def named(x: Any) -> Any:
        return type(x)(x.kind, rename.get(x.target, x.target)) if x is not None else None

    inputs_named, outputs_named = [named(i) for i in ins], [named(o) for o in outs]
    return Joint(graph_module, inputs_named, outputs_named, module.constants, loss, differentiable)
