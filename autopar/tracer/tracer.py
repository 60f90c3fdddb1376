"""``ColoTracer``: captures a training program once, without allocating anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from autopar import ir
from autopar._torch import FakeTensorMode, JointInput, JointOutput, lazy_graph_modules
from autopar.attributes import AttributeOutput
from autopar.errors import AutoparError, CaptureError
from autopar.garbage import collected_later
from autopar.guards import Guards
from autopar.structure import Structure
from autopar.tracer import functions
from autopar.tracer.blame import capture_error
from autopar.tracer.calls import Call, FlatModel, bind
from autopar.tracer.cleanup import clean
from autopar.tracer.convert import to_ir, value_of
from autopar.tracer.derivatives import DerivativeError, joint_directly
from autopar.tracer.device_neutral import device_neutral_ops
from autopar.tracer.export import Exported, export, refuse_changed_arguments, run_once
from autopar.tracer.fakes import fake_copy, fake_like
from autopar.tracer.hooks import without_lost_hooks
from autopar.tracer.joint import Joint, joint_of, loss_of
from autopar.tracer.own_gradients import separate_gradients
from autopar.tracer.packed import packed_by_mask
from autopar.tracer.random_ops import refuse_random
from autopar.tracer.reads import recording
from autopar.tracer.repeated import IrregularError
from autopar.tracer.skipping import equal_blocks
from autopar.tracer.stamping import stamp

OutputsMode = Literal["auto", "whole", "dtensor"]


@dataclass(frozen=True)
class Capture:
    """Everything known about a captured program.

    Args:
        graph_module: the joint torch.fx graph; every node has ``meta["val"]`` (fake) and ``meta["phase"]``.
        graph: the same graph as plain data.
        call: names of the inputs; ``call.structure.paths`` are in the order of the input placeholders.
        returned: structure of the model's outputs.
        loss: position of the scalar loss from which the backward starts; None if it starts from every output.
        differentiable: positions of the outputs that have tangents.
        constants: values of tensors that the program holds as literals, by name.
        notices: what the user should know, one sentence each.
        requires_grad: names of the outputs that have a gradient on one device, whether or not it is captured.
        unsaved: values of buffers that the model's ``state_dict`` leaves out.
        guards: what was read of the model besides its parameters and buffers.
        attribute_outputs: what a call stores in attributes, built from further outputs.
        lost: names of other places in which the forward stores tensors.
    """

    graph_module: fx.GraphModule
    graph: ir.Graph
    call: Call
    returned: Structure
    loss: int | None
    differentiable: tuple[int, ...]
    constants: Mapping[str, torch.Tensor]
    notices: tuple[str, ...] = ()
    requires_grad: frozenset[str] = frozenset()
    unsaved: Mapping[str, torch.Tensor] = field(default_factory=dict)
    guards: Guards = field(default_factory=Guards)
    attribute_outputs: tuple[AttributeOutput, ...] = ()
    lost: tuple[str, ...] = ()


def ambient_autocast() -> contextlib.AbstractContextManager[Any]:
    """Return an autocast for the trace on the CPU that matches the one around the call, on whatever device."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast("cpu", dtype=torch.get_autocast_dtype(device))
    return contextlib.nullcontext()


class ColoTracer:
    """Captures a model and its loss as one joint forward and backward torch.fx graph.

    Args:
        outputs: ``"auto"`` captures only the backward of the scalar loss if the model returns one; any other value
            captures the backward of every differentiable output.
        stored_dtype: returns the dtype in which a parameter or buffer is stored; None means its own.
        whole: run every block of the model; otherwise some blocks of a run of equal ones are copied from others.
        trains: refuse a model without an output that has a gradient.
    """

    def __init__(
        self,
        outputs: OutputsMode = "auto",
        *,
        every_tangent: bool = False,
        stored_dtype: Callable[[torch.Tensor], torch.dtype] | None = None,
        whole: bool = False,
        trains: bool = True,
    ) -> None:
        self.outputs = outputs
        self._every_tangent = every_tangent
        self._stored_dtype = stored_dtype
        self._whole = whole
        self._trains = trains

    def trace(self, model: nn.Module, meta_inputs: Any) -> fx.GraphModule:
        """Return the joint graph of ``model`` on ``meta_inputs``, with ``node.meta["val"]`` on every node.

        Raises:
            CaptureError: names the line of the model that cannot be captured.
        """
        return self.capture(model, meta_inputs).graph_module

    def capture(self, model: nn.Module, meta_inputs: Any) -> Capture:
        """Capture like ``trace``, with the meaning of inputs and outputs; under ``no_grad`` too."""
        with (
            torch.enable_grad(),
            ambient_autocast(),
            functions.recorded(),
            lazy_graph_modules(),
            collected_later(),
        ):
            return self._capture(model, meta_inputs)

    def _capture(self, model: nn.Module, meta_inputs: Any) -> Capture:
        call = meta_inputs if isinstance(meta_inputs, Call) else bind(model, *as_call(meta_inputs))
        if not self._whole:
            with contextlib.suppress(IrregularError):
                return self._capture_copy(model, call, whole=False)
        return self._capture_copy(model, call, whole=True)

    def _capture_copy(self, model: nn.Module, call: Call, *, whole: bool) -> Capture:
        """Capture a copy of the model, which the forward may change."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        copied = fake_copy(model, mode, self._stored_dtype)
        without_lost_hooks(copied)
        named = zip(call.names, call.tensors, strict=True)
        fakes = Call(call.structure, tuple(fake_like(t, mode, name=name) for name, t in named))
        with mode:
            seed = torch.zeros((), dtype=torch.int64)
        with recording(model, copied) as recorder:
            exported = self._forward(copied, fakes, mode, whole=whole)
            loss, differentiable, joint = self._joint(copied, fakes, mode, seed, exported)
        returned = exported.returned
        recorder.known.refuse_changing({str(o.target) for o in joint.outputs if o is not None and o.kind == "mutation"})
        stamp(joint, exported.cut)
        _refuse_mutations(joint)
        refuse_random(joint.graph_module.graph)
        refuse_changed_arguments(joint.graph_module.graph)
        clean(joint.graph_module)
        separate_gradients(joint.graph_module, joint.outputs)
        trainable = {n for n, p in copied.named_parameters() if p.requires_grad}
        names = exported.names
        graph_module, ins, outs = _meanings(joint.graph_module, joint.inputs, joint.outputs, call, names, trainable)
        if self._trains or differentiable:
            _check_gradients(ins, joint.outputs)
        has_loss = loss is not None or self._every_tangent
        graph = to_ir(graph_module.graph, ins, outs, type(model).__name__, has_loss=has_loss)
        reads = recorder.reads(exported.changed, equal_blocks(exported.cut))
        return Capture(
            graph_module,
            graph,
            call,
            returned,
            loss,
            differentiable,
            joint.constants,
            (*_notices(returned, call, joint.outputs), *exported.notices),
            frozenset(p for p, d in zip(names, exported.differentiable, strict=True) if d),
            guards=Guards.of(model, reads, recorder.known.conditions),
            attribute_outputs=exported.attribute_outputs,
            lost=exported.lost,
        )

    @staticmethod
    def _forward(model: nn.Module, call: Call, mode: FakeTensorMode, *, whole: bool) -> Exported:
        """Return the exported forward, or only what the model returns if its forward takes derivatives."""
        try:
            return export(model, call, mode, whole=whole)
        except DerivativeError:
            with mode:
                return run_once(model, call)

    def _joint(
        self,
        copied: nn.Module,
        call: Call,
        mode: FakeTensorMode,
        seed: torch.Tensor,
        exported: Exported,
    ) -> tuple[int | None, tuple[int, ...], Joint]:
        """Return which output is the loss, which outputs have tangents, and the forward with its backward."""
        loss = None
        if not self._every_tangent:
            count = len(exported.returned.paths)
            loss = loss_of(exported.returned, exported.values[:count], exported.differentiable[:count])
        differentiable, detached = self._differentiable(exported, loss)
        try:
            with device_neutral_ops():
                if exported.program is None:
                    flat = FlatModel(copied, call.structure)
                    flat.returned.excluded = exported.excluded
                    return (
                        loss,
                        differentiable,
                        joint_directly(flat, call.tensors, seed, loss, differentiable, detached),
                    )
                return (
                    loss,
                    differentiable,
                    joint_of(exported.program, copied, call.tensors, seed, loss, differentiable, detached),
                )
        except Exception as error:
            if exported.cut:  # a capture without skipping gives the error that the user should see
                raise IrregularError from error
            if isinstance(error, AutoparError):
                raise
            raise _error_by_running(copied, call, mode, error) from error

    def _differentiable(self, exported: Exported, loss: int | None) -> tuple[tuple[int, ...], frozenset[int]]:
        """Return the outputs from which the backward starts, and those that are detached.

        Tensors stored in attributes are detached, because they are rarely part of a loss.
        """
        if loss is not None:
            return (loss,), frozenset(range(len(exported.names))) - {loss}
        found = [i for i, d in enumerate(exported.differentiable) if d]
        returned = [i for i in found if i < len(exported.returned.paths)]
        if self._every_tangent or not returned:
            return tuple(found), frozenset()
        return tuple(returned), frozenset(found) - {*returned}


def _error_by_running(model: nn.Module, call: Call, mode: FakeTensorMode, error: Exception) -> CaptureError:
    """Return an error with the line at which the model itself fails like the joint trace, which only knows modules."""
    try:
        with mode, packed_by_mask():
            run_once(model, call)
    except CaptureError as found:
        if type(found.__cause__) is type(error):
            return found
    return capture_error(model, error)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``meta_inputs`` as arguments: a tensor, a tuple (positional) or a mapping (by keyword)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _meanings(
    module: fx.GraphModule,
    inputs: Sequence[JointInput],
    outputs: Sequence[JointOutput | None],
    call: Call,
    names: Sequence[str],
    trainable: set[str],
) -> tuple[fx.GraphModule, list[ir.Input], list[ir.Output]]:
    ins: list[ir.Input] = []
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for node, meaning in zip(placeholders, inputs, strict=True):
        name = str(meaning.target)
        kind: ir.InputKind = meaning.kind
        if kind == "input":
            at = int(meaning.target)
            kind, name = ("input", call.names[at]) if at < len(call.names) else ("seed", "seed")
        elif kind == "tangent" and not isinstance(meaning.target, int):
            raise CaptureError(
                "The forward writes a value that has a gradient to a buffer.",
                found=f"{name} keeps the graph that computed it, and so its activations, from step to step",
                hint="detach what is written to buffers: buffer.copy_(value.detach()).",
            )
        elif kind == "tangent":
            name = names[int(meaning.target)]
        elif name.startswith("constant."):
            kind = "constant"
        ins.append(ir.Input(node.name, kind, name, trainable=name in trainable and kind == "parameter"))
    outs = []
    output = next(n for n in module.graph.nodes if n.op == "output")
    for arg, result in zip(output.args[0], outputs, strict=True):
        if result is None or not isinstance(arg, fx.Node) or _changes_input(result):
            continue
        name = names[int(result.target)] if result.kind == "output" else str(result.target)
        if result.kind == "gradient" and isinstance(result.target, int):
            name = f"input:{call.names[result.target]}"
        outs.append(ir.Output(value_of(arg), result.kind, name))
    return module, ins, outs


def _refuse_mutations(joint: Joint) -> None:
    """Refuse changes of parameters, which only the optimizer's step may change, and of constants."""
    buffers = {i.target for i in joint.inputs if i.kind == "buffer"} - set(joint.constants)
    for output in joint.outputs:
        if output is None or output.kind != "mutation" or isinstance(output.target, int) or output.target in buffers:
            continue
        is_constant = output.target in joint.constants
        raise CaptureError(
            f"The forward changes {output.target.removeprefix('constant.model.')} in place.",
            found="a tensor kept as a plain attribute" if is_constant else "a parameter",
            hint="keep it with register_buffer."
            if is_constant
            else "change it outside of forward, e.g. an embedding without max_norm whose rows are scaled after step().",
        )


def _changes_input(meaning: JointOutput) -> bool:
    return meaning.kind == "mutation" and isinstance(meaning.target, int)


def _check_gradients(ins: Sequence[ir.Input], outputs: Sequence[JointOutput | None]) -> None:
    """Refuse a model without gradients: torch gives none for parameters that are lost on the way."""
    if not any(o is not None and o.kind == "gradient" for o in outputs) and any(i.trainable for i in ins):
        raise CaptureError(
            "No trainable parameter gets a gradient.",
            found="a backward graph without gradients",
            hint="return a loss or output that depends on the parameters, outside of torch.no_grad.",
        )


def _notices(returned: Structure, call: Call, outputs: Sequence[JointOutput | None]) -> tuple[str, ...]:
    changed = [call.names[int(o.target)] for o in outputs if o is not None and _changes_input(o)]
    return (
        *(f"output {path} ({kind}) is None in training" for path, kind in returned.dropped),
        *(f"the model changes input {name} in place; the caller's tensor stays as it was" for name in changed),
    )
