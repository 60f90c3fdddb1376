"""DTensor: what is between a parameter and its shard."""

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
    "got mixed torch.Tensor and DTensor",
    "does not have a sharding strategy registered",
    "Sharding propagation failed",
)
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
    source: Sequence[Placement],
    target: Sequence[Placement],
    mesh_shape: Sequence[int],
    shape: Sequence[int],
    *,
    by_cost: bool | None = None,
) -> list[tuple[int, Placement, Placement]]:
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
