"""Runs one call of a pipelined module.

In training a call runs the whole schedule, backwards included: gradients are linear in the gradient of the loss, so
``backward()`` only scales what the call has made and hands it out. Where the backward does not start from the loss
alone, the call runs all forwards and ``backward()`` all backwards.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ir import Input, TensorMeta
from autopar.mesh import Mesh
from autopar.runtime.accumulation import Sums, summed
from autopar.runtime.agreement import warn_of_other_values
from autopar.runtime.execution import (
    Seen,
    check_backward,
    check_unchanged,
    keep_apart,
    kept_among,
    local_tangent,
    plain_outputs,
    spec_of,
    uncast,
)
from autopar.runtime.measured_steps import Marks, StepClock, stamp
from autopar.runtime.pipeline.failures import stopping_all_ranks
from autopar.runtime.pipeline.rows import Rows
from autopar.runtime.pipeline.state import Phase, PipelineProgram, PipelineState
from autopar.runtime.requests import Request
from autopar.runtime.running import global_batch_size, program_for, program_inputs, with_every_tangent
from autopar.runtime.tables import Tables
from autopar.runtime.variants import ParallelBase, Variant
from autopar.sharding import ShardingSpec
from autopar.spmd.pipeline.links import Mailbox
from autopar.spmd.pipeline.loop import Loop
from autopar.spmd.pipeline.stage import StagePrograms
from autopar.spmd.placements import from_placements, to_placements
from autopar.spmd.ranks import ProcessRank

AHEAD = "ahead:"
"""Prefix of inputs that are computed of the whole batch before the first forward."""

_BACKWARDS = itertools.count(1)


def run_pipeline(
    model: ParallelBase, request: Request, stored: Tables, settle: Callable[[], None]
) -> tuple[Variant, list[Any], list[Any]]:
    """Run a call. Return its program and its outputs; new values of buffers are stored already."""
    state, call = model._autopar, request.call
    settle()
    if not state.local_batch and request.key not in state.compared:
        plain = {n: t for n, t in zip(call.names, call.tensors, strict=True) if not isinstance(t, DTensor)}
        warn_of_other_values(plain)
        state.compared.add(request.key)
    run = begun(model, request, stored)
    program, variant = run.program, run.variant
    if not torch.is_grad_enabled():
        with stopping_all_ranks(run.state, run.let_go) as began:
            run.phase("forwards", began, saves=False)
        return variant, run.evaluated(), []
    refuse_gradients_of_inputs(call.tensors)
    parameters = [stored.tensor(name) for name in program.parameters]
    anchor = torch.zeros((), requires_grad=True)  # the backward of a rank without trainable parameters runs too
    outputs: list[Any] = list(PipelineStep.apply(run, anchor, *parameters))  # type: ignore[no-untyped-call]
    names = iter(outputs)
    return variant, [next(names) if name in run.present else None for name in variant.outputs], []


def begun(model: ParallelBase, request: Request, stored: Tables) -> PipelineRun:
    """Return a call with its program, of which nothing has run yet. All ranks compile it together if it is new."""
    state, call = model._autopar, request.call
    assert isinstance(state, PipelineState)
    state.trains = torch.is_grad_enabled()  # a compilation runs outside of inference mode, with gradients
    with state.precision():
        variant = program_for(model, request)
    program: PipelineProgram = variant.executable  # type: ignore[assignment]
    values = program_inputs(call, variant, state)
    return PipelineRun(model, state, request, variant, program, stored, values, global_batch_size(call, state))


def refuse_gradients_of_inputs(tensors: Sequence[Tensor]) -> None:
    if any(t.requires_grad for t in tensors):
        raise AutoparError(
            "A pipeline gives no gradients of the inputs of a call.",
            found="an input with requires_grad=True",
            hint="detach it, or train without a pipeline.",
        )


@dataclass
class PipelineRun:
    """One call on this rank; the host and the feed of its loop.

    Args:
        values: constants, inputs and the seed by kind and name.
        made: results of each forward by output and micro-batch.
        given: gradients of the outputs, known in the second phase.
        ran: whether the call has run the backwards too.
        fed: the gradient of the loss with which it did.
        present: outputs that this rank has.
        batch: size of the global batch, with local batches.
        own: shards of buffers that it reads and writes instead of the model's.
        writes: whether other buffers get their new values, which a forward that is run again must not give them.
        before: buffers as the call found them, where it may be run again.
        kept: parameters and inputs that the backwards read, if they have not run.
        read: those that a forward reads, where it may be run again.
    """

    model: ParallelBase
    state: PipelineState
    request: Request
    variant: Variant
    program: PipelineProgram
    stored: Tables
    values: dict[tuple[str, str], Tensor]
    batch: int | None
    own: dict[str, Tensor] = field(default_factory=dict)
    writes: bool = True
    before: dict[str, Tensor] = field(default_factory=dict)
    made: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    changed: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    given: dict[str, Any] | None = None
    ran: bool = False
    fed: float = 1.0
    present: dict[str, None] = field(default_factory=dict)
    done: bool = False
    kept: Seen = field(default_factory=Seen)
    read: Seen = field(default_factory=Seen)
    _dealt: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = Loop(
            self.program.stages,
            len(self.program.schedule.rank_of),
            self.rank,
            self.program.schedule.micro_batches,
            weakref.proxy(self),  # a cycle would hold the gradients of each step until the collector runs
        )
        self.marks = Marks(self.state.device)
        self._ahead: dict[str, DTensor] | None = None

    # What execution needs to know of a host.

    @property
    def rank(self) -> ProcessRank:
        return self.state.rank

    @property
    def mesh(self) -> Mesh:
        return self.state.mesh

    @property
    def device_mesh(self) -> Any:
        return self.state.device_mesh

    @property
    def local_batch(self) -> bool:
        return self.state.local_batch

    @property
    def sums(self) -> Sums:
        return self.model._autopar_sums

    @property
    def clock(self) -> StepClock:
        return self.state.clock

    def buffer(self, name: str) -> Tensor:
        """Return this rank's shard of a buffer."""
        shard: Tensor = self.own[name] if name in self.own else _torch.shard_of(self.stored.tensor(name))
        return shard

    @property
    def reruns(self) -> bool:
        """Whether the backward may start from an output whose backward is not captured, and run the forwards again."""
        return self.program.everywhere and bool(self.program.differentiable - self.program.tangents)

    def overwritten(self) -> dict[str, Tensor]:
        """Return copies of the buffers that the call changes and that forwards must read as they were."""
        changed = self.program.read & self.program.buffers.keys()
        return {name: self.buffer(name).clone() for name in sorted(changed)}

    def seen(self, parameters: Sequence[Tensor]) -> None:
        """Remember what a backward reads as it is now."""
        inputs = {name: t for (kind, name), t in self.values.items() if kind == "input"}
        if self.reruns:
            buffers = sorted(self.program.read - self.program.buffers.keys())
            self.read = Seen([*parameters, *inputs.values(), *map(self.stored.tensor, buffers)])
        if not self.ran:
            self.kept = Seen([*parameters, *(inputs[name] for name in self._kept_anywhere(inputs))])

    def _kept_anywhere(self, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return the inputs that any stage keeps for its backward, so that all ranks find the same ones changed."""
        known, names = self.program.inputs_kept, sorted(inputs)
        if not known:
            here = set(kept_among(inputs.values(), inputs, itertools.chain(*self.loop.saved.values())))
            kept = torch.tensor([name in here for name in names], dtype=torch.int32, device=self.state.device)
            dist.all_reduce(kept, dist.ReduceOp.MAX, group=self.state.group)
            known.append(tuple(itertools.compress(names, kept.tolist())))
        return known[0]

    def again(self) -> PipelineRun:
        """Run the forwards of the program that has a backward from every output."""
        check_unchanged(self.read)
        variant = with_every_tangent(self.model, self.request.key, self.variant)
        program: PipelineProgram = variant.executable  # type: ignore[assignment]
        run = PipelineRun(
            self.model,
            self.state,
            self.request,
            variant,
            program,
            self.stored,
            self.values,
            self.batch,
            self.before,
            writes=False,
        )
        self.before = {}
        with stopping_all_ranks(self.state, run.let_go) as began:
            run.phase("forwards", began)
        run.made.clear()
        run.marks = self.marks
        return run

    # The loop.

    def phase(self, phase: Phase, began: Callable[[Any], None], *, saves: bool = True) -> None:
        """Run the actions of a phase."""
        state, program = self.state, self.program
        traffic = program.traffic(phase, state.position)
        at = state.mesh, state.rank.coordinate
        shapes = {("F", n): s.received_shapes(*at) for n, s in program.stages.items()}
        shapes |= {("B", n): s.taken_shapes(*at) for n, s in program.stages.items()}
        self.mail = Mailbox(state.links, program.schedule.rank_of, shapes, state.device, traffic)
        with torch.no_grad(), uncast(self), self.marks.in_sections():  # type: ignore[arg-type]
            self.prepare()
            self.loop.run(program.order(phase)[state.position], self.mail, began, saves=saves)
            if phase != "backwards":
                self.store_buffers()

    def prepare(self) -> None:
        """Compute what the forwards need of the whole batch, before the first of them."""
        if self._ahead is None:
            self._ahead = self._run_prologue()

    def let_go(self) -> None:
        """Release what the call holds, and all work on its messages."""
        if hasattr(self, "mail"):
            self.mail.drop()
        self.loop.saved.clear()
        self.loop.kept.clear()
        self.loop.held.clear()
        self.loop.sums.clear()
        self.loop.gradients = {}

    def operand(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        if meaning.kind == "buffer":
            return self.buffer(meaning.name)
        if meaning.kind == "parameter":
            tensor: Tensor = _torch.shard_of(self.stored.tensor(meaning.name))
            return tensor
        if meaning.name.startswith(AHEAD):
            return self._ahead_as(meaning.name, spec)
        value = self.values[meaning.kind, meaning.name]
        return self._part(value, stage.metas[meaning.node], spec, micro_batch) if meaning.kind == "input" else value

    def _part(self, value: Tensor, meta: TensorMeta, spec: ShardingSpec, i: int) -> Tensor:
        """Return this rank's part of a micro-batch of an input."""
        local = spec.local_shape(meta.shape, self.mesh, self.rank.coordinate)
        if self.local_batch:
            cut = meta.shape and value.shape[0] != local[0]
            return value[i * local[0] : (i + 1) * local[0]] if cut else value
        if meta.shape and value.shape[0] != meta.shape[0]:
            value = value[i * meta.shape[0] : (i + 1) * meta.shape[0]]
        if spec.is_replicated:
            return value
        return value[spec.local_slices(meta.shape, self.mesh, self.rank.coordinate)].contiguous()

    def tangent(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        meta = stage.metas[meaning.node]
        if self.given is None:
            local = spec.local_shape(meta.shape, self.mesh, self.rank.coordinate)
            return torch.full(local, self.fed, dtype=getattr(torch, meta.dtype), device=self.rank.device)
        value = self.given.get(meaning.name)
        if value is None or self.program.outputs[meaning.name] != "concatenate":
            return local_tangent(value, spec, meta, self)  # type: ignore[arg-type]
        rows, m = self._rows(spec, meta.shape), self.program.schedule.micro_batches
        whole = meta._replace(shape=(m * meta.shape[0], *meta.shape[1:]))
        if rows is None:
            value = value.full_tensor() if isinstance(value, DTensor) else value
            return local_tangent(value.chunk(m)[micro_batch], spec, meta, self)  # type: ignore[arg-type]
        if meaning.name not in self._dealt:
            self._dealt[meaning.name] = dict(enumerate(rows.dealt(local_tangent(value, spec, whole, self))))  # type: ignore[arg-type]
        return self._dealt[meaning.name].pop(micro_batch)

    def zeros(self, stage: StagePrograms, at: int) -> Tensor:
        _, spec, meta = stage.program.accumulators[at]
        local = spec.local_shape(meta.shape, self.mesh, self.rank.coordinate)
        return torch.zeros(local, dtype=getattr(torch, meta.dtype), device=self.rank.device)

    def keep(self, stage: StagePrograms, micro_batch: int, results: Sequence[Any]) -> None:
        saved = self.loop.saved.get((stage.number, micro_batch))
        if saved and stage.mutations_at:
            program: Any = stage.program
            keep_apart(program, saved, self.buffer)
        for at in stage.outputs_at:
            self.made.setdefault(stage.program.results[at][0].name, {})[micro_batch] = results[at]
        for at in stage.mutations_at:
            name = stage.program.results[at][0].name
            if self.program.buffers.get(name, "same") is None:
                self._write(name, results[at])
            else:
                self.changed.setdefault(name, {})[micro_batch] = results[at]

    def store_buffers(self) -> None:
        """Store the new values of buffers that all micro-batches together make."""
        for name, values in self.changed.items():
            ordered = [values[i] for i in sorted(values)]
            how = self.program.buffers[name]
            self._write(name, torch.stack(ordered).sum(0) if how == "sum" else ordered[-1])
        self.changed.clear()

    def _write(self, name: str, value: Tensor) -> None:
        if self.writes or name in self.own:
            _torch.copy_each([self.buffer(name)], [value])

    # What is computed ahead.

    def _run_prologue(self) -> dict[str, DTensor]:
        prologue = self.program.prologue
        if prologue is None:
            return {}
        metas = self.program.prologue_metas

        def fed(meaning: Input, spec: ShardingSpec) -> Any:
            if meaning.kind == "buffer":
                return self.buffer(meaning.name)
            value = self.values[meaning.kind, meaning.name]
            whole = meaning.kind != "input" or self.local_batch or spec.is_replicated
            return value if whole else value[spec.local_slices(tuple(value.shape), self.mesh, self.rank.coordinate)]

        made = prologue.inference(self.rank, [fed(m, s) for m, s in prologue.inputs])
        return {
            o.name: self._dtensor(t, spec, metas[o.name].shape)
            for (o, spec, _), t in zip(prologue.results, made, strict=True)
        }

    def _ahead_as(self, name: str, spec: ShardingSpec) -> Tensor:
        assert self._ahead is not None
        value = self._ahead[name]
        wanted = to_placements(spec, self.mesh, tuple(value.shape))
        if tuple(value.placements) != tuple(wanted):
            value = self._ahead[name] = value.redistribute(self.device_mesh, wanted)
        local: Tensor = _torch.shard_of(value)
        return local

    def _dtensor(self, local: Tensor, spec: ShardingSpec, shape: Sequence[int]) -> DTensor:
        stride = torch.empty(tuple(shape), device="meta").stride()
        placements = to_placements(spec, self.mesh, tuple(shape))
        return DTensor.from_local(
            local, self.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    # Outputs.

    def _makes(self, name: str) -> bool:
        return self.program.schedule.rank_of[self.program.makers[name]] == self.state.position

    def _joined(self, name: str) -> Any:
        """Return an output of the whole batch on a rank that makes it: a DTensor, or a plain tensor if it is whole."""
        stage = self.program.stages[self.program.makers[name]]
        at = next(i for i in stage.outputs_at if stage.program.results[i][0].name == name)
        _, spec, meta = stage.program.results[at]
        made = self.made.pop(name)
        values = [made.pop(i) for i in sorted(made)]
        how = self.program.outputs[name]
        if how == "same" or len(values) == 1:
            value = self._dtensor(values[-1], spec, meta.shape)
        elif how == "sum":
            wide = torch.float32 if values[0].dtype in (torch.float16, torch.bfloat16) else None
            total = torch.stack(values).sum(0, dtype=wide).to(values[0].dtype)
            value = self._dtensor(total, spec, meta.shape)
        else:
            value = self._concatenated(values, spec, meta.shape)
        if name in self.program.whole:
            return value.full_tensor() if spec.axes else value.to_local()
        return _torch.output_of(value.to_local(), spec_of(value.to_local(), self._spec(value), value.shape, self), name)  # type: ignore[arg-type]

    def _spec(self, value: DTensor) -> ShardingSpec:
        return from_placements(value.placements, value.ndim, self.mesh)

    def _concatenated(self, values: list[Tensor], spec: ShardingSpec, shape: Sequence[int]) -> DTensor:
        whole = (shape[0] * len(values), *shape[1:])
        rows = self._rows(spec, shape)
        if rows is not None:
            return self._dtensor(rows.joined(values), spec, whole)
        gathered = ShardingSpec.of(((), *spec.dims[1:]), spec.partial)
        placements = to_placements(gathered, self.mesh, tuple(shape))
        parts = [self._dtensor(v, spec, shape).redistribute(self.device_mesh, placements).to_local() for v in values]
        value = self._dtensor(torch.cat(parts), gathered, whole)
        return value.redistribute(self.device_mesh, to_placements(spec, self.mesh, whole))

    def _rows(self, spec: ShardingSpec, shape: Sequence[int]) -> Rows | None:
        """Return how the ranks share rows of what has this shape in a micro-batch; None if not evenly."""
        axes = spec.dims[0]
        even = self.local_batch or shape[0] % math.prod(self.mesh.shape[a] for a in axes) == 0
        batches = self.mesh.size if self.local_batch else 1
        return Rows(self.rank, axes, self.program.schedule.micro_batches, batches) if even else None

    def _broadcast(self, name: str, value: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Return a plain tensor on all ranks along the pipeline."""
        meta = self.program.metas[name]
        if value is None:
            value = torch.empty(tuple(shape), dtype=getattr(torch, meta.dtype), device=self.state.device)
        source = self.state.along[self.program.schedule.rank_of[self.program.makers[name]]]
        value = value.contiguous()
        dist.broadcast(value, source, group=self.state.group)
        return value

    def evaluated(self) -> list[Any]:
        """Return the outputs of a call without gradients: plain tensors on every rank."""
        found: list[Any] = []
        for name in self.variant.outputs:
            value = self._joined(name) if self._makes(name) else None
            if not self.state.plain_evaluation and name not in self.program.whole:
                found.append(value)
                continue
            shape, n = self.program.metas[name].shape, self.mesh.size
            plain = None if value is None else plain_outputs([value], self.batch, self.device_mesh)[0]
            if self.batch is not None and shape and shape[0] == self.batch and name not in self.program.whole:
                shape = (shape[0] // n, *shape[1:])
            made = self._broadcast(name, plain, shape)
            found.append(made if name in self.program.whole else made.as_subclass(_torch.Whole))
        return found

    def trained(self) -> list[tuple[str, Any]]:
        """Return the outputs of a call with gradients that this rank has."""
        found: list[tuple[str, Any]] = []
        for name in self.variant.outputs:
            value = self._joined(name) if self._makes(name) else None
            everywhere = self.program.everywhere or name == self.program.loss or not self.program.metas[name].shape
            if everywhere and name in self.program.whole:
                value = self._broadcast(name, value, self.program.metas[name].shape)
            elif everywhere and name == self.program.loss:
                local = None if value is None else value.to_local()
                made = self._broadcast(name, local, ())
                replicated = ShardingSpec.replicated(0)
                value = _torch.output_of(made, spec_of(made, replicated, (), self), name)  # type: ignore[arg-type]
            if value is not None:
                found.append((name, value))
        return found

    # Gradients.

    def handed_out(self, scale: float) -> dict[str, Tensor]:
        """Return this rank's part of each gradient, and accumulate those of an incomplete step.

        Args:
            scale: by which the gradients that the loop has made are multiplied.
        """
        made, sums, held = self.loop.gradients, self.loop.sums, self.sums
        self.state.delivered = next(_BACKWARDS)
        if scale != 1.0:
            for tensor in (*made.values(), *sums.values()):
                tensor.mul_(scale)
        shapes = {a[0].name: a[2].shape for a in self.program.accumulators} | self.program.shapes
        every: dict[Any, Tensor] = dict(sums)
        if not held.completing:
            for name, tensor in made.items():
                key = name, self.program.parameters[name], str(tensor.dtype).removeprefix("torch.")
                every[key] = every[key] + tensor if key in every else tensor
            for key, tensor in every.items():
                before = held.held.get(key)
                held.held[key] = (tensor if before is None else before[0].add_(tensor), shapes[key[0]])
            held.done += 1
            return {}
        pending = [(key, tensor, shapes[key[0]]) for key, tensor in every.items()]
        pending += [(key, tensor, shape) for key, (tensor, shape) in held.held.items()]
        held.held.clear()
        held.done = 0
        for (name, spec, _), tensor, shape in pending:
            parameter = self.stored.tensor(name)
            part = _torch.shard_of(summed(tensor, spec, shape, parameter, self))
            made[name] = made[name] + part if name in made else part
        add_tied(self.state, self.stored, made)
        if self.program.half:
            self._agree_on_overflow(made)
        return made

    def _agree_on_overflow(self, made: Mapping[str, Tensor]) -> None:
        """Make a gradient infinite if one of any stage is not finite, so that every rank's scaler skips the step."""
        finite = all(bool(t.isfinite().all()) for t in made.values())
        found = torch.tensor(float(not finite), device=self.state.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.state.group)
        if finite and found.item():
            first = next((t for t in made.values() if t.numel()), None)
            if first is not None:
                first.view(-1)[0] = float("inf")


def add_tied(state: PipelineState, stored: Tables, made: dict[str, Tensor]) -> None:
    """Add up the parts of gradients of parameters that several stages hold."""
    for name in sorted(state.tied):
        positions = state.positions(name)
        if len(positions) < 2 or state.position not in positions:
            continue
        if name not in made:
            made[name] = torch.zeros_like(_torch.shard_of(stored.tensor(name)))
        made[name] = made[name].contiguous()
        dist.all_reduce(made[name], group=state.tied_groups[positions])


class PipelineStep(torch.autograd.Function):
    """A step of the pipeline as one autograd node, from this rank's parameters to the outputs that it has."""

    @staticmethod
    def forward(ctx: Any, run: PipelineRun, anchor: Tensor, *parameters: Tensor) -> tuple[Any, ...]:
        state, program = run.state, run.program
        began_at = stamp(state.device)
        run.ran = program.loss is not None and not program.two_phase and run.model.training
        run.fed = state.scale
        run.loop.delivers = run.sums.completing
        with stopping_all_ranks(state, run.let_go) as began:
            run.before = run.overwritten() if run.reruns else {}
            run.phase("all" if run.ran else "forwards", began)
            run.seen(parameters)
            outputs = run.trained()
        run.marks.forward = (began_at, stamp(state.device))
        run.present = dict.fromkeys(name for name, _ in outputs)
        ctx.run, ctx.parameters = run, len(parameters)
        ctx.set_materialize_grads(False)
        fixed = [value for name, value in outputs if name not in program.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return tuple(value for _, value in outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        run: PipelineRun = ctx.run
        check_backward(done=run.done, kept=run.kept)
        run.done = True
        given = {n: t for n, t in zip(run.present, tangents, strict=True) if t is not None}
        unknown = sorted(set(given) - run.program.tangents)
        parameters = list(run.program.parameters)
        if unknown and not run.program.everywhere:
            raise AutoparError(
                "The backward of a pipeline starts from the model's loss alone.",
                found=f"a gradient of the output {unknown[0]}",
                hint='plan with outputs="whole", so that every rank has all outputs and can use them in a loss.',
            )
        began_at = stamp(run.state.device)
        with torch.no_grad():
            if unknown:
                run.let_go()
                run = run.again()
            run.before.clear()
            scale = _finish(run, given)
            made = run.handed_out(scale)
        run.marks.backward = (began_at, stamp(run.state.device))
        run.clock.done(run.marks)
        run.let_go()
        return (None, None, *(_gradient(run, name, made) for name in parameters))


def _finish(run: PipelineRun, given: Mapping[str, Any]) -> float:
    """Run the backwards if the call has not, and return by what its gradients are to be multiplied."""
    state = run.state
    if not run.ran:
        run.given = dict(given)
        run.loop.delivers = run.sums.completing
        run.loop.sums = {key: tensor for key, (tensor, _) in run.sums.held.items()}
        run.sums.held.clear()
        with stopping_all_ranks(state, run.let_go) as began:
            run.phase("backwards", began)
        return 1.0
    assert run.program.loss is not None
    tangent = given.get(run.program.loss)
    wanted = 0.0 if tangent is None else float(_torch.shard_of(tangent))
    if run.program.half and wanted and torch.isfinite(torch.tensor(wanted)):
        state.scale = wanted
    return wanted / run.fed


def _gradient(run: PipelineRun, name: str, made: Mapping[str, Tensor]) -> Any:
    if name not in made:
        return None
    spec, shape = run.program.parameters[name], run.program.shapes[name]
    return _torch.gradient_of(made[name], spec_of(made[name], spec, shape, run))  # type: ignore[arg-type]
