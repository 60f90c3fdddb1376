"""Runs a compiled program under autograd: one forward, one backward, and memory freed as planned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ir import Input, Output, TensorMeta
from autopar.mesh import Mesh
from autopar.runtime.accumulation import Place, Sums
from autopar.runtime.measured_steps import Marks, StepClock, stamp
from autopar.sharding import ShardingSpec
from autopar.spmd.placements import to_placements

Local = Callable[[Any, list[Any]], tuple[Any, ...]]
Named = TypeVar("Named")


@dataclass(frozen=True)
class Executable:
    """A compiled program on this rank.

    Args:
        forward: ``forward(rank, inputs) -> (*results, *saved)``; empties the list ``inputs``.
        backward: ``backward(rank, saved_and_tangents) -> gradients``; empties its list.
        inputs: meaning and spec of each forward input.
        results: meaning, spec and global shape and dtype of each result before the saved tensors.
        tangents: names of the outputs whose gradients the backward takes, in order.
        gradients: meaning, spec and global shape and dtype of each gradient.
        whole: names of the outputs that the caller gets as plain tensors; others are DTensors.
        differentiable: names of the outputs that have a gradient on one device, captured or not.
        random: whether the program reads its seed.
        inference: like ``forward``, without the saved tensors and what only they need.
        accumulators: where gradients add up over micro-batches: meaning, spec and global shape and dtype of each
            accumulator, which the backward takes after the tangents.
        accumulate: the backward of all micro-batches but the last.
        accumulated: meaning of each of its results.
        once: ``once(rank, inputs) -> held``: what all micro-batches of a call share, which the forward takes after its
            inputs; None where there is nothing.
        once_inputs: meaning and spec of each of its inputs.
        compiled: whether Inductor compiled it, whose code allocates without the dispatcher.
        read: buffers on which results other than new values of buffers depend.
        tangents_of: the tangents on which each gradient depends.
        held: positions of inputs whose memory is among the saved tensors, by the strides of what a call gives.
        returned: positions of outputs whose memory is among them; filled by the first forward.
        changing: positions of saved tensors with the memory of buffers that get new values; filled by the same.
        arriving: DTensor's spec of each gradient; filled by the first backward.
    """

    forward: Local
    backward: Local
    inputs: tuple[tuple[Input, ShardingSpec], ...]
    results: tuple[tuple[Output, ShardingSpec, TensorMeta], ...]
    tangents: tuple[tuple[Input, ShardingSpec], ...]
    gradients: tuple[tuple[Output, ShardingSpec, TensorMeta], ...]
    whole: frozenset[str]
    differentiable: frozenset[str]
    random: bool
    inference: Local
    accumulators: tuple[tuple[Input, ShardingSpec, TensorMeta], ...] = ()
    accumulate: Local | None = None
    accumulated: tuple[Output, ...] = ()
    once: Local | None = None
    once_inputs: tuple[tuple[Input, ShardingSpec], ...] = ()
    compiled: bool = False
    read: frozenset[str] = frozenset()
    tangents_of: Mapping[str, frozenset[str]] = field(default_factory=dict)
    held: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict, compare=False)
    returned: list[tuple[int, ...]] = field(default_factory=list, compare=False)
    changing: list[tuple[int, ...]] = field(default_factory=list, compare=False)
    arriving: dict[int, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def positions(self) -> tuple[int | None, ...]:
        """Position of each input's gradient among the backward's results; None if it has no gradient."""
        made = {o.name: i for i, (o, _, _) in enumerate(self.gradients)}
        names = ({"parameter": m.name, "input": f"input:{m.name}"}.get(m.kind, "") for m, _ in self.inputs)
        return tuple(map(made.get, names))

    def lacks(self, gradient: int, missing: Collection[str]) -> bool:
        """Whether there is no such gradient on one device, because all tangents that it depends on are missing."""
        needed = self.tangents_of.get(self.gradients[gradient][0].name, frozenset())
        return bool(needed) and needed.issubset(missing)

    @cached_property
    def given(self) -> tuple[int, ...]:
        """Positions of the inputs that a call gives."""
        return tuple(i for i, (m, _) in enumerate(self.inputs) if m.kind == "input")

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        """Positions of the inputs whose values nobody should change before the backward."""
        changed = {o.name for o, _, _ in self.results if o.kind == "mutation"}
        kinds = ("parameter", "buffer", "input")
        ends = ((i, m) for i, (m, _) in enumerate(self.inputs) if m.kind in kinds)
        return tuple(i for i, m in ends if m.kind != "buffer" or m.name not in changed)

    @cached_property
    def reruns(self) -> bool:
        """Whether a backward may start from an output whose backward is not captured, and run the forward again."""
        return bool(self.differentiable - {i.name for i, _ in self.tangents})

    @cached_property
    def overwritten(self) -> tuple[int, ...]:
        """Positions of the buffers that get new values and that a forward must read as they were to be run again."""
        changed = {o.name for o, _, _ in self.results if o.kind == "mutation"} & self.read
        return tuple(i for i, (m, _) in enumerate(self.inputs) if m.kind == "buffer" and m.name in changed)


class Seen:
    """Tensors as they are now, to find out later whether one was changed in place.

    Versions are counted on DTensors: ops on a shard bypass autograd's counter.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.versions = [(t, t._version) for t in tensors if not t.is_inference()]

    def changed(self) -> Tensor | None:
        """Return a tensor that was changed since."""
        return next((t for t, version in self.versions if t._version != version), None)


class Host(Place, Protocol):
    """What execution needs from the module that it runs for."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def local_batch(self) -> bool: ...
    @property
    def sums(self) -> Sums: ...
    @property
    def clock(self) -> StepClock: ...
    @property
    def marks(self) -> Marks: ...

    def every_tangent(self) -> Executable:
        """Return the variant whose backward takes the gradient of every output."""
        ...


@dataclass
class Run:
    """One forward and what its backward needs. Autograd's context holds it; the backward empties it.

    Args:
        operands: the forward's operands, for the variant with a backward from every output.
        saved: tensors that the forward keeps, in the order of the backward's inputs.
        kept: operands whose memory is among the saved tensors.
        returned: outputs whose memory is among the saved tensors.
        read: operands, where the forward may be run again.
    """

    host: Host
    executable: Executable
    operands: tuple[Any, ...]
    saved: list[Any]
    kept: Seen
    returned: Seen
    read: Seen
    done: bool = False

    def release(self) -> None:
        """Drop everything that belongs to the step, even if the loss stays alive."""
        self.operands, self.saved, self.done = (), [], True
        self.kept = self.returned = self.read = Seen()


def spec_of(local: Tensor, spec: ShardingSpec, shape: Sequence[int], host: Host) -> Any:
    return _described(spec, tuple(shape), local.dtype, host.mesh, host.device_mesh)


@lru_cache(maxsize=65536)
def _described(
    spec: ShardingSpec, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, device_mesh: DeviceMesh
) -> Any:
    return _torch.dtensor_spec(device_mesh, to_placements(spec, mesh, shape), shape, dtype)


def uncast(host: Host) -> torch.autocast:
    """Return a context that disables autocast: the program already contains the casts that were captured."""
    return torch.autocast(host.device_mesh.device_type, enabled=False)


def local_operand(host: Host, meaning: Input, spec: ShardingSpec, value: Any) -> Any:
    """Return the shard that the program takes: a copy if an input is cut, so that it does not keep the whole alive."""
    if meaning.kind != "input" or host.local_batch or spec.is_replicated:
        return _torch.shard_of(value)
    return value[spec.local_slices(tuple(value.shape), host.mesh, host.rank.coordinate)].clone()


def forward_values(
    host: Host, executable: Executable, operands: Sequence[Any], *, keep: bool
) -> tuple[list[Any], list[Any], list[Any]]:
    """Run the forward. Return outputs, mutations and, with ``keep``, the saved tensors."""
    fed = [local_operand(host, m, s, o) for (m, s), o in zip(executable.inputs, operands, strict=True)]
    with uncast(host):
        results = (executable.forward if keep else executable.inference)(host.rank, fed)
    n = len(executable.results)
    outputs, mutations = [], []
    for (output, spec, meta), value in zip(executable.results, results[:n], strict=True):
        if output.kind == "mutation":
            mutations.append(value)
        elif output.name in executable.whole:
            outputs.append(value)
        else:
            outputs.append(_torch.output_of(value, spec_of(value, spec, meta.shape, host), output.name))
    return outputs, mutations, list(results[n:])


def keep_apart(executable: Executable, saved: list[Any], buffer: Callable[[str], Tensor]) -> None:
    """Copy what the backward reads of buffers that get new values before it.

    Args:
        buffer: returns this rank's shard of a buffer.
    """
    if not executable.changing:
        shards = (buffer(o.name) for o, _, _ in executable.results if o.kind == "mutation")
        memory = {t.untyped_storage().data_ptr() for t in shards if t.numel()}
        positions = enumerate(saved if memory else ())
        executable.changing.append(
            tuple(i for i, t in positions if isinstance(t, Tensor) and t.untyped_storage().data_ptr() in memory)
        )
    for i in executable.changing[0]:
        saved[i] = saved[i].clone()


def plain_outputs(outputs: Sequence[Any], batch: int | None, device_mesh: DeviceMesh) -> list[Any]:
    """Return the outputs of a call without gradients as plain tensors, which metrics and libraries expect.

    ``full_tensor()`` of a whole output returns it, so that code written for the DTensors of training works.

    Args:
        batch: global batch size, given with local batches: an output that has it is returned as this rank's slice,
            others whole.
    """

    def plain(output: Any) -> Any:
        if not isinstance(output, DTensor):
            return output
        cut = batch is not None and output.ndim > 0 and output.shape[0] == batch
        own: Placement = Shard(0) if cut else Replicate()
        given = output.redistribute(device_mesh, [own] * device_mesh.ndim).to_local()
        return given if cut else given.as_subclass(_torch.Whole)

    return [plain(output) for output in outputs]


class Step(torch.autograd.Function):
    """The whole program as one autograd node, from parameters and inputs to outputs."""

    @staticmethod
    def forward(ctx: Any, host: Host, executable: Executable, sink: list[Any], *operands: Any) -> tuple[Any, ...]:
        with host.marks.in_sections(), host.clock.memory.counting():
            outputs, mutations, saved = forward_values(host, executable, operands, keep=True)
            buffers = {m.name: o for (m, _), o in zip(executable.inputs, operands, strict=True) if m.kind == "buffer"}
            keep_apart(executable, saved, lambda name: _torch.shard_of(buffers[name]))
        sink.extend(mutations)
        kept = Seen(operands[i] for i in _held(executable, saved, operands))
        returned = Seen(_saved_outputs(executable, saved, outputs))
        read = Seen(operands[i] for i in (executable.fixed if executable.reruns else ()))
        for i in executable.overwritten if executable.reruns else ():
            operands = (*operands[:i], _torch.shard_of(operands[i]).clone(), *operands[i + 1 :])
        ctx.run = Run(host, executable, operands, saved, kept, returned, read)
        ctx.set_materialize_grads(False)
        fixed = [o for o, n in zip(outputs, _names(executable), strict=True) if n not in executable.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        run: Run = ctx.run
        check_backward(done=run.done, kept=run.kept, returned=run.returned)
        given = {n: t for n, t in zip(_names(run.executable), tangents, strict=True) if t is not None}
        began = stamp(run.host.rank.device)
        with torch.no_grad(), run.host.marks.in_sections(), run.host.clock.memory.counting():
            gradients = _gradients(run, given)
        run.host.marks.backward = (began, stamp(run.host.rank.device))
        run.host.clock.done(run.host.marks)
        return (None, None, None, *gradients)


def _names(executable: Executable) -> list[str]:
    return [o.name for o, _, _ in executable.results if o.kind == "output"]


def _held(executable: Executable, saved: Sequence[Any], operands: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of operands of the user whose memory is among the saved tensors."""
    key = tuple([operands[i].stride() for i in executable.given])
    if key not in executable.held:
        tensors = [operands[i] for i in executable.fixed]
        executable.held[key] = tuple(kept_among(tensors, executable.fixed, saved))
    return executable.held[key]


def _saved_outputs(executable: Executable, saved: Sequence[Any], outputs: Sequence[Any]) -> list[Tensor]:
    """Return the outputs whose memory is among the saved tensors, without their history, which would hold the run."""
    if not executable.returned:
        executable.returned.append(tuple(kept_among(outputs, range(len(outputs)), saved)))
    return [outputs[i].detach() for i in executable.returned[0]]


def kept_among(tensors: Iterable[Tensor], names: Iterable[Named], saved: Iterable[Any]) -> list[Named]:
    """Return the names of tensors whose memory is among the saved ones."""
    kept = {t.untyped_storage().data_ptr() for t in saved if isinstance(t, Tensor) and t.numel()}
    shards = zip(map(_torch.shard_of, tensors), names, strict=True)
    return [name for shard, name in shards if shard.numel() and shard.untyped_storage().data_ptr() in kept]


def check_backward(*, done: bool, kept: Seen, returned: Seen | None = None) -> None:
    """Raise if a backward is a second derivative, the second of its step, or one of tensors that have changed.

    Args:
        done: whether a backward of this step has run.
        kept: parameters, buffers and inputs that the backward reads.
        returned: outputs that it reads.
    """
    if torch.is_grad_enabled():
        raise AutoparError(
            "Second derivatives of a parallel model are not supported, because they are not captured.",
            found="a backward with create_graph=True",
            hint="take second derivatives on one device, or omit create_graph.",
        )
    if done:
        raise AutoparError(
            "This loss was already used for a backward, which freed its activations.",
            found="a second backward through the same step",
            hint="call the model again; retain_graph=True cannot keep what the plan frees.",
        )
    check_unchanged(kept)
    if returned is not None and (output := returned.changed()) is not None:
        raise AutoparError(
            "An output that the backward needs was changed after the forward.",
            found=f"an output of shape {tuple(output.shape)} changed in place before the backward",
            hint="call backward before you change it, or change a copy.",
        )


def check_unchanged(seen: Seen) -> None:
    """Raise if what a backward reads was changed in place."""
    changed = seen.changed()
    if changed is None:
        return
    if isinstance(changed, DTensor):
        raise AutoparError(
            "A parameter that the backward needs was changed after the forward.",
            found="a parameter changed in place, for example by optimizer.step() before loss.backward()",
            hint="call backward before the optimizer steps, or call the model again.",
        )
    raise AutoparError(
        "A tensor that the backward needs was changed after the forward.",
        found=f"an input or buffer of shape {tuple(changed.shape)} changed in place before the backward",
        hint="call backward before you change it, or give the model a copy.",
    )


def _gradients(run: Run, given: dict[str, Any]) -> list[Any]:
    """Return the gradient of every operand, None where there is none."""
    executable, host, operands, feeds = run.executable, run.host, run.operands, run.saved
    if beyond := set(given) - {i.name for i, _ in executable.tangents}:
        check_unchanged(run.read)
    run.release()
    if beyond:
        feeds.clear()
        executable = host.every_tangent()
        _, _, feeds = forward_values(host, executable, operands, keep=True)
    missing = {i.name for i, _ in executable.tangents} - set(given)
    metas = {o.name: meta for o, _, meta in executable.results}
    feeds += [local_tangent(given.get(i.name), spec, metas[i.name], host) for i, spec in executable.tangents]
    del operands, given
    if executable.accumulators:
        feeds += host.sums.taken(executable.accumulators, host)
    if executable.accumulate is not None and not host.sums.completing:
        with uncast(host):
            sums = executable.accumulate(host.rank, feeds)
        meanings = zip(executable.accumulated, sums, strict=True)
        named: dict[tuple[str, str], Tensor] = {(o.kind, o.name): t for o, t in meanings}
        host.sums.add(executable.accumulators, named)
        return [named.get(("gradient", f"input:{m.name}")) for m, _ in executable.inputs]
    with uncast(host):
        made = executable.backward(host.rank, feeds)
    if executable.accumulators:
        host.sums.deliver(host.model, host)
    ends = zip(executable.inputs, executable.positions, strict=True)
    return [
        None if at is None or executable.lacks(at, missing) else _gradient_of(m, executable, at, made[at], host)
        for (m, _), at in ends
    ]


def local_tangent(given: Any, spec: ShardingSpec, meta: TensorMeta, host: Host) -> Tensor:
    """Return a tangent as the program takes it, zeros if the caller's loss does not use the output."""
    local = spec.local_slices(meta.shape, host.mesh, host.rank.coordinate)
    if given is None:
        sizes = [s.stop - s.start for s in local]
        return torch.zeros(sizes, dtype=getattr(torch, meta.dtype), device=host.rank.device)
    if isinstance(given, DTensor):
        given = given.redistribute(host.device_mesh, to_placements(spec, host.mesh, meta.shape)).to_local()
    elif tuple(given.shape) == meta.shape:
        given = given[local].contiguous()
    assert isinstance(given, Tensor)
    return given


def _gradient_of(meaning: Input, executable: Executable, at: int, gradient: Tensor, host: Host) -> Tensor:
    if meaning.kind != "parameter":
        return gradient
    if at not in executable.arriving:
        _, spec, meta = executable.gradients[at]
        executable.arriving[at] = spec_of(gradient, spec, meta.shape, host)
    return _torch.gradient_of(gradient, executable.arriving[at])
