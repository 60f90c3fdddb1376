"""The one door to torch's private interfaces: what is used, and why no public name does it.

Everything here is known to work on torch 2.11 and 2.13.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import heapq
import itertools
import logging
import math
import os
import pickle
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache, partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx, nn

# The type of a resolved op such as torch.ops.aten.mm.default; torch.ops has no public name for it.
# HigherOrderOperator: the type of torch.cond and other ops that take functions; it has no public name either.
from torch._ops import HigherOrderOperator, OpOverload

# FakeTensorMode: tensors with shapes and no storage. torch.export uses it inside; no public constructor exists.
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.metadata import StorageMeta

# A GraphModule that prints and compiles its own code when that is first asked for: most of ours never are.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# Sees every op that runs; there is no public hook below autograd.
# without_modes: real values while a trace on fake tensors is under way; modes leave in no other way from inside.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import AutoparError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "JointInput",
    "JointOutput",
    "LazyGraphModule",
    "OpOverload",
    "TorchDispatchMode",
    "Whole",
    "active_fake_mode",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "as_later_versions",
    "before_full_tensor",
    "copy_each",
    "count_as_changed",
    "dtensor_like",
    "dtensor_of",
    "dtensor_spec",
    "end_quietly",
    "find_overflow_in_every_gradient",
    "function_transforms",
    "fused_gather_product",
    "fused_product_scatter",
    "group_name",
    "in_order",
    "inductor",
    "is_mutable",
    "is_random",
    "joint_graph",
    "load_shards",
    "masks_kept",
    "permute",
    "profiler_is_running",
    "redistribution_steps",
    "reduce_scatter",
    "replace_shard",
    "route_data",
    "save_shards",
    "shard_reader",
    "storage_key",
    "store",
    "strided_shard",
    "strided_shard_type",
    "symmetric_group",
    "traced_constant",
    "traced_node",
    "wait",
    "whole_group",
    "with_ends_of",
    "without_hooks_left",
    "without_modes",
]


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


# Functional collectives: the public ones return a tensor subclass that waits on its first use; these return the
# plain tensor to be waited for, and Inductor knows them.


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which the functional collectives find a process group."""
    return group.group_name


def whole_group(device_mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh; every process of the job must call this at the same time."""
    if device_mesh.ndim == 1:
        return device_mesh.get_group(0)
    ranks = sorted(device_mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    return device_mesh._flatten().get_group()


IN_ORDER = "gloo_in_order"
"""Name of the backend that ``in_order`` registers."""

_in_order: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups made by ``in_order``, by the job's group and their ranks."""


def in_order(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same processes on which any number of collectives may be under way at once.

    On gloo one of its own with a single thread: the two threads that a group has by default both assign to one
    unguarded string of the group (the name of the work that ended last), which can corrupt the heap. What is waited
    for before the next is launched, as DTensor's own collectives are, may use any group. Every process of the group
    must call this at the same time.
    """
    device = torch.device("cpu")
    world = dist.group.WORLD
    if world is None or device not in group._device_types or group.size() == 1 or not dist.is_gloo_available():
        return group
    backend = group._get_backend(device)
    if not isinstance(backend, dist.ProcessGroupGloo):
        return group
    made, ranks = _in_order.setdefault(world, {}), tuple(dist.get_process_group_ranks(group))
    if ranks not in made:
        if IN_ORDER.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(IN_ORDER, _gloo_in_order, devices=["cpu"])
        timeout = backend.options._timeout
        made[ranks] = dist.new_group(list(ranks), timeout, IN_ORDER, use_local_synchronization=True)
    return made[ranks]


def _gloo_in_order(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options() if hasattr(gloo, "_Options") else gloo.Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    made: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return made


@cache
def end_quietly() -> None:
    """Let gloo's threads finish before the interpreter ends; say it as often as you like.

    A thread of gloo lets go of a collective's tensors a moment after it has told that the collective is done. Where the
    interpreter is going down by then, it waits for Python's lock in vain and the process aborts, after
    ``destroy_process_group`` too: device meshes in DTensor's caches keep groups, and so threads, alive.
    https://github.com/pytorch/pytorch/pull/179291
    """
    atexit.register(idle_gloo)


def idle_gloo(limit_s: float = 2.0) -> None:
    """Wait, at most ``limit_s``, until no thread that runs collectives of gloo has anything to do (Linux only)."""
    end, calm = time.monotonic() + limit_s, 0
    while calm < 2 and time.monotonic() < end:
        calm = 0 if any(state == "R" for state in _gloo_states()) else calm + 1
        time.sleep(0.0005)


def _gloo_states() -> Iterator[str]:
    for status in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            name, _, rest = status.read_text().rpartition(") ")
            if "gloo_runloop" in name:
                yield rest[0]


def store(name: str) -> Any:
    """A part of the store by which the job's processes found each other; only launchers are given it in public."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(name, _get_default_store())


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Start concatenating ``x`` of the ``size`` ranks of ``group`` along dim 0."""
    return _tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, size, group))


def all_reduce(x: torch.Tensor, reduction: str, group: str, *, in_place: bool = False) -> torch.Tensor:
    """Start reducing ``x`` by sum, max or min; ``in_place`` where ``x`` may be overwritten."""
    tracing = torch.compiler.is_compiling() or active_fake_mode() is not None
    if in_place and not tracing:  # Inductor finds out by itself where it may
        return _tensor(torch.ops._c10d_functional.all_reduce_(x, reduction, group))
    return _tensor(torch.ops._c10d_functional.all_reduce(x, reduction, group))


def reduce_scatter(x: torch.Tensor, reduction: str, size: int, group: str) -> torch.Tensor:
    """Start reducing ``x`` and cutting it evenly along dim 0."""
    return _tensor(torch.ops._c10d_functional.reduce_scatter_tensor(x, reduction, size, group))


def all_to_all(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Start sending an even chunk of dim 0 to each of the ``size`` ranks."""
    splits = [x.shape[0] // size] * size
    return _tensor(torch.ops._c10d_functional.all_to_all_single(x, splits, splits, group))


def permute(x: torch.Tensor, sources: Sequence[int], here: int, shape: Sequence[int], group: str) -> torch.Tensor:
    """Start sending ``x`` to the rank whose source is ``here``, and receiving ``shape`` from ``sources[here]``."""
    sent, received = [0] * len(sources), [0] * len(sources)
    sent[list(sources).index(here)] = x.numel()
    received[sources[here]] = math.prod(shape)
    return _tensor(torch.ops._c10d_functional.all_to_all_single(x.flatten(), received, sent, group))


def wait(x: torch.Tensor) -> torch.Tensor:
    """Block the stream (on CPU: the thread) until ``x`` has arrived."""
    return _tensor(torch.ops._c10d_functional.wait_tensor(x))


# Flash attention on GPUs: the public function keeps the sums of exponentials to itself, which a gradient needs.


def flash_takes(q: torch.Tensor) -> bool:
    """Whether torch's flash kernels for GPUs work on heads like those of ``q`` on its device."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention, logarithm of each row's sum of exponentials) of [b, h, s, d] and [b, g, t, d], h a multiple of g."""
    q, k, v = (_dense(x) for x in (q, k, v))
    made = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return _tensor(made[0]).contiguous(), _tensor(made[1]).contiguous()


def flash_attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    grad, q, k, v, out = (_dense(x) for x in (grad, q, k, v, out))
    unused = [torch.zeros(2, dtype=torch.uint64, device=q.device) for _ in range(2)]  # seed and offset of a dropout
    made = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *unused, scale=scale
    )
    dq, dk, dv = (_tensor(x).contiguous() for x in made)
    return dq, dk, dv


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Symmetric memory: a rank's GPU reads and writes another's over NVLink. The fused products have no public name.


@cache
def symmetric_group(group: dist.ProcessGroup) -> str:
    """The name of ``group``, its symmetric memory set up, where all its ranks are GPUs of one host that reach each
    other's memory; else empty. The answer is the same on all of them."""
    ranks, here = dist.get_process_group_ranks(group), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or len({r // here for r in ranks}) > 1 or len(ranks) > torch.cuda.device_count():
        return ""
    devices = range(torch.cuda.device_count())
    if not all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        return ""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # newer versions of torch do this by themselves, and say so
        warnings.simplefilter("ignore")
        enable_symm_mem_for_group(group.group_name)
    return group.group_name


def fused_gather_product(
    x: torch.Tensor, matrix: torch.Tensor, dim: int, group: str, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``gathered @ matrix`` and, with ``keep``, ``x`` of all ranks of ``group`` joined along ``dim``."""
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [matrix], dim, group, return_A=keep)
    return _tensor(products[0]).contiguous(), _tensor(gathered).contiguous() if keep else None


def fused_product_scatter(x: torch.Tensor, matrix: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum of ``x @ matrix`` of all ranks of ``group``."""
    return _tensor(torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, group)).contiguous()


def _tensor(x: Any) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def keep_gpu_busy(seconds: float) -> None:
    """Let the GPU do nothing for about so long: what is launched meanwhile then runs without gaps, and can be timed."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]  # cycles


def profiler_is_running() -> bool:
    """Whether ranges are recorded in this thread; to open one costs microseconds even where nobody looks."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``like`` with another shard, which may lie on the host: ``DTensor.from_local`` moves it to the mesh's device."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_spec(
    device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """What DTensor keeps of a contiguous tensor beside the shard: to find it takes longer than to wrap the shard."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """The DTensor of ``spec`` whose shard on this rank is ``local``; without gradient.

    Its ``__init__``, which does nothing, is left out: what hides it from Dynamo takes longer than all the rest.
    """
    kind = _dtensor()
    made: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    return made


def gradient_of(local: torch.Tensor, spec: Any) -> DTensor:
    """The same for autograd, which detaches what it puts into ``.grad``: a DTensor there, without a search for what
    that means for shards."""
    kind = _arriving()
    made: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    return made


@cache
def _dtensor() -> type[DTensor]:
    from torch.distributed.tensor import DTensor

    return DTensor


@cache
def _arriving() -> type[DTensor]:
    """A DTensor on its way to ``.grad``."""
    from torch.distributed.tensor import DTensor

    class Arriving(DTensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.detach.default:
                return dtensor_of(args[0]._local_tensor, args[0]._spec)

            def plain(x: Any) -> Any:
                return dtensor_of(x._local_tensor, x._spec) if isinstance(x, Arriving) else x

            return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    return Arriving


def output_of(local: torch.Tensor, spec: Any, name: str) -> DTensor:
    """The DTensor of an output of the model, which says what to do where it, or what is computed from it, meets what
    takes no DTensors: torch's own errors cannot know."""
    kind = _returned()
    made: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    made._autopar_name = name  # type: ignore[attr-defined]
    return made


@cache
def _returned() -> type[DTensor]:
    """A DTensor with a name, for the ops of a training loop."""
    from torch.distributed.tensor import DTensor

    class Returned(DTensor):
        _autopar_name = "of the model"

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Returned)}
            plain = {key: dtensor_of(x._local_tensor, x._spec) for key, x in given.items()}
            own = {id(plain[key]): x for key, x in given.items()}  # what an op changes in place it also returns
            first = next(iter(given.values()))
            if func is torch.ops.aten._local_scalar_dense.default and not _is_whole(first):
                raise _meeting(first, "item()")  # torch gives this rank's part of it
            args, kwargs = tree_map(lambda x: plain.get(id(x), x), (args, kwargs or {}))
            try:
                made = func(*args, **kwargs)
            except RuntimeError as error:
                if getattr(func, "namespace", "") == "c10d" or any(said in str(error) for said in _NO_DTENSORS):
                    raise _meeting(first, str(func)) from error
                raise

            def named(x: Any) -> Any:
                return output_of(x._local_tensor, x._spec, first._autopar_name) if type(x) is DTensor else x

            return tree_map(lambda x: own[id(x)] if id(x) in own else named(x), made)

        def numpy(self, *_: Any, **__: Any) -> Any:
            raise _meeting(self, "numpy()")

        def tolist(self) -> Any:
            raise _meeting(self, "tolist()")

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain: Any = dtensor_of(self._local_tensor, self._spec)
            return plain.__reduce_ex__(protocol)

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:  # for torch.compile
            unflatten: Any = DTensor.__tensor_unflatten__
            plain = unflatten(inner, context, size, stride)
            return Returned.__new__(Returned, plain._local_tensor, plain._spec, requires_grad=plain.requires_grad)

    return Returned


class Whole(torch.Tensor):
    """A plain tensor in the place of a DTensor: a loop that asks for its ``full_tensor()`` gets it. What is computed
    from it, and what is saved of it, is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.full_tensor()
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return self.full_tensor().clone().as_subclass(Whole)


_NO_DTENSORS = (
    "got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered", "Sharding propagation failed",
)  # fmt: skip
"""What torch says where an op takes no DTensors, or none beside plain tensors."""


def _is_whole(tensor: Any) -> bool:
    return all(p.is_replicate() for p in tensor.placements)


def _meeting(tensor: Any, what: str) -> AutoparError:
    return AutoparError(
        f"The output {tensor._autopar_name} is a DTensor, which this takes only as a plain tensor, or among DTensors.",
        found=f"{what} of it, or of what is computed from it: {tuple(tensor.shape)} as {list(tensor.placements)}",
        hint='parallelize with outputs="whole", for plain tensors, or take its full_tensor() on every rank.',
    )


def shard_of(value: Any) -> Any:
    """A DTensor's shard on this rank, anything else as it is; outside autograd, where ``to_local`` gives the same after
    a look at compilers and gradients."""
    return getattr(value, "_local_tensor", value)


def replace_shard(tensor: DTensor, local: torch.Tensor) -> None:
    """Give a DTensor another shard of the same shape and dtype; no public name does it in place."""
    tensor._local_tensor = local


def route_data(to: Callable[[DTensor, torch.Tensor], bool]) -> None:
    """From now on ``tensor.data = value`` on a DTensor goes to ``to`` first: torch gives the value to the DTensor's
    outer shell, which holds no data, and so loses it without a word.

    Args:
        to: takes the tensor and the value, and tells whether it has taken care of them.
    """

    def plain() -> Any:  # looked up each time: a capture puts in its own
        return torch.Tensor.data

    def get(tensor: Any) -> Any:
        return plain().__get__(tensor)

    def put(tensor: Any, value: torch.Tensor) -> None:
        if not to(tensor, value):
            plain().__set__(tensor, value)

    setattr(_dtensor(), "data", property(get, put))  # noqa: B010  mypy holds it for read-only


def copy_each(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value to its target: one call for all of them, which has no public name."""
    torch._foreach_copy_(list(targets), list(values))


def count_as_changed(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` were changed in place: it cannot see what is done to a DTensor's shard."""
    versions = [t._version + 1 for t in tensors]
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def save_shards(tensors: dict[str, Any], writer: Any, group: dist.ProcessGroup | None) -> None:
    """Write each rank's shards; without a group those of this process, for which the public name warns its user."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict(tensors, writer, group, no_dist=group is None)


def load_shards(tensors: dict[str, Any], reader: Any, group: dist.ProcessGroup | None) -> None:
    """Read shards into ``tensors``, likewise."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(tensors, reader, group, no_dist=group is None)


def shard_reader(path: Any) -> Any:
    """A reader of a directory of shards that takes tensors from it and nothing else.

    torch keeps the list of tensors as a pickle, and what is said to be no tensor as another one, which it reads. Here
    the list may name but the few plain types that it is made of, all entries must be tensors, and their files must lie
    in the directory.

    Raises, when it reads:
        AutoparError: the list is something else.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class OfTensors(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            try:
                with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
                    return self._checked(_OfPlainTypes(file).load())
            except AutoparError:
                raise
            except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
                raise _no_list(path, f"{type(error).__name__}: {error!s:.200}") from None

        def _checked(self, found: Any) -> Any:
            entries = found.state_dict_metadata.values()
            if not all(type(e).__name__ == "TensorStorageMetadata" for e in entries):
                raise _no_list(path, "an entry that is no tensor")
            if not all(Path(i.relative_path).name == i.relative_path for i in found.storage_data.values()):
                raise _no_list(path, "a file outside of the directory")
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return OfTensors(path)


def _no_list(path: Any, found: str) -> AutoparError:
    return AutoparError(
        "The checkpoint's list of tensors cannot be read.", found=f"{path}: {found}",
        hint="load another step; this one was damaged, or changed by someone.",
    )  # fmt: skip


class _OfPlainTypes(pickle.Unpickler):
    """Reads a pickle of the types that a list of tensors is made of."""

    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        plain = {
            **{("torch.distributed.checkpoint.metadata", n): getattr(metadata, n) for n in (
                "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                "StorageMeta", "_MEM_FORMAT_ENCODING",
            )},
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
            ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
            ("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict,
        }  # fmt: skip
        if (module, name) in plain:
            return plain[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "Path"):
            return PurePath
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@lru_cache(maxsize=1)
def find_overflow_in_every_gradient() -> None:
    """Make the check of ``torch.amp.GradScaler`` one of all ranks.

    DTensor reduces what a rank found over the mesh axes that cut the first gradient of the list. An overflow in a
    gradient that other axes cut stays unknown to some ranks, which then step where the others do not. The op has no
    public hook.
    """
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    of_first = handlers[op]

    def of_all(op_call: Any, args: Any, kwargs: Any) -> None:
        of_first(op_call, args, kwargs)
        mesh = args[0][0].device_mesh
        for axis in range(mesh.ndim):  # replicas too, which may differ in rounding
            dist.all_reduce(args[1], dist.ReduceOp.MAX, group=mesh.get_group(axis))

    handlers[op] = of_all


@cache
def before_full_tensor(ask: Callable[[DTensor], None]) -> None:
    """Call ``ask`` before a DTensor is made whole, which all ranks do at once. It has no public hook."""
    from torch.distributed.tensor import DTensor

    original = DTensor.full_tensor

    @functools.wraps(original)
    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ask(self)
        return original(self, *args, **kwargs)

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """DTensor's shard of a dim that other mesh axes, later in the mesh, have cut before it."""
    placement: Placement = strided_shard_type()(dim, split_factor=split_factor)
    return placement


def strided_shard_type() -> type[Any]:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def redistribution_steps(
    source: Sequence[Placement], target: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int],
    *, by_cost: bool | None = None,
) -> list[tuple[int, Placement, Placement]]:  # fmt: skip
    """(mesh axis, placement before, placement after) of each step that DTensor takes between two lists of placements.

    To compare with: no public name plans a redistribution without running it. Needs no process group.

    Args:
        by_cost: DTensor's search by its own costs; False its heuristic; None what it takes by itself.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    device_mesh = _mesh_without_processes(tuple(mesh_shape))
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), torch.float32)
    before, after = (
        DTensorSpec(
            device_mesh, tuple(p), tensor_meta=meta,
            use_strided_shard_as_shard_order=any(isinstance(x, strided_shard_type()) for x in p),
        )
        for p in (source, target)
    )  # fmt: skip
    infos = _redistribute._gen_transform_infos_non_cached(before, after, by_cost)
    return [(info.mesh_dim, *info.src_dst_placements) for info in infos]


@lru_cache(maxsize=16)
def _mesh_without_processes(shape: tuple[int, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), _init_backend=False, _rank=0)


def defining_module(op: OpOverload) -> str:
    """The module that registered an op with the decorator ``custom_op``; empty for all others."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(f"{op.namespace}::{op._schema.name.split('::')[1]}")
    module = getattr(getattr(found, "_init_fn", None), "__module__", "") or ""
    return "" if module.startswith(("torch.", "__")) else module


def inductor(
    function: Callable[..., tuple[Any, ...]], inputs: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[[list[Any]], Any]:  # fmt: skip
    """``function`` as Inductor compiles it for ``inputs``; it takes them as a list, which it empties.

    ``torch.compile`` would trace by Dynamo, keep the list's tensors alive and guard each call; Inductor's own entry
    takes a graph of ATen ops. What a program launches, waits for and frees when is planned: of Inductor's passes those
    that move ops, by what they take for memory or locality, are off. They would also order collectives by sizes of
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

    # Inductor keeps what it made of a graph on disk only where sizes could be symbols.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    # A mode that counts memory, as the first step may run under, would see the trace.
    with torch.no_grad(), without_modes(), mode:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        table = {op: d for op, d in select_decomp_table().items() if _packet(op) not in _PRODUCTS | _GATHERED}
        table |= decompositions
        # Inductor takes graphs without mutations: it moves an addition in place as if it were a read.
        functional = torch.func.functionalize(function, remove="mutations")
        table = {op: _marks_inner(d) for op, d in table.items()}
        graph = make_fx(functional, decomposition_table=table, tracing_mode="real")(*fakes)
    _mark_sections(graph.graph)
    _mark_shared(graph.graph)
    choices, in_order = _as_planned(_marks(graph.graph))
    as_planned = config.patch(
        reorder_for_locality=False, reorder_for_peak_memory=False, layout_optimization=False, pattern_matcher=False,
        _post_fusion_custom_pass=in_order,
    )  # fmt: skip
    # On CPUs all kernels up to the next product are put into one function, which would be given all their buffers.
    one_by_one = mock.patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_modes())
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(V.set_choices_handler(choices))
        stack.enter_context(as_planned)
        stack.enter_context(one_by_one)
        stack.enter_context(_cpp_kernels_together())
        made: Any = compile_fx_inner(graph, fakes, is_inference=True)

    def run(tensors: list[Any]) -> Any:
        return made(tensors)

    return run


@dataclass(frozen=True)
class _CppKernel:
    """One that Inductor wrote and that waits to be compiled."""

    argtypes: tuple[str, ...]
    source: str

    @property
    def includes(self) -> list[str]:
        return [line for line in self.source.splitlines() if line.startswith("#include")]

    def within(self, namespace: str) -> str:
        """Its source in a namespace of its own: all are called ``kernel``."""
        lines = (line for line in self.source.splitlines() if not line.startswith("#include"))
        return "\n".join([f"namespace {namespace} {{", *lines, "}"]).replace('extern "C"', "")


KERNELS_A_UNIT = 64


@contextlib.contextmanager
def _cpp_kernels_together() -> Iterator[None]:
    """Inductor's kernels for CPUs, compiled many in one unit: most of what a compiler does for one by itself is to read
    headers. Each is a function of one extension module, bound as Inductor binds them."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    template = Cache.suffix_template
    at, end = template.find("static PyObject* {entry_func}_py"), template.find("static PyMethodDef")
    method = '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}},'
    if not 0 < at < end or method not in template[end:]:
        yield  # a torch that binds them otherwise
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
        return "\n".join([
            *dict.fromkeys(line for k in kernels for line in k.includes),
            *(k.within(f"unit_{i}") for i, k in enumerate(kernels)),
            head.format(entry_func=Cache.entry_function, extra_parse_arg=""), *bound,
            tail.format(entry_func=Cache.entry_function).replace("@methods@", methods),
        ])  # fmt: skip

    def gather(self: Any, argtypes: list[str], source: str) -> _CppKernel:
        return _CppKernel(tuple(argtypes), source)

    def wait(self: Any, scope: dict[str, Any]) -> None:
        names = [n for n, v in scope.items() if isinstance(v, _CppKernel)]
        parts = [names[i : i + KERNELS_A_UNIT] for i in range(0, len(names), KERNELS_A_UNIT)]
        for part in parts:
            module = Cache.load_async(unit([scope[n] for n in part]))()
            scope.update({n: getattr(module, f"kernel_{i}") for i, n in enumerate(part)})
        finish(self, scope)

    with mock.patch.object(AsyncCompile, "cpp_pybinding", gather), mock.patch.object(AsyncCompile, "wait", wait):
        yield


@cache
def realized_for(*ops: OpOverload) -> None:
    """Inductor gives ``ops`` their operands as every other reader gets them, with the strides of the traced ones.

    By itself it makes a copy for each op of what it has not computed yet.
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
"""Lowered, each element from where it came from, not decomposed into additions, over whose result nothing is made."""
_RESHAPING = ("pool", "upsample", "index_put", "scatter")


def _mark_sections(graph: fx.Graph) -> None:
    """Number the stretches between kernels that should be fused with nothing: products, collectives, attention, and
    those that change sizes, whose operands would be held beside what others in the kernel make.

    It may fuse within a section. Fused with something of another section, an op would run sooner or later than the
    plan has it, and what it reads or makes would live for longer. So what another section reads becomes a tensor.
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


def _marks_inner(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """``decompose``, all of whose nodes but those of its results are marked: no plan counts them as tensors."""
    from torch.fx.experimental import proxy_tensor

    def traced(*args: Any, **kwargs: Any) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        nodes: Any = mode.tracer.graph.nodes if mode is not None else ()
        before = next(iter(reversed(nodes)), None)
        results = decompose(*args, **kwargs)
        if mode is None or results is NotImplemented:
            return results
        slots = (
            proxy_tensor.get_proxy_slot(x, mode.tracer, None) for x in tree_leaves(results)
            if isinstance(x, torch.Tensor)
        )  # fmt: skip
        own = {_base(slot.proxy.node) for slot in slots if slot is not None}
        for node in itertools.takewhile(lambda n: n is not before, reversed(nodes)):
            node.meta[_INNER] = node not in own
        return results

    return traced


def _mark_shared(graph: fx.Graph) -> None:
    """What several ops read becomes a tensor where Inductor would compute it anew for each of them, and hold operands
    of more bytes than it has until the last one has."""
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
    """What a view is of."""
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
    """What keeps Inductor from fusing across sections, and the pass that puts its kernels into the order of the graph.

    The plan's order is that in which collectives overlap with what runs, and in which tensors are freed as predicted.
    Inductor's own sorts by what it takes for memory, though it counts what it is given as held to the end.
    """
    from torch._inductor import custom_graph_pass
    from torch._inductor.choices import InductorChoices

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            together = _section(node1) == _section(node2)
            return together and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    class InOrder(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
        def __call__(self, kernels: list[Any]) -> list[Any]:
            return _in_program_order(kernels)

        def uuid(self) -> str:
            return hashlib.sha256(Path(__file__).read_bytes() + marks.encode()).hexdigest()

        def __reduce__(self) -> tuple[Any, ...]:  # a part of the key under which Inductor keeps what it made
            return _in_order_of, (marks, self.uuid())

    return Choices(), InOrder()


def _in_order_of(marks: str, _: str) -> Any:
    return _as_planned(marks)[1]


def _marks(graph: fx.Graph) -> str:
    """What the marks of a graph's ops say, which its code does not."""
    return repr([(n.meta[_SECTION], n.meta.get("inductor_realize_to_strides", False)) for n in graph.nodes])


def _section(kernel: Any) -> int:
    return max((o.meta.get(_SECTION, 0) for part in kernel.get_nodes() for o in part.node.origins), default=0)


def _in_program_order(kernels: list[Any]) -> list[Any]:
    """Inductor's kernels in the order of the graph that they were made of, as far as their operands allow."""
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
