"""Compiles with Inductor while keeping the order of a plan."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves


def inductor(
    function: Callable[..., tuple[Any, ...]],
    inputs: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[[list[Any]], Any]:
    """Compile ``function`` for ``inputs`` with Inductor; the result takes its inputs as a list, which it empties.

    ``torch.compile`` would trace with Dynamo, keep the list's tensors alive and guard each call; Inductor's own entry
    point takes a graph of ATen ops. The plan decides what a program launches, waits for and frees when, so those of
    Inductor's passes that move ops for memory or locality are off. They would also order collectives by the sizes of
    shards, which differ between ranks.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor caches a compiled graph on disk only if its sizes could be symbols.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    # A mode that counts memory, under which the first step may run, would otherwise see the trace.
    with torch.no_grad(), without_modes(), mode:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        table = {op: d for op, d in select_decomp_table().items() if _packet(op) not in _PRODUCTS | _GATHERED}
        table |= decompositions
        # Inductor takes functional graphs: it would move an in-place addition as if it were a read.
        functional = torch.func.functionalize(function, remove="mutations")
        table = {op: _marking_inner(d) for op, d in table.items()}
        graph = make_fx(functional, decomposition_table=table, tracing_mode="real")(*fakes)
    _mark_sections(graph.graph)
    _mark_shared(graph.graph)
    choices, in_order = _as_planned(_marks(graph.graph))
    as_planned = config.patch(
        reorder_for_locality=False,
        reorder_for_peak_memory=False,
        layout_optimization=False,
        pattern_matcher=False,
        _post_fusion_custom_pass=in_order,
    )
    # On CPUs all kernels up to the next product go into one function, which would hold all their buffers.
    one_by_one = mock.patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_modes())
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(V.set_choices_handler(choices))
        stack.enter_context(as_planned)
        stack.enter_context(one_by_one)
        stack.enter_context(_cpp_kernels_in_units())
        made: Any = compile_fx_inner(graph, fakes, is_inference=True)

    def run(tensors: list[Any]) -> Any:
        return made(tensors)

    return run


@dataclass(frozen=True)
class _CppKernel:
    """A kernel that Inductor has generated but not yet compiled."""

    argtypes: tuple[str, ...]
    source: str

    @property
    def includes(self) -> list[str]:
        return [line for line in self.source.splitlines() if line.startswith("#include")]

    def within(self, namespace: str) -> str:
        """Return its source in its own namespace, since all kernels are called ``kernel``."""
        lines = (line for line in self.source.splitlines() if not line.startswith("#include"))
        return "\n".join([f"namespace {namespace} {{", *lines, "}"]).replace('extern "C"', "")


KERNELS_PER_UNIT = 64
"""Number of kernels that are compiled in one unit."""


@contextlib.contextmanager
def _cpp_kernels_in_units() -> Iterator[None]:
    """Compile many of Inductor's CPU kernels in one unit, since most of the time for a single one goes into headers.

    Each kernel is a function of one extension module, bound as Inductor binds them.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    template = Cache.suffix_template
    at, end = template.find("static PyObject* {entry_func}_py"), template.find("static PyMethodDef")
    method = '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}},'
    if not 0 < at < end or method not in template[end:]:
        yield  # this torch version binds kernels differently
        return
    finish = AsyncCompile.wait

    def unit(kernels: Sequence[_CppKernel]) -> str:
        bound = []
        for i, k in enumerate(kernels):
            taken = (f"parse_arg<{t.replace('const ', '')}>(args, {n})" for n, t in enumerate(k.argtypes))
            call = f"unit_{i}::{Cache.call_entry_function.format(', '.join(taken))}"
            named = {"entry_func": f"kernel_{i}", "arg_len": len(k.argtypes), "call_entry_func": call}
            bound.append(template[at:end].format(**named))
        methods = "\n".join(method.format(entry_func=f"kernel_{i}") for i in range(len(kernels)))
        head, tail = template[:at], template[end:].replace(method, "@methods@")
        return "\n".join(
            [
                *dict.fromkeys(line for k in kernels for line in k.includes),
                *(k.within(f"unit_{i}") for i, k in enumerate(kernels)),
                head.format(entry_func=Cache.entry_function, extra_parse_arg=""),
                *bound,
                tail.format(entry_func=Cache.entry_function).replace("@methods@", methods),
            ]
        )

    def gather(self: Any, argtypes: list[str], source: str) -> _CppKernel:
        return _CppKernel(tuple(argtypes), source)

    def wait(self: Any, scope: dict[str, Any]) -> None:
        names = [n for n, v in scope.items() if isinstance(v, _CppKernel)]
        parts = [names[i : i + KERNELS_PER_UNIT] for i in range(0, len(names), KERNELS_PER_UNIT)]
        for part in parts:
            module = Cache.load_async(unit([scope[n] for n in part]))()
            scope.update({n: getattr(module, f"kernel_{i}") for i, n in enumerate(part)})
        finish(self, scope)

    with mock.patch.object(AsyncCompile, "cpp_pybinding", gather), mock.patch.object(AsyncCompile, "wait", wait):
        yield


@cache
def realized_for(*ops: OpOverload) -> None:
    """Make Inductor pass operands to ``ops`` as to every other reader, with the strides of the traced operands.

    By default it makes a copy for each op of anything that it has not computed yet.
    """
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    def lowered(call: Callable[..., Any], *args: Any) -> Any:
        for x in args:
            if isinstance(x, TensorBox):
                x.realize()
        constrained: Any = constrain_to_fx_strides(V.graph.current_node, *args)  # type: ignore[no-untyped-call]
        return call(*constrained[0])

    for op in ops:
        called: Any = fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]
        register_lowering(op, type_promotion_kind=None)(partial(lowered, called))


_SECTION = "autopar_section"


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})


_GATHERED = frozenset({"max_pool2d_with_indices_backward"})
"""Ops lowered as gathers rather than decomposed into additions, on whose result nothing can be fused."""


_RESHAPING = ("pool", "upsample", "index_put", "scatter")


def _mark_sections(graph: fx.Graph) -> None:
    """Number the sections between kernels that nothing should be fused with: products, collectives, attention, and ops
    that change sizes, whose operands would be held beside what other ops in the kernel create.

    Inductor may fuse within a section. Fused with an op of another section, an op would run sooner or later than in the
    plan, and its operands or results would live longer. So what another section reads is realized as a tensor.
    """
    section = 0
    for node in graph.nodes:
        alone = _is_alone(node.target)
        section += alone
        node.meta[_SECTION] = section
        section += alone
    for node in graph.nodes:
        if any(user.meta[_SECTION] != node.meta[_SECTION] for user in node.users):
            made = _base(node)
            if made.op == "call_function" and made.all_input_nodes and not _is_external(made.target):
                made.meta["inductor_realize_to_strides"] = True


_INNER = "autopar_inner"


_REDUCTION = getattr(torch.Tag, "reduction", None)


def _marking_inner(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``decompose`` to mark all of its nodes except its results, because no plan counts them as tensors."""
    from torch.fx.experimental import proxy_tensor

    def traced(*args: Any, **kwargs: Any) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        nodes: Any = mode.tracer.graph.nodes if mode is not None else ()
        before = next(iter(reversed(nodes)), None)
        results = decompose(*args, **kwargs)
        if mode is None or results is NotImplemented:
            return results
        slots = (
            proxy_tensor.get_proxy_slot(x, mode.tracer, None)
            for x in tree_leaves(results)
            if isinstance(x, torch.Tensor)
        )
        own = {_base(slot.proxy.node) for slot in slots if slot is not None}
        for node in itertools.takewhile(lambda n: n is not before, reversed(nodes)):
            node.meta[_INNER] = node not in own
        return results

    return traced


def _mark_shared(graph: fx.Graph) -> None:
    """Realize values with several readers that Inductor would recompute for each reader from larger operands.

    It would hold these operands until the last reader has run.
    """
    operands: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        read = frozenset[fx.Node]().union(*(operands.get(n, {n}) for n in map(_base, node.all_input_nodes)))
        realized = node.meta.get("inductor_realize_to_strides") or _REDUCTION in getattr(node.target, "tags", ())
        computed = node.op == "call_function" and read and not realized and not _is_external(node.target)
        if not computed or _is_view(node.target):
            continue
        larger = sum(map(_bytes, read)) > _bytes(node)
        if larger and not node.meta.get(_INNER) and _has_several_readers(node):
            node.meta["inductor_realize_to_strides"] = True
        else:
            operands[node] = read


def _has_several_readers(node: fx.Node) -> bool:
    users = list(node.users)
    if len(users) == 1 and (_is_view(users[0].target) or users[0].meta.get(_INNER)):
        return _has_several_readers(users[0])
    return len(users) > 1


def _bytes(node: fx.Node) -> int:
    return sum(x.numel() * x.itemsize for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor))


def _base(node: fx.Node) -> fx.Node:
    """Return the node that a chain of views starts from."""
    while node.op == "call_function" and _is_view(node.target):
        node = node.all_input_nodes[0]
    return node


def _packet(target: Any) -> str:
    return str(target.overloadpacket.__name__) if isinstance(target, OpOverload) else ""


def _is_alone(target: Any) -> bool:
    return _is_external(target) or any(word in _packet(target) for word in _RESHAPING)


def _is_external(target: Any) -> bool:
    from torch._inductor.lowering import fallbacks, lowerings

    if not isinstance(target, OpOverload):
        return False
    unknown = target.namespace not in ("aten", "prims") or target in fallbacks or target not in lowerings
    return unknown or _packet(target) in _PRODUCTS


def _is_view(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.is_view


def _as_planned(marks: str) -> tuple[Any, Any]:
    """Return a policy that keeps Inductor from fusing across sections, and a pass that restores the graph's order.

    In the plan's order, collectives overlap with computation and tensors are freed as predicted. Inductor's own order
    is made for memory, but assumes that all inputs are held to the end.
    """
    from torch._inductor import custom_graph_pass
    from torch._inductor.choices import InductorChoices

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            same_section = _section(node1) == _section(node2)
            return same_section and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    class InOrder(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
        def __call__(self, kernels: list[Any]) -> list[Any]:
            return _in_program_order(kernels)

        def uuid(self) -> str:
            return hashlib.sha256(Path(__file__).read_bytes() + marks.encode()).hexdigest()

        def __reduce__(self) -> tuple[Any, ...]:  # part of Inductor's cache key
            return _in_order_of, (marks, self.uuid())

    return Choices(), InOrder()


def _in_order_of(marks: str, _: str) -> Any:
    return _as_planned(marks)[1]


def _marks(graph: fx.Graph) -> str:
    """Return the marks of a graph's ops, which its code does not show, as text."""
    return repr([(n.meta[_SECTION], n.meta.get("inductor_realize_to_strides", False)) for n in graph.nodes])


def _section(kernel: Any) -> int:
    return max((o.meta.get(_SECTION, 0) for part in kernel.get_nodes() for o in part.node.origins), default=0)


def _in_program_order(kernels: list[Any]) -> list[Any]:
    """Return Inductor's kernels in the order of their graph, as far as their dependencies allow."""
    from torch._inductor.virtualized import V

    position = {node: i for i, node in enumerate(V.graph.graph.nodes)}
    maker = {name: i for i, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}
    needs = [{maker[d.name] for d in k.unmet_dependencies if d.name in maker} - {i} for i, k in enumerate(kernels)]
    readers: list[list[int]] = [[] for _ in kernels]
    for i, sources in enumerate(needs):
        for j in sources:
            readers[j].append(i)

    def last(kernel: Any) -> int:
        origins = (o for part in kernel.get_nodes() for o in part.node.origins)
        return max((position[o] for o in origins if o in position), default=0)

    order = [(last(k), i) for i, k in enumerate(kernels)]
    missing = [len(s) for s in needs]
    ready = [order[i] for i, n in enumerate(missing) if n == 0]
    heapq.heapify(ready)
    found = []
    while ready:
        _, i = heapq.heappop(ready)
        found.append(kernels[i])
        for j in readers[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, order[j])
    assert len(found) == len(kernels), "kernels wait for each other"
    return found
