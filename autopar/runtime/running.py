"""Runs one call of a parallel module: finds or compiles its program, feeds it, and stores what it changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import AutoparError, RoomError
from autopar.mesh import Mesh
from autopar.runtime.accumulation import Sums
from autopar.runtime.agreement import this_rank, warn_of_other_values
from autopar.runtime.execution import Executable, Step, forward_values, plain_outputs
from autopar.runtime.measured_steps import Marks, StepClock, stamp
from autopar.runtime.requests import Request, agreed_request, unmet_guard, variant_key
from autopar.runtime.tables import Tables, tables
from autopar.runtime.variants import Call, ParallelBase, State, Variant
from autopar.spmd.ranks import StartingRank

STORED = ("parameter", "buffer")
"""Kinds of program inputs that the model stores; a call supplies the others."""


@dataclass
class _CallHost:
    """One call's view of the state, as execution needs it."""

    model: nn.Module
    rank: StartingRank
    mesh: Mesh
    device_mesh: DeviceMesh
    local_batch: bool
    every_tangent: Callable[[], Executable]
    sums: Sums
    clock: StepClock
    marks: Marks


def run(model: ParallelBase, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the compiled program for a call of the model."""
    stored = tables(model)
    request, settle = agreed_request(model, args, kwargs, stored)
    if request.loose:
        settle()
        _place_loose_tensors(model, request)
        return run(model, args, kwargs)
    try:
        execute = model._autopar.execute or _run_program
        variant, outputs, mutations = execute(model, request, stored, settle)
    except Exception:
        settle()  # another rank's error may be the cause, and takes precedence; the other ranks wait to hear from all
        raise
    settle()
    _write_back(variant, mutations, stored)
    if variant.attribute_outputs or variant.lost:
        _set_attributes(model, variant, outputs)
    return variant.build(outputs)


def _place_loose_tensors(model: ParallelBase, request: Request) -> None:
    """Place the tensors that the user put into the model, by the specs of a known program or else of a new one."""
    state, stored = model._autopar, tables(model)
    loose = {name: stored.tensor(name) for name in request.loose}
    known = {
        name: spec
        for program in state.programs
        for name, (spec, shape) in program.parameters.items()
        if name in loose and tuple(loose[name].shape) == shape
    }
    if all(name in known for name, tensor in loose.items() if isinstance(tensor, nn.Parameter)):
        state.place(model, request.loose, known)
        return
    variant = _compile(model, request)
    state.place(model, request.loose, {name: spec for name, (spec, _) in variant.parameters.items()} | known)
    with state.precision():
        state.add(variant_key(model, request.call), variant)


def _compile(model: ParallelBase, request: Request) -> Variant:
    with torch.inference_mode(mode=False):
        return model._autopar.compile(model, request.call)


def _run_program(
    model: ParallelBase, request: Request, stored: Tables, settle: Callable[[], None]
) -> tuple[Variant, list[Any], list[Any]]:
    """Run the program of a call. Return it, its outputs and its mutations.

    ``settle`` must come before anything that ranks do together: a compilation, a gather of inputs, a common seed, and
    the program's first collective.
    """
    state, call = model._autopar, request.call
    if request.variant is None or any(isinstance(t, DTensor) for t in call.tensors):
        settle()
    if not state.local_batch and request.key not in state.compared:
        settle()
        plain = {n: t for n, t in zip(call.names, call.tensors, strict=True) if not isinstance(t, DTensor)}
        warn_of_other_values(plain)
        state.compared.add(request.key)
    with state.precision():
        variant = program_for(model, request)
    try:
        return _executed(model, request, variant, stored, settle)
    except RoomError as error:
        return _executed(model, request, _without_room(variant, error), stored, settle)


def _without_room(variant: Variant, error: RoomError) -> Variant:
    """Return a program for the same call in which no routing is too much for a rank.

    Raises:
        RoomError: none fits the memory.
    """
    if variant.without_room is None:
        raise error
    try:
        with torch.inference_mode(mode=False):
            made = variant.without_room()
    except AutoparError as reason:
        raise error from reason
    if this_rank() == 0:
        warnings.warn(
            f"{error.what} The step is run by a program in which tokens stay with their ranks ({error.found}; "
            f"{error.hint})",
            stacklevel=6,
        )
    return made


def _executed(
    model: ParallelBase, request: Request, variant: Variant, stored: Tables, settle: Callable[[], None]
) -> tuple[Variant, list[Any], list[Any]]:
    state, call, executable = model._autopar, request.call, variant.executable
    if executable.random or executable.compiled:  # compiled code starts collectives by itself
        settle()
    available = program_inputs(call, variant, state)
    operands = [stored.tensor(m.name) if m.kind in STORED else available[m.kind, m.name] for m, _ in executable.inputs]
    host = _CallHost(
        model,
        StartingRank(state.rank, settle),
        state.mesh,
        state.device_mesh,
        state.local_batch,
        lambda: with_every_tangent(model, request.key, variant).executable,
        model._autopar_sums,
        state.clock,
        Marks(state.device),
    )
    mutations: list[Any] = []
    if torch.is_grad_enabled():
        if state.clock.memory.wanted and state.device.type == "cpu" and not executable.compiled:
            state.clock.memory.begin(model, operands)
        began = stamp(state.device)
        outputs = list(Step.apply(host, executable, mutations, *operands))  # type: ignore[no-untyped-call]
        host.marks.forward = (began, stamp(state.device))
    else:
        outputs, mutations, _ = forward_values(host, executable, operands, keep=False)
        if state.plain_evaluation:
            settle()
            outputs = plain_outputs(outputs, global_batch_size(call, state), state.device_mesh)
    return variant, outputs, mutations


def with_every_tangent(model: ParallelBase, key: Any, variant: Variant) -> Variant:
    """Compile the same program with a backward from every output; later calls use it from the start."""
    state = model._autopar
    changed = variant.guards.difference(model)
    if changed is not None:
        raise AutoparError(
            "The model was changed between a forward and the backward from its outputs.",
            found=str(changed),
            hint='change the model after the backward, or plan with outputs="dtensor", which captures every backward.',
        )
    made = variant.every_tangent()
    if variant in (known := state.variants.get(key, [])):
        known[known.index(variant)] = made
    return made


def global_batch_size(call: Call, state: State) -> int | None:
    """Return how many samples all ranks pass together, with local batches; else None."""
    if not state.local_batch:
        return None
    return next((t.shape[0] for t in call.tensors if t.ndim), 0) * state.mesh.size


def program_inputs(call: Call, variant: Variant, state: State) -> dict[tuple[str, str], Tensor]:
    """Return what a program can take besides parameters and buffers, by kind and name."""
    found = {("constant", n): t.to(state.device) for n, t in variant.constants.items()}
    for name, tensor in zip(call.names, call.tensors, strict=True):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found["input", name] = whole.to(state.device)
    if variant.executable.random:
        found["seed", "seed"] = _draw_seed(state)
    else:
        found["seed", "seed"] = torch.zeros((), dtype=torch.int64, device=state.device)
    return found


def _draw_seed(state: State) -> Tensor:
    """Draw a seed from torch's generator on rank 0, so that ``torch.manual_seed`` and saved generators repeat a run.

    Every rank draws, which keeps equally seeded ranks equal; ranks that were seeded differently take rank 0's number.
    """
    seed = torch.randint(2**62, (), dtype=torch.int64).to(state.device)
    if dist.get_world_size() > 1:
        dist.broadcast(seed, src=0)
    return seed


def _write_back(variant: Variant, mutations: Sequence[Any], stored: Tables) -> None:
    """Store the new values of buffers that the program changed (batch norm's statistics)."""
    if mutations:
        changed = [o.name for o, _, _ in variant.executable.results if o.kind == "mutation"]
        with torch.no_grad():
            _torch.copy_each([_torch.shard_of(stored.tensor(name)) for name in changed], mutations)


def _set_attributes(model: ParallelBase, variant: Variant, outputs: Sequence[Any]) -> None:
    """Set the attributes in which the forward stores tensors, and warn once of tensors that it stores elsewhere."""
    named = dict(zip(variant.outputs, outputs, strict=True))
    for each in variant.attribute_outputs:
        each.assign(model, named)
    if variant.lost and this_rank() == 0:
        kind: Any = type(model)
        warnings.warn(
            f"The forward of {kind._autopar_original.__name__} stores tensors in {', '.join(variant.lost)}, which a "
            "parallel model cannot do: return them, or set an attribute of the module anew in every call.",
            stacklevel=5,
        )
    variant.lost.clear()


def program_for(model: ParallelBase, request: Request) -> Variant:
    """Return the program for a call, compiled if need be, and mark it as the most recently used."""
    state, variant = model._autopar, request.variant
    if variant is None:
        changed = unmet_guard(model, request)
        if changed is not None and this_rank() == 0:
            warnings.warn(
                f"{changed}, so the program is compiled again; make what changes often an input or a buffer.",
                stacklevel=7,
            )
        elif state.is_full:
            warnings.warn(
                f"{len(state.programs)} programs were compiled for different batches, so the oldest is dropped; pad "
                "batches to few sizes, or plan for a range of them with dynamic_shapes.",
                stacklevel=7,
            )
        variant = _compile(model, request)
        state.add(request.key, variant)
    known = state.variants[request.key] = state.variants.pop(request.key)
    known.remove(variant)
    known.insert(0, variant)
    return variant
