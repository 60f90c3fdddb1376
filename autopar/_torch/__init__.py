"""The one door to torch's private interfaces: what is used, and why no public name does it.

Each module says which part of torch it wraps. Everything here is known to work on torch 2.11 and 2.13.
"""

# The type of a resolved op such as torch.ops.aten.mm.default; torch.ops has no public name for it.
# HigherOrderOperator: the type of torch.cond and other ops that take functions; it has no public name either.
from torch._ops import HigherOrderOperator, OpOverload

# FakeTensorMode: tensors with shapes and no storage. torch.export uses it inside; no public constructor exists.
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

# A GraphModule that prints and compiles its own code when that is first asked for: most of ours never are.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# Sees every op that runs; there is no public hook below autograd.
# without_modes: real values while a trace on fake tensors is under way; modes leave in no other way from inside.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from autopar._torch.attention import (
    flash_attention,
    flash_attention_backward,
    flash_takes,
)
from autopar._torch.checkpoints import (
    load_shards,
    save_shards,
    shard_reader,
)
from autopar._torch.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    end_quietly,
    fused_gather_product,
    fused_product_scatter,
    group_name,
    idle_gloo,
    in_order,
    permute,
    reduce_scatter,
    store,
    symmetric_group,
    wait,
    whole_group,
)
from autopar._torch.compiling import (
    inductor,
    realized_for,
)
from autopar._torch.dtensor import (
    Whole,
    before_full_tensor,
    dtensor_like,
    dtensor_spec,
    find_overflow_in_every_gradient,
    gradient_of,
    output_of,
    redistribution_steps,
    replace_shard,
    route_data,
    shard_of,
    strided_shard,
    strided_shard_type,
)
from autopar._torch.tensors import (
    copy_each,
    count_as_changed,
    keep_gpu_busy,
    profiler_is_running,
)
from autopar._torch.tracing import (
    JointInput,
    JointOutput,
    active_fake_mode,
    as_later_versions,
    changes_arguments,
    compiled_when_called,
    defining_module,
    failing_quietly,
    function_transforms,
    grouped_products,
    is_functionalized,
    is_mutable,
    is_random,
    joint_graph,
    masks_kept,
    storage_key,
    torch_decompositions,
    traced_constant,
    traced_node,
    with_ends_of,
    without_hooks_left,
)

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
    "changes_arguments",
    "compiled_when_called",
    "copy_each",
    "count_as_changed",
    "defining_module",
    "dtensor_like",
    "dtensor_spec",
    "end_quietly",
    "failing_quietly",
    "find_overflow_in_every_gradient",
    "flash_attention",
    "flash_attention_backward",
    "flash_takes",
    "function_transforms",
    "fused_gather_product",
    "fused_product_scatter",
    "gradient_of",
    "group_name",
    "grouped_products",
    "idle_gloo",
    "in_order",
    "inductor",
    "is_functionalized",
    "is_mutable",
    "is_random",
    "joint_graph",
    "keep_gpu_busy",
    "load_shards",
    "masks_kept",
    "output_of",
    "permute",
    "profiler_is_running",
    "realized_for",
    "redistribution_steps",
    "reduce_scatter",
    "replace_shard",
    "route_data",
    "save_shards",
    "shard_of",
    "shard_reader",
    "storage_key",
    "store",
    "strided_shard",
    "strided_shard_type",
    "symmetric_group",
    "torch_decompositions",
    "traced_constant",
    "traced_node",
    "wait",
    "whole_group",
    "with_ends_of",
    "without_hooks_left",
    "without_modes",
]
