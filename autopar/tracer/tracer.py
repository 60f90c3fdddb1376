"""``ColoTracer``: captures a training program once, without allocating anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from autopar import ir
from autopar._torch import FakeTensorMode, JointInput, JointOutput
from autopar.errors import AutoparError, CaptureError
from autopar.structure import Structure
from autopar.tracer import functions
from autopar.tracer.blame import capture_error
from autopar.tracer.cleanup import clean
from autopar.tracer.convert import to_ir, value_of
from autopar.tracer.derivatives import DerivativeError, joint_directly
from autopar.tracer.device_neutral import device_neutral_ops
from autopar.tracer.export import Call, Exported, FlatModel, bind, export, run_once
from autopar.tracer.fakes import fake_copy, fake_like
from autopar.tracer.hooks import without_lost_hooks
from autopar.tracer.joint import Joint, joint_of, loss_of
from autopar.tracer.random_ops import refuse_random

OutputsMode = Literal["auto", "whole", "dtensor"]


@dataclass(frozen=True)
class Capture:
    """Everything known about a captured program.

    Args:
        graph_module: the joint torch.fx graph; every node has ``meta["val"]`` (fake) and ``meta["phase"]``.
        graph: the same as plain data.
        call: how inputs are named; ``call.structure.paths`` in the order of the input placeholders.
        returned: structure of the model's outputs.
        loss: position of the scalar loss that the backward is of; None when it is of every output.
        differentiable: positions of the outputs that have tangents.
        constants: values of tensors that the program holds as literals, by name.
        notices: what the user should know, one sentence each.
        requires_grad: names of the outputs that have a gradient on one device, whether or not it is captured.
        unsaved: values of buffers that the model's ``state_dict`` leaves out.
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


def ambient_autocast() -> contextlib.AbstractContextManager[Any]:
    """The autocast around the call, on whatever device, for the trace on the CPU."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast("cpu", dtype=torch.get_autocast_dtype(device))
    return contextlib.nullcontext()


class ColoTracer:
    """Captures a model and its loss as one joint forward and backward torch.fx graph.

    Args:
        outputs: ``"auto"`` captures the backward of the scalar loss alone when the model returns one; any other
            value captures the backward of every differentiable output.
        stored_dtype: in which a parameter or buffer is stored, where that is not its own dtype.
    """

    def __init__(
        self, outputs: OutputsMode = "auto", *, every_tangent: bool = False,
        stored_dtype: Callable[[torch.Tensor], torch.dtype] | None = None,
    ) -> None:  # fmt: skip
        self.outputs = outputs
        self._every_tangent = every_tangent
        self._stored_dtype = stored_dtype

    def trace(self, model: nn.Module, meta_inputs: Any) -> fx.GraphModule:
        """The joint graph of ``model`` on ``meta_inputs``; ``node.meta["val"]`` on every node.

        Raises:
            CaptureError: naming the line of the model that cannot be captured.
        """
        return self.capture(model, meta_inputs).graph_module

    def capture(self, model: nn.Module, meta_inputs: Any) -> Capture:
        """As ``trace``, with the meaning of every input and output. The backward is captured under ``no_grad`` too."""
        with torch.enable_grad(), ambient_autocast(), functions.recorded():
            return self._capture(model, meta_inputs)

    def _capture(self, model: nn.Module, meta_inputs: Any) -> Capture:
        call = meta_inputs if isinstance(meta_inputs, Call) else bind(model, *as_call(meta_inputs))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        copied = fake_copy(model, mode, self._stored_dtype)
        without_lost_hooks(copied)
        fakes = tuple(fake_like(t, mode) for t in call.tensors)
        with mode:
            seed = torch.zeros((), dtype=torch.int64)
        exported = self._forward(copied, Call(call.structure, fakes), mode)
        returned, values = exported.returned, exported.values
        loss = None if self._every_tangent else loss_of(returned.paths, values, exported.differentiable)
        differentiable = _differentiable(exported, loss)
        try:
            with device_neutral_ops():
                if exported.program is None:
                    joint = joint_directly(FlatModel(copied, call.structure), fakes, seed, loss, differentiable)
                else:
                    joint = joint_of(exported.program, copied, fakes, seed, loss, differentiable)
        except AutoparError:
            raise
        except Exception as error:
            raise capture_error(model, error) from error
        _refuse_changed(joint)
        refuse_random(joint.graph_module.graph)
        clean(joint.graph_module)
        trainable = {n for n, p in copied.named_parameters() if p.requires_grad}
        graph_module, ins, outs = _meanings(joint.graph_module, joint.inputs, joint.outputs, call, returned, trainable)
        _check_gradients(outs, ins, joint.outputs)
        graph = to_ir(graph_module.graph, ins, outs, type(model).__name__)
        return Capture(
            graph_module, graph, call, returned, loss, differentiable, joint.constants,
            (*_notices(returned, call, joint.outputs), *exported.notices),
            frozenset(p for p, d in zip(returned.paths, exported.differentiable, strict=True) if d),
        )  # fmt: skip

    @staticmethod
    def _forward(model: nn.Module, call: Call, mode: FakeTensorMode) -> Exported:
        """The exported forward, or, of a model that takes derivatives in it, what it returns alone."""
        try:
            return export(model, call)
        except DerivativeError:
            with mode:
                return run_once(model, call)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``meta_inputs`` as arguments: a tensor, a tuple (positional) or a mapping (by keyword)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _differentiable(exported: Exported, loss: int | None) -> tuple[int, ...]:
    if loss is not None:
        return (loss,)
    return tuple(i for i, d in enumerate(exported.differentiable) if d)


def _meanings(
    module: fx.GraphModule, inputs: Sequence[JointInput], outputs: Sequence[JointOutput | None],
    call: Call, returned: Structure, trainable: set[str],
) -> tuple[fx.GraphModule, list[ir.Input], list[ir.Output]]:  # fmt: skip
    ins: list[ir.Input] = []
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for node, meaning in zip(placeholders, inputs, strict=True):
        name = str(meaning.target)
        kind: ir.InputKind = meaning.kind
        if kind == "input":
            at = int(meaning.target)
            kind, name = ("input", call.names[at]) if at < len(call.names) else ("seed", "seed")
        elif kind == "tangent":
            name = returned.paths[int(meaning.target)]
        elif name.startswith("constant."):
            kind = "constant"
        ins.append(ir.Input(node.name, kind, name, trainable=name in trainable and kind == "parameter"))
    outs = []
    output = next(n for n in module.graph.nodes if n.op == "output")
    for arg, meant in zip(output.args[0], outputs, strict=True):
        if meant is None or not isinstance(arg, fx.Node) or _changes_input(meant):
            continue
        name = returned.paths[int(meant.target)] if meant.kind == "output" else str(meant.target)
        if meant.kind == "gradient" and isinstance(meant.target, int):
            name = f"input:{call.names[meant.target]}"
        outs.append(ir.Output(value_of(arg), meant.kind, name))
    return module, ins, outs


def _refuse_changed(joint: Joint) -> None:
    """Parameters change in the optimizer's step, and constants never."""
    buffers = {i.target for i in joint.inputs if i.kind == "buffer"} - set(joint.constants)
    for output in joint.outputs:
        if output is None or output.kind != "mutation" or isinstance(output.target, int) or output.target in buffers:
            continue
        is_constant = output.target in joint.constants
        raise CaptureError(
            f"The forward changes {output.target.removeprefix('constant.model.')} in place.",
            found="a tensor kept as a plain attribute" if is_constant else "a parameter",
            hint="keep it with register_buffer." if is_constant else "change it outside of forward.",
        )


def _changes_input(meant: JointOutput) -> bool:
    return meant.kind == "mutation" and isinstance(meant.target, int)


def _check_gradients(
    outs: Sequence[ir.Output], ins: Sequence[ir.Input], outputs: Sequence[JointOutput | None]
) -> None:
    """A missing gradient would train silently wrong: torch gives none for parameters it lost on the way."""
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
