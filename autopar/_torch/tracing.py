"""torch.export, AOTAutograd, torch.fx and fake tensors: what capture needs of them."""

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
    """Meaning of a joint graph's placeholder.

    ``target`` is the name of a parameter or buffer in the traced module, the position of an input, or the position of
    the output whose tangent it is.
    """

    kind: Literal["parameter", "buffer", "input", "tangent"]
    target: str | int


@dataclass(frozen=True)
class JointOutput:
    """Meaning of a joint graph's result: an output's position, the gradient of ``target``, or its new value."""

    kind: Literal["output", "gradient", "mutation"]
    target: str | int


def function_transforms() -> tuple[tuple[Any, str], ...]:
    """Return module and name of the functions that every derivative of torch.func calls; there is no public hook."""
    from torch._functorch import eager_transforms

    return (eager_transforms, "grad_increment_nesting"), (eager_transforms, "jvp_increment_nesting")


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of the memory behind a (fake or functional) tensor; aliases have equal keys."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    return int(tensor.untyped_storage()._cdata)


def active_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode under which ops run now, if any."""
    from torch._guards import active_fake_mode as active

    return active()


def joint_graph(
    module: nn.Module, args: tuple[torch.Tensor, ...], decompositions: Mapping[Any, Callable[..., Any]]
) -> tuple[fx.GraphModule, list[JointInput], list[JointOutput | None]]:
    """Return the joint forward and backward ATen graph of ``module(*args)``, with the meaning of each input and output.

    ``aot_export_joint_with_descriptors`` is what torch's own compilers build on; the public exporters stop at the
    forward. A result that does not exist appears as None.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        # An op registered by triton_op stays one op like any custom op, together with its rule and its CPU kernel.
        stack.enter_context(torch._functorch.config.patch(decompose_custom_triton_ops=False))
        # Each argument that an op changes is a result of the op's own call, not part of a base shared with others.
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


def lazy_graph_modules() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which intermediate graphs, which nobody runs, do not generate Python code."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


@contextlib.contextmanager
def without_causal_detection() -> Iterator[None]:
    """Keep ``nn.Transformer`` and its parts, during an export, from comparing their masks with a causal one.

    torch compares the values only to choose a kernel. Masks are then taken as they are, unless the call says
    ``is_causal``.
    """

    def causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with mock.patch.object(nn.modules.transformer, "_detect_is_causal_mask", causal):
        yield


@contextlib.contextmanager
def without_export_prints() -> Iterator[None]:
    """Keep torch from printing the partial graph when an export fails: the error already names the line."""
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
def without_leftover_hooks() -> Iterator[None]:
    """Remove the global hooks for buffers that were added in the body: a failed export leaves its own, which keep the
    exported module alive."""
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
    """Return the node that stands for ``tensor`` in the graph being traced; only private functions know it."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    slot = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def constant_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a fake tensor that was made from one; no public name tells."""
    return getattr(tensor, "constant", None)


def traced_constant(node: fx.Node) -> Any:
    """Return the tensor of a ``get_attr`` node in the graph being traced."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    root: Any = getattr(mode.tracer, "root", None) if mode is not None else None
    return getattr(root, str(node.target), None)


def is_functionalized(target: Any) -> bool:
    """Whether a node calls a custom op on copies of the arguments that the op changes.

    The op is the node's first argument, and all arguments of the op are given by name. The node returns the op's
    results, followed by the changed copies.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    return target is auto_functionalized


@contextlib.contextmanager
def grouped_products() -> Iterator[None]:
    """Let fake grouped products take float16 and float32 as the kernels do; torch's check allows bfloat16 only."""
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
def backported_fixes() -> Iterator[None]:
    """Correct, while tracing, what torch 2.11 does wrong and later versions do right.

    The last states of an LSTM keep a dim of size one. A loss checks at trace time whether it has as many rows as
    labels, which nobody knows where masks choose both, instead of at run time.
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
    """Keep an op that only raises from being ordered by tokens, which would become inputs and outputs of the graph."""
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
    """Return the decompositions that torch's own compilers use for ``ops``; there is no public table."""
    from torch._decomp import get_decompositions

    return {op: function for op, function in get_decompositions(ops).items() if op in ops}


def with_signature_of(graph: fx.Graph, old: fx.Graph) -> fx.Graph:
    """Make ``graph`` take and return what ``old`` does, in its packing of inputs and outputs, which is private."""
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
    """Return the module that registered an op with the decorator ``custom_op``, or an empty text for other ops."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(f"{op.namespace}::{op._schema.name.split('::')[1]}")
    module = getattr(getattr(found, "_init_fn", None), "__module__", "") or ""
    return "" if module.startswith(("torch.", "__")) else module
