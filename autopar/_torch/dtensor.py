"""DTensor: the layer between a parameter and its shard."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import AutoparError


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return ``like`` with another shard, which may be on the host; ``DTensor.from_local`` would move that."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_spec(
    device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """Return a contiguous tensor's DTensorSpec; keep it, since building it takes longer than wrapping a shard."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Return the DTensor of ``spec`` whose shard on this rank is ``local``, without gradient.

    It skips DTensor's ``__init__``, which does nothing: hiding it from Dynamo takes longer than all the rest.
    """
    kind = _dtensor_type()
    made: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    return made


def gradient_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Return the same as ``dtensor_of`` for autograd, which detaches what it puts into ``.grad``.

    Detaching then yields a plain DTensor, without DTensor's dispatch of that op.
    """
    kind = _arriving_type()
    made: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    return made


@cache
def _dtensor_type() -> type[DTensor]:
    from torch.distributed.tensor import DTensor

    _register_any()
    return DTensor


def _register_any() -> None:
    """Let ``torch.autograd.detect_anomaly`` look for NaN in gradients: DTensor has no strategy for the op with which it
    asks whether there is any."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    def whole(_: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        return [([Replicate()], [Replicate()])]

    register_sharding(torch.ops.aten._is_any_true.default)(whole)


@cache
def _arriving_type() -> type[DTensor]:
    """Return the class of DTensors on their way to ``.grad``."""
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
    """Return the DTensor of an output of the model.

    If it, or a result computed from it, meets code that takes no DTensors, it raises an error that says what to do,
    which torch's own errors cannot.
    """
    kind = _returned_type()
    made: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    made._autopar_name = name  # type: ignore[attr-defined]
    return made


@cache
def _returned_type() -> type[DTensor]:
    """Return a class of DTensors that carry an output's name through the ops of a training loop."""
    from torch.distributed.tensor import DTensor

    class Returned(DTensor):
        _autopar_name = "of the model"

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Returned)}
            plain = {key: dtensor_of(x._local_tensor, x._spec) for key, x in given.items()}
            own = {id(plain[key]): x for key, x in given.items()}  # an op returns what it changes in place
            first = next(iter(given.values()))
            if func is torch.ops.aten._local_scalar_dense.default and not _is_whole(first):
                raise _plain_tensor_error(first, "item()")  # torch would return this rank's part
            args, kwargs = tree_map(lambda x: plain.get(id(x), x), (args, kwargs or {}))
            try:
                made = func(*args, **kwargs)
            except RuntimeError as error:
                if getattr(func, "namespace", "") == "c10d" or any(message in str(error) for message in _NO_DTENSORS):
                    raise _plain_tensor_error(first, str(func)) from error
                raise

            def named(x: Any) -> Any:
                return output_of(x._local_tensor, x._spec, first._autopar_name) if type(x) is DTensor else x

            return tree_map(lambda x: own[id(x)] if id(x) in own else named(x), made)

        def numpy(self, *_: Any, **__: Any) -> Any:
            raise _plain_tensor_error(self, "numpy()")

        def tolist(self) -> Any:
            raise _plain_tensor_error(self, "tolist()")

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
    """A plain tensor that stands in for a DTensor, so that a loop that asks for its ``full_tensor()`` gets it.

    What is computed from it, or saved, is an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.full_tensor()
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return self.full_tensor().clone().as_subclass(Whole)


_NO_DTENSORS = (
    "got mixed torch.Tensor and DTensor",
    "does not have a sharding strategy registered",
    "Sharding propagation failed",
)
"""Parts of torch's messages for ops that take no DTensors, or none beside plain tensors."""


def _is_whole(tensor: Any) -> bool:
    return all(p.is_replicate() for p in tensor.placements)


def _plain_tensor_error(tensor: Any, what: str) -> AutoparError:
    return AutoparError(
        f"The output {tensor._autopar_name} is a DTensor, but this call needs a plain tensor, or DTensors only.",
        found=f"{what} of it, or of a result computed from it: {tuple(tensor.shape)} as {list(tensor.placements)}",
        hint='parallelize with outputs="whole" for plain tensors, or take its full_tensor() on every rank.',
    )


def shard_of(value: Any) -> Any:
    """Return a DTensor's shard on this rank, or any other value unchanged.

    Outside autograd ``to_local`` returns the same, but first checks for compilers and gradients.
    """
    return getattr(value, "_local_tensor", value)


def replace_shard(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace a DTensor's shard in place by one of the same shape and dtype; no public name does this."""
    tensor._local_tensor = local


def intercept_data_assignment(to: Callable[[DTensor, torch.Tensor], bool]) -> None:
    """Pass ``tensor.data = value`` on a DTensor to ``to`` first, from now on.

    torch assigns the value to the DTensor's outer shell, which holds no data, and so silently loses it.

    Args:
        to: takes the tensor and the value, and returns whether it has handled them.
    """

    def plain() -> Any:  # looked up each time, since a capture replaces it
        return torch.Tensor.data

    def get(tensor: Any) -> Any:
        return plain().__get__(tensor)

    def put(tensor: Any, value: torch.Tensor) -> None:
        if not to(tensor, value):
            plain().__set__(tensor, value)

    setattr(_dtensor_type(), "data", property(get, put))  # noqa: B010  mypy holds it for read-only


@lru_cache(maxsize=1)
def share_overflow_findings() -> None:
    """Make the overflow check of ``torch.amp.GradScaler`` agree on all ranks.

    DTensor reduces a rank's finding over the mesh axes that cut the first gradient of the list. An overflow in a
    gradient cut by other axes would be unknown to some ranks, which would then step where the others do not. The op has
    no public hook.
    """
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    check_first = handlers[op]

    def check_all(op_call: Any, args: Any, kwargs: Any) -> None:
        check_first(op_call, args, kwargs)
        mesh = args[0][0].device_mesh
        for axis in range(mesh.ndim):  # replicating axes too: replicas may differ in rounding
            dist.all_reduce(args[1], dist.ReduceOp.MAX, group=mesh.get_group(axis))

    handlers[op] = check_all


@cache
def before_full_tensor(check: Callable[[DTensor], None]) -> None:
    """Call ``check`` before a DTensor is gathered by ``full_tensor``, which has no public hook."""
    from torch.distributed.tensor import DTensor

    original = DTensor.full_tensor

    @functools.wraps(original)
    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check(self)
        return original(self, *args, **kwargs)

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return DTensor's placement for a shard of a dim that mesh axes later in the mesh have cut first."""
    placement: Placement = strided_shard_type()(dim, split_factor=split_factor)
    return placement


def strided_shard_type() -> type[Any]:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def redistribution_steps(
    source: Sequence[Placement],
    target: Sequence[Placement],
    mesh_shape: Sequence[int],
    shape: Sequence[int],
    *,
    by_cost: bool | None = None,
) -> list[tuple[int, Placement, Placement]]:
    """Return (mesh axis, placement before, placement after) of each step of DTensor's redistribution.

    It serves for comparison: no public name plans a redistribution without running it. It needs no process group.

    Args:
        by_cost: True for DTensor's search by its own costs, False for its heuristic, None for its default.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    device_mesh = _mesh_without_processes(tuple(mesh_shape))
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), torch.float32)
    before, after = (
        DTensorSpec(
            device_mesh,
            tuple(p),
            tensor_meta=meta,
            use_strided_shard_as_shard_order=any(isinstance(x, strided_shard_type()) for x in p),
        )
        for p in (source, target)
    )
    infos = _redistribute._gen_transform_infos_non_cached(before, after, by_cost)
    return [(info.mesh_dim, *info.src_dst_placements) for info in infos]


@lru_cache(maxsize=16)
def _mesh_without_processes(shape: tuple[int, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), _init_backend=False, _rank=0)


@lru_cache(maxsize=1)
def wrap_total_norm(wrapper: Callable[..., torch.Tensor]) -> None:
    """Pass calls of the norm behind ``clip_grad_norm_`` to ``wrapper``, with the original as its first argument.

    However a script has imported ``clip_grad_norm_``, that function looks this one up in its module. There is no public
    hook, and ``get_total_norm`` is another name of the same function, which is left as it is.
    """
    from torch.nn.utils import clip_grad

    original = clip_grad._get_total_norm
    clip_grad._get_total_norm = functools.wraps(original)(functools.partial(wrapper, original))
