"""The module that users train: their own, with its forward replaced by the compiled program.

Like FSDP2, the model's class is swapped for a subclass: attributes, methods, FQNs and ``isinstance`` stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.ir import Output
from autopar.mesh import Mesh
from autopar.runtime.execution import Executable, Step, forward_values
from autopar.sharding import ShardingSpec
from autopar.spmd.ranks import ProcessRank
from autopar.structure import Structure

MAX_VARIANTS = 16
"""Programs kept for other batch shapes and modes before the user is warned that each one costs a compilation."""


class Call(Protocol):
    """A bound call: its tensors and their names."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def structure(self) -> Structure: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Variant:
    """A compiled program with how its inputs are named and its outputs are put together.

    Args:
        build: from the list of output tensors to what the model returns.
        outputs: names of the outputs, in order.
        every_tangent: compiles the same program with a backward from every output.
        constants: tensors that the program holds as literals.
    """

    executable: Executable
    build: Callable[[Sequence[Any]], Any]
    outputs: tuple[str, ...]
    every_tangent: Callable[[], Executable]
    constants: Mapping[str, Tensor]


@dataclass
class State:
    """What a parallel module knows beyond its parameters.

    Args:
        bind: binds a call to the signature of the model's own forward.
        compile: makes the variant for a call of other shapes, or another mode.
        plan: the plan of the first variant.
    """

    model: nn.Module
    mesh: Mesh
    device_mesh: DeviceMesh
    bind: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Call]
    compile: Callable[[Call], Variant]
    plan: Any
    planned: Call
    specs: Mapping[str, ShardingSpec]
    local_batch: bool
    original_class: type[nn.Module] = nn.Module
    variants: dict[Any, Variant] = field(default_factory=dict)
    seed: int = 0
    calls: int = 0
    rank: ProcessRank = field(init=False)

    def __post_init__(self) -> None:
        self.rank = ProcessRank(self.device_mesh)

    @property
    def device(self) -> torch.device:
        """Where this rank's shards live."""
        kind = self.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """A copy of the model for capture takes no second runtime."""
        return self


@dataclass
class _VariantHost:
    """One call's view of the state, for autograd."""

    rank: ProcessRank
    mesh: Mesh
    device_mesh: DeviceMesh
    every_tangent: Callable[[], Executable]


class ParallelModule(nn.Module):
    """Mixed into the user's class; ``autoparallelize`` puts it there."""

    _autopar: State

    @property
    def plan(self) -> Any:
        """The plan that this module runs."""
        return self._autopar.plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run(self._autopar, args, kwargs)


def parallel_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``kind`` whose forward is the compiled program."""
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "_autopar_original": kind}
    return type(f"Parallel{kind.__name__}", (ParallelModule, kind), names)


def run(state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the compiled program as the model would be called."""
    call = state.bind(state.model, args, kwargs)
    variant = _variant(state, call)
    named = _named_tensors(state.model)
    inputs = dict(zip(call.names, call.tensors, strict=True))
    state.calls += 1
    # A fresh seed for every call, equal on all ranks without talking about it.
    seed = (state.seed * 0x9E3779B97F4A7C15 + state.calls) % 2**62
    operands = [_operand(m, s, state, named, inputs, variant, seed) for m, s in variant.executable.inputs]
    host = _VariantHost(state.rank, state.mesh, state.device_mesh, variant.every_tangent)
    mutations: list[Any] = []
    if torch.is_grad_enabled():
        outputs = list(Step.apply(host, variant.executable, mutations, *operands))
    else:
        outputs, mutations, _ = forward_values(host, variant.executable, operands)
    _write_back(variant, mutations, named)
    return variant.build(outputs)


def _operand(
    meaning: Any, spec: ShardingSpec, state: State, named: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor], variant: Variant, seed: int,
) -> Any:  # fmt: skip
    device = state.device
    if meaning.kind in ("parameter", "buffer"):
        return named[meaning.name]
    if meaning.kind == "seed":
        return torch.tensor(seed, dtype=torch.int64, device=device)
    if meaning.kind == "constant":
        return variant.constants[meaning.name].to(device)
    value = inputs[meaning.name].to(device)
    if state.local_batch or spec.is_replicated:
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value[spec.local_slices(tuple(value.shape), state.mesh, state.rank.coordinate)]


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _write_back(variant: Variant, mutations: Sequence[Any], named: Mapping[str, Tensor]) -> None:
    """Store the new values of buffers that the program changed (batch norm's statistics)."""
    changed: list[Output] = [o for o, _, _ in variant.executable.results if o.kind == "mutation"]
    with torch.no_grad():
        for output, value in zip(changed, mutations, strict=True):
            target = named[output.name]
            (target.to_local() if isinstance(target, DTensor) else target).copy_(value)


def _variant(state: State, call: Call) -> Variant:
    key = variant_key(state.model, call)
    if key not in state.variants:
        check_call(state.planned, call)
        if len(state.variants) >= MAX_VARIANTS:
            warnings.warn(
                f"{len(state.variants)} programs were compiled for batches of different shapes; pad batches to few sizes.",
                stacklevel=4,
            )
        state.variants[key] = state.compile(call)
    return state.variants[key]


def variant_key(model: nn.Module, call: Call) -> Any:
    """What a compiled program depends on: shapes, plain arguments, and which modules train."""
    tensors = tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in zip(call.names, call.tensors, strict=True))
    modes = tuple(m.training for m in model.modules())
    frozen = tuple(p.requires_grad for p in model.parameters())
    return tensors, call.structure.plain, modes, frozen


def check_call(planned: Call, call: Call) -> None:
    """Refuse inputs that the plan was not made for; only sizes may differ.

    Raises:
        InputError: another structure, rank or dtype.
    """
    if set(planned.names) != set(call.names):
        missing, new = set(planned.names) - set(call.names), set(call.names) - set(planned.names)
        raise InputError(
            "The inputs have another structure than the plan was made for.",
            found=f"missing {sorted(missing)}, new {sorted(new)}",
            hint="call the model with the arguments that meta_inputs had, or parallelize it with these.",
        )
    known = dict(zip(planned.names, planned.tensors, strict=True))
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.ndim != known[name].ndim or tensor.dtype != known[name].dtype:
            raise InputError(
                f"The input {name} has another rank or dtype than the plan was made for.",
                found=f"{tuple(tensor.shape)} {tensor.dtype}, planned {tuple(known[name].shape)} {known[name].dtype}",
                hint="convert the input, or parallelize the model with meta_inputs like it.",
            )
