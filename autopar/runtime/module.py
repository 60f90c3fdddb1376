"""The module that users train: their own, with its forward replaced by the compiled program.

As in FSDP2, the model's class is swapped for a subclass: attributes, methods, FQNs and ``isinstance`` keep working.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.attributes import AttributeOutput, Held, Place
from autopar.errors import AutoparError, InputError
from autopar.guards import Difference, Guards
from autopar.mesh import Mesh
from autopar.precision import computing_in
from autopar.runtime.accumulation import Sums
from autopar.runtime.agreement import same_call, this_rank, warn_of_other_values
from autopar.runtime.execution import Executable, Step, forward_values, plain_outputs
from autopar.runtime.frameworks import Prepared
from autopar.runtime.gathering import EVERY_RANK, save_pretrained_method
from autopar.runtime.measured_steps import Marks, PredictionCheck, StepClock, stamp
from autopar.runtime.tables import Tables, tables, without_tables
from autopar.runtime.waiting import roll_call
from autopar.sharding import ShardingSpec
from autopar.spmd.ranks import ProcessRank, StartingRank
from autopar.structure import Structure

STORED = ("parameter", "buffer")

MAX_VARIANTS = 16
"""Number of programs kept for other batch shapes and modes; beyond it a warning says that each costs a compilation."""


class Call(Protocol):
    """A bound call: its tensors and their names."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def structure(self) -> Structure: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, eq=False)
class Variant:
    """A compiled program with how its inputs are named and how its outputs are assembled.

    Args:
        build: turns the list of output tensors into what the model returns.
        outputs: names of the outputs, in order.
        every_tangent: compiles the same program with a backward from every output.
        constants: tensors that the program holds as literals.
        guards: what the program was captured from.
        parameters: spec and global shape of each parameter that the program takes.
        number: index of the program in the order of compilation, the same on every rank.
        attribute_outputs: what a call stores in attributes of modules.
        lost: names of other places in which the forward stores tensors; cleared once the user is warned.
    """

    executable: Executable
    build: Callable[[Sequence[Any]], Any]
    outputs: tuple[str, ...]
    every_tangent: Callable[[], Variant]
    constants: Mapping[str, Tensor]
    guards: Guards
    parameters: Mapping[str, tuple[ShardingSpec, tuple[int, ...]]]
    number: int
    attribute_outputs: tuple[AttributeOutput, ...] = ()
    lost: list[str] = field(default_factory=list)


@dataclass
class State:
    """What a parallel module knows beyond its parameters. Copies of the module share it.

    Args:
        bind: binds a call to the signature of the model's own forward.
        compile: compiles the variant for a call with other shapes, another mode, or a model that has changed.
        plan: the plan of the first variant.
        planned: the call that the plan was made for.
        place: places the named parameters and buffers on the mesh at these specs.
        mixed_precision: the precision of every call's autocast, if any.
        attributes_before: values that attributes had before any call, for those in which calls store tensors.
        graph: the graph that the plan was made for.
        variants: compiled programs by key, the most recently used first.
        compiled: number of programs compiled so far.
        plain_evaluation: whether a call without gradients returns plain tensors even beside a loss.
        compared: kinds of calls whose inputs were compared between the ranks, which should pass the same batch.
    """

    mesh: Mesh
    device_mesh: DeviceMesh
    bind: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Call]
    compile: Callable[[nn.Module, Any], Variant]
    place: Callable[[nn.Module, Sequence[str], Mapping[str, ShardingSpec]], None]
    plan: Any
    planned: Call
    local_batch: bool
    mixed_precision: str | None = None
    graph: Any = None
    variants: dict[Any, list[Variant]] = field(default_factory=dict)
    compiled: int = 0
    numbers: dict[Any, int] = field(default_factory=dict)
    attributes_before: dict[Place, Held] = field(default_factory=dict)
    plain_evaluation: bool = True
    compared: set[Any] = field(default_factory=set)
    rank: ProcessRank = field(init=False)
    clock: StepClock = field(default_factory=StepClock)

    def __post_init__(self) -> None:
        self.rank = ProcessRank(self.device_mesh)

    @property
    def device(self) -> torch.device:
        """The device of this rank's shards."""
        return self.rank.device

    def number_of(self, key: Any) -> int:
        """Return a number that identifies a program and whether gradients are enabled, the same on every rank."""
        asked = key, torch.is_grad_enabled()
        if asked not in self.numbers:
            digest = hashlib.blake2b(repr(asked).encode(), digest_size=8).digest()
            self.numbers[asked] = int.from_bytes(digest, "big") >> 2
        return self.numbers[asked]

    @property
    def programs(self) -> list[Variant]:
        """All programs, in the order in which they were compiled."""
        return sorted((v for known in self.variants.values() for v in known), key=lambda v: v.number)

    def add(self, key: Any, variant: Variant) -> None:
        """Keep a program; if there are too many, drop the least recently used."""
        if len(self.programs) >= MAX_VARIANTS:
            oldest = next(iter(self.variants))
            self.variants[oldest].pop()
            if not self.variants[oldest]:
                del self.variants[oldest]
        self.variants.setdefault(key, []).insert(0, variant)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context under which every call runs."""
        return computing_in(self.mixed_precision, self.device.type)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """Return the same object: a copy of the model has its own parameters but runs the same programs."""
        return self


@dataclass
class _VariantHost:
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


class ParallelModule(nn.Module):
    """The mixin that ``autoparallelize`` adds to the user's class."""

    _autopar: State
    _is_accelerate_prepared = Prepared()
    """Tells Hugging Face Accelerate and its Trainer that the model is already prepared, so that they do not wrap it."""
    accepts_loss_kwargs = False
    """Tells the Trainer that the loss is already the mean over all ranks, and not to pass a number of tokens."""
    _autopar_sums: Sums

    @property
    def plan(self) -> Any:
        """The plan of this module."""
        return self._autopar.plan

    def deliver_gradients(self) -> int:
        """Give the parameters the gradients summed up so far, after an incomplete cycle of ``accumulation_steps``.

        Returns:
            The number of micro-batches in these gradients; 0 if none are pending.
        """
        roll_call("deliver_gradients", EVERY_RANK)
        return self._autopar_sums.deliver(self, self._autopar)

    def compare_with_prediction(self, k: int = 10) -> PredictionCheck:
        """Compare predicted and measured seconds, of the last ``k`` steps at the time of reading, and peak memory.

        Seconds are those of forward and backward, on a CPU also by module. A CPU does not track memory, so the next
        step with its optimizer is metered, which is slow, and excluded from the seconds.

        Raises:
            AutoparError: ``k`` is not a positive integer.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise AutoparError("k must be a positive integer.", found=repr(k), hint="model.compare_with_prediction(10)")
        self._autopar.clock.memory.wanted = True
        return PredictionCheck(self.plan, self._autopar.clock, k, self._autopar.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Keep our attributes of the parameters when ``to`` and its like replace DTensors by new ones."""
        known = {name: dict(vars(p)) for name, p in self.named_parameters()}
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for name, parameter in self.named_parameters():
            vars(parameter).update(known[name])
        return self

    def __copy__(self) -> ParallelModule:
        twin = type(self).__new__(type(self))
        twin.__dict__ = without_tables(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(without_tables(self.__dict__), memo)
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise AutoparError(
            "A parallel model cannot be pickled: each process holds only its shards.",
            found=f"{type(self).__name__} given to pickle or torch.save",
            hint="save model.state_dict() with torch.distributed.checkpoint.save.",
        )


def parallel_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``kind`` whose forward is the compiled program, with the original's signature."""

    @functools.wraps(kind.forward)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "_autopar_original": kind, "forward": forward}
    return type(f"Parallel{kind.__name__}", (ParallelModule, kind), names | save_pretrained_method(kind))


@dataclass(frozen=True)
class Asked:
    """A call as one rank sees it.

    Args:
        key: the key of the programs that may serve it.
        variant: a program whose guards hold; None if it has to be compiled.
        loose: parameters and buffers that the user has put into the model since it was placed.
    """

    call: Call
    key: Any
    variant: Variant | None
    loose: tuple[str, ...]

    @property
    def number(self) -> int | None:
        return self.variant.number if self.variant is not None else None


def run(model: ParallelModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the compiled program for a call of the model."""
    stored = tables(model)
    asked, settle = _agreed_call(model, args, kwargs, stored)
    if asked.loose:
        settle()
        _place(model, asked)
        return run(model, args, kwargs)
    try:
        variant, outputs, mutations = _called(model, asked, stored, settle)
    except Exception:
        settle()  # another rank's error may be the cause, and takes precedence; the other ranks wait to hear from all
        raise
    settle()
    _write_back(variant, mutations, stored)
    if variant.attribute_outputs or variant.lost:
        _leave(model, variant, outputs)
    return variant.build(outputs)


def _place(model: ParallelModule, asked: Asked) -> None:
    """Place the tensors that the user put into the model, by the specs of a known program or else of a new one."""
    state, stored = model._autopar, tables(model)
    loose = {name: stored.tensor(name) for name in asked.loose}
    known = {
        name: spec
        for program in state.programs
        for name, (spec, shape) in program.parameters.items()
        if name in loose and tuple(loose[name].shape) == shape
    }
    if all(name in known for name, tensor in loose.items() if isinstance(tensor, nn.Parameter)):
        state.place(model, asked.loose, known)
        return
    variant = _compiled(model, asked)
    state.place(model, asked.loose, {name: spec for name, (spec, _) in variant.parameters.items()} | known)
    with state.precision():
        state.add(variant_key(model, asked.call), variant)


def _compiled(model: ParallelModule, asked: Asked) -> Variant:
    with torch.inference_mode(mode=False):
        return model._autopar.compile(model, asked.call)


def _called(
    model: ParallelModule, asked: Asked, stored: Tables, settle: Callable[[], None]
) -> tuple[Variant, list[Any], list[Any]]:
    """Run the program of a call. Return it, its outputs and its mutations.

    ``settle`` must come before anything that ranks do together: a compilation, a gather of inputs, a common seed, and
    the program's first collective.
    """
    state, call = model._autopar, asked.call
    if asked.variant is None or any(isinstance(t, DTensor) for t in call.tensors):
        settle()
    if not state.local_batch and asked.key not in state.compared:
        settle()
        plain = {n: t for n, t in zip(call.names, call.tensors, strict=True) if not isinstance(t, DTensor)}
        warn_of_other_values(plain)
        state.compared.add(asked.key)
    with state.precision():
        variant = _variant(model, asked)
    executable = variant.executable
    if executable.random or executable.compiled:  # compiled code starts collectives by itself
        settle()
    given = _given(call, variant, state)
    operands = [stored.tensor(m.name) if m.kind in STORED else given[m.kind, m.name] for m, _ in executable.inputs]
    host = _VariantHost(
        model,
        StartingRank(state.rank, settle),
        state.mesh,
        state.device_mesh,
        state.local_batch,
        functools.partial(_every_tangent, model, asked.key, variant),
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
            outputs = plain_outputs(outputs, _whole_batch(call, state), state.device_mesh)
    return variant, outputs, mutations


def _every_tangent(model: ParallelModule, key: Any, variant: Variant) -> Executable:
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
    return made.executable


def _whole_batch(call: Call, state: State) -> int | None:
    """Return how many samples all ranks pass together, with local batches; else None."""
    if not state.local_batch:
        return None
    return next((t.shape[0] for t in call.tensors if t.ndim), 0) * state.mesh.size


def _given(call: Call, variant: Variant, state: State) -> dict[tuple[str, str], Tensor]:
    """Return what a program can take besides parameters and buffers, by kind and name."""
    found = {("constant", n): t.to(state.device) for n, t in variant.constants.items()}
    for name, tensor in zip(call.names, call.tensors, strict=True):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found["input", name] = whole.to(state.device)
    if variant.executable.random:
        found["seed", "seed"] = _drawn_seed(state)
    else:
        found["seed", "seed"] = torch.zeros((), dtype=torch.int64, device=state.device)
    return found


def _drawn_seed(state: State) -> Tensor:
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


def _leave(model: ParallelModule, variant: Variant, outputs: Sequence[Any]) -> None:
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


def _agreed_call(
    model: ParallelModule, args: Sequence[Any], kwargs: Mapping[str, Any], stored: Tables
) -> tuple[Asked, Callable[[], None]]:
    """Bind a call. It is known to be the same on every rank once the second result was called."""
    state = model._autopar

    def bound() -> Asked:
        call = state.bind(model, args, kwargs)
        with state.precision():
            key = variant_key(model, call, stored)
        known = state.variants.get(key, ())
        if not known:
            check_call(state.planned, call)
        variant = next((v for v in known if stored.meet(v.guards, model)), None)
        return Asked(call, key, variant, stored.layout.loose)

    gradients = torch.is_grad_enabled()
    return same_call(
        bound,
        lambda asked: state.number_of((asked.key, asked.number, asked.loose)),
        lambda asked: _described(model, asked, gradients),
    )


def _described(model: ParallelModule, asked: Asked, gradients: bool) -> dict[str, str]:
    call = asked.call
    said = {n: f"{tuple(t.shape)} {t.dtype}" for n, t in zip(call.names, call.tensors, strict=True)}
    said |= {path: repr(value) for path, value in call.structure.plain}
    changed = str(_difference(model, asked) or "nothing") if asked.variant is None else "nothing"
    said |= {"changed since the program was captured": changed, "put into the model": ", ".join(asked.loose)}
    return said | {"training": str(model.training), "gradients": str(gradients)}


def _difference(model: ParallelModule, asked: Asked) -> Difference | None:
    """Return why no program of these shapes serves a call: the difference from the one that fits best."""
    found = (variant.guards.difference(model) for variant in model._autopar.variants.get(asked.key, ()))
    return max((d for d in found if d is not None), key=lambda d: d.at, default=None)


def _variant(model: ParallelModule, asked: Asked) -> Variant:
    """Return the program for a call, compiled if need be, and mark it as the most recently used."""
    state, variant = model._autopar, asked.variant
    if variant is None:
        changed = _difference(model, asked)
        if changed is not None and this_rank() == 0:
            warnings.warn(
                f"{changed}, so the program is compiled again; make what changes often an input or a buffer.",
                stacklevel=7,
            )
        elif len(state.programs) >= MAX_VARIANTS:
            warnings.warn(
                f"{MAX_VARIANTS} programs were compiled for different batches, so the oldest is dropped; pad batches "
                f"to few sizes, or plan for a range of them with dynamic_shapes.",
                stacklevel=7,
            )
        variant = _compiled(model, asked)
        state.add(asked.key, variant)
    known = state.variants[asked.key] = state.variants.pop(asked.key)
    known.remove(variant)
    known.insert(0, variant)
    return variant


def variant_key(model: nn.Module, call: Call, stored: Tables | None = None) -> Any:
    """Return what a program depends on: shapes, plain arguments, modules' modes, the model's tensors, and autocast.

    Args:
        stored: the model's tables, if known.
    """
    named, stored = zip(call.names, call.tensors, strict=True), stored or tables(model)
    tensors = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in named)
    plain = tuple((path, type(value), value) for path, value in call.structure.plain)
    parameters = tuple([(p.requires_grad, p.dtype) for p in stored.parameters])
    cast = tuple(torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return tensors, plain, stored.modes(model), parameters, stored.layout.digest, (*cast, torch.get_default_dtype())


def check_call(planned: Call, call: Call) -> None:
    """Refuse inputs of another kind than the plan was made for.

    Sizes may differ. Without gradients, as in a validation without labels, inputs may be added or missing.

    Raises:
        InputError: another structure, number of dims or dtype.
    """
    missing, new = set(planned.names) - set(call.names), set(call.names) - set(planned.names)
    if (missing or new) and torch.is_grad_enabled():
        raise InputError(
            "The inputs have another structure than the plan was made for.",
            found=f"missing {sorted(missing)}, new {sorted(new)}",
            hint="call the model with the arguments that meta_inputs had, or under torch.no_grad().",
        )
    known = dict(zip(planned.names, planned.tensors, strict=True))
    for name, tensor in zip(call.names, call.tensors, strict=True):
        like = known.get(name, tensor)
        if tensor.ndim != like.ndim or tensor.dtype != like.dtype:
            raise InputError(
                f"The input {name} has another number of dims or another dtype than the plan was made for.",
                found=f"{tuple(tensor.shape)} {tensor.dtype}, planned {tuple(like.shape)} {like.dtype}",
                hint="convert the input, or parallelize the model with meta_inputs like it.",
            )
