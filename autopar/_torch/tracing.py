"""torch.export, AOTAutograd, torch.fx and fake tensors: what capture takes of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class JointInput:
    """Meaning of a joint graph's placeholder: ``target`` is a parameter's or buffer's name in the traced module,
    or the position of an input, or of the output whose tangent it is."""

    kind: Literal["parameter", "buffer", "input", "tangent"]
    target: str | int


@dataclass(frozen=True)
class JointOutput:
    """Meaning of a joint graph's result: an output's position, the gradient of ``target``, or its new value."""

    kind: Literal["output", "gradient", "mutation"]
    target: str | int


def function_transforms() -> tuple[tuple[Any, str], ...]:
    """What every derivative of torch.func passes through, as module and name; there is no public hook."""
    from torch._functorch import eager_transforms

    return (eager_transforms, "grad_increment_nesting"), (eager_transforms, "jvp_increment_nesting")


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a (fake or functional) tensor: aliasing outputs have equal keys."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    return int(tensor.untyped_storage()._cdata)


def active_fake_mode() -> FakeTensorMode | None:
    """The fake mode under which ops run now, if any."""
    from torch._guards import active_fake_mode as active

    return active()


def joint_graph(
    module: nn.Module, args: tuple[torch.Tensor, ...], decompositions: Mapping[Any, Callable[..., Any]]
) -> tuple[fx.GraphModule, list[JointInput], list[JointOutput | None]]:
    """The joint forward and backward ATen graph of ``module(*args)`` with the meaning of each end.

    ``aot_export_joint_with_descriptors`` is what torch's own compilers stack on; the public exporters stop at
    the forward. An output without gradient appears as None.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        # An op by triton_op stays one op, as any custom op does: its rule and its CPU kernel go with it.
        stack.enter_context(torch._functorch.config.patch(decompose_custom_triton_ops=False))
        # What an op changes is a result of a call of its own, rather than a part of a base shared with others.
        stack.enter_context(torch._inductor.config.patch(enable_auto_functionalized_v2=False))
        stack.enter_context(_unordered("aten::_linalg_check_errors"))
        joint = aot_export_joint_with_descriptors(stack, module, args, decompositions=dict(decompositions))
        graph_module = joint.graph_module
        assert isinstance(graph_module, fx.GraphModule)
    inputs: list[JointInput] = []
    outputs: list[JointOutput | None] = []
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_input_meaning(node.meta["desc"]))
        elif node.op == "output":
            outputs = [None if d is None else _output_meaning(d) for d in node.meta["desc"]]
    return graph_module, inputs, outputs


def compiled_when_called() -> contextlib.AbstractContextManager[Any]:
    """While capturing: Python code of the graphs on the way, which nobody runs, is not made."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


@contextlib.contextmanager
def masks_kept() -> Iterator[None]:
    """While exporting, ``nn.Transformer`` and its parts read their masks as they are, unless the call says that one is
    causal: torch compares values with a causal mask, only to choose a kernel."""

    def causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with mock.patch.object(nn.modules.transformer, "_detect_is_causal_mask", causal):
        yield


@contextlib.contextmanager
def failing_quietly() -> Iterator[None]:
    """While exporting, torch does not print the graph so far before it raises: the error says which line it was."""
    from torch.export import _trace

    def quiet(*_: Any, **__: Any) -> None:
        return

    def unknown(record: logging.LogRecord) -> bool:
        return "find user code" not in record.getMessage()

    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    log.addFilter(unknown)
    try:
        with mock.patch.object(_trace, "print", quiet, create=True):
            yield
    finally:
        log.removeFilter(unknown)


@contextlib.contextmanager
def without_hooks_left() -> Iterator[None]:
    """Take away the hooks for buffers of any module that were added meanwhile: an export that fails leaves its own,
    which keeps what was exported alive."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for added in set(hooks) - before:
            del hooks[added]


def changes_arguments(op: Any) -> bool:
    """Whether ``op`` is a custom op that changes some of its arguments."""
    return isinstance(op, OpOverload) and op._schema.is_mutable and op.namespace not in ("aten", "prims", "autopar")


def is_mutable(target: Any) -> bool:
    """Whether an op changes some of its arguments."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_random(op: OpOverload) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def traced_node(tensor: torch.Tensor) -> fx.Node | None:
    """The node that stands for ``tensor`` in the graph that is being traced; only private functions tell it."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    slot = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def traced_constant(node: fx.Node) -> Any:
    """The tensor of a ``get_attr`` node in the graph that is being traced."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    root: Any = getattr(mode.tracer, "root", None) if mode is not None else None
    return getattr(root, str(node.target), None)


def is_functionalized(target: Any) -> bool:
    """Whether a node calls a custom op on copies of the arguments that it changes: the op is its first argument, all
    of the op's arguments are given by name, and it returns what the op returns and then the changed copies."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    return target is auto_functionalized


@contextlib.contextmanager
def grouped_products() -> Iterator[None]:
    """Let fake grouped products take float16 and float32, as the kernels do; torch's own checks for bfloat16 alone."""
    from torch import _meta_registrations as registered

    check: Callable[..., torch.Tensor] = registered._meta_grouped_mm_common
    result: Callable[..., torch.Tensor] = registered._create_grouped_mm_output_tensor

    def checked(a: torch.Tensor, b: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        plain = args[:2] in ((), (None, None)) and options.get("scale_a") is None and options.get("bias") is None
        if plain and a.dtype == b.dtype and a.dtype in (torch.float16, torch.float32):
            return result(a, b, options.get("offs"), options.get("out_dtype") or a.dtype)
        return check(a, b, *args, **options)

    with mock.patch.object(registered, "_meta_grouped_mm_common", checked):
        yield


@contextlib.contextmanager
def as_later_versions() -> Iterator[None]:
    """While tracing, right what torch 2.11 does wrong; later versions do the same by themselves.

    The last states of an LSTM keep a dim of size one. A loss asks at once whether it has as many rows as labels, which
    nobody knows where masks choose both, rather than when the program runs.
    """
    from torch._decomp import decompositions

    layer: Callable[..., Any] = decompositions.one_layer_lstm

    def states(*args: Any, **options: Any) -> Any:
        out, last = layer(*args, **options)
        return out, tuple(x.squeeze(0) if x.ndim == 3 else x for x in last)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(decompositions, "one_layer_lstm", states))
        for name in ("cross_entropy_loss", "nll_loss_nd"):
            loss = partial(_of_equal_rows, getattr(torch._C._nn, name))
            stack.enter_context(mock.patch.object(torch._C._nn, name, loss))
        yield


def _of_equal_rows(loss: Callable[..., torch.Tensor], x: torch.Tensor, labels: torch.Tensor, *options: Any) -> Any:
    if x.ndim and labels.ndim and any(isinstance(t.shape[0], torch.SymInt) for t in (x, labels)):
        torch._check(x.shape[0] == labels.shape[0])  # type: ignore[no-untyped-call]
    return loss(x, labels, *options)


@contextlib.contextmanager
def _unordered(op: str) -> Iterator[None]:
    """Keep an op that only raises from being ordered by tokens, which become inputs and outputs of the graph."""
    from torch._higher_order_ops import effects

    if not hasattr(effects, "_get_effect"):  # torch 2.11
        yield
        return
    before = effects._get_effect(op)
    effects._register_effectful_op(op, None)
    try:
        yield
    finally:
        effects._register_effectful_op(op, before)


def torch_decompositions(*ops: OpOverload) -> dict[OpOverload, Callable[..., Any]]:
    """What torch's own compilers take ops apart into; there is no public table."""
    from torch._decomp import get_decompositions

    return {op: function for op, function in get_decompositions(ops).items() if op in ops}


def with_ends_of(graph: fx.Graph, old: fx.Graph) -> fx.Graph:
    """``graph`` taking and returning what ``old`` does: how it packs them has no public name."""
    graph.set_codegen(old._codegen)
    return graph


def _input_meaning(desc: Any) -> JointInput:
    from torch._functorch._aot_autograd import descriptors as d

    match desc:
        case d.ParamAOTInput():
            return JointInput("parameter", desc.target)
        case d.BufferAOTInput():
            return JointInput("buffer", desc.target)
        case d.PlainAOTInput():
            return JointInput("input", desc.idx)
        case d.TangentAOTInput():
            return JointInput("tangent", _output_meaning(desc.output).target)
    raise AssertionError(f"torch gave the joint graph an input of a new kind: {desc}")


def _output_meaning(desc: Any) -> JointOutput:
    from torch._functorch._aot_autograd import descriptors as d

    match desc:
        case d.PlainAOTOutput():
            return JointOutput("output", desc.idx)
        case d.InputMutationAOTOutput():
            return JointOutput("mutation", _input_meaning(desc.mutated_input).target)
        case d.GradAOTOutput():
            return JointOutput("gradient", _input_meaning(desc.grad_of).target)
    raise AssertionError(f"torch gave the joint graph an output of a new kind: {desc}")


def defining_module(op: OpOverload) -> str:
    """The module that registered an op with the decorator ``custom_op``; empty for all others."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(f"{op.namespace}::{op._schema.name.split('::')[1]}")
    module = getattr(getattr(found, "_init_fn", None), "__module__", "") or ""
    return "" if module.startswith(("torch.", "__")) else module
