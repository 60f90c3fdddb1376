"""The only module that uses torch's private interfaces: which ones, and why no public name will do.

Each submodule says which part of torch it wraps. Everything here is known to work with torch 2.11 and 2.13.
"""

# The type of a resolved op such as torch.ops.aten.mm.default; torch.ops has no public name for it.
# HigherOrderOperator: the type of torch.cond and other ops that take functions; it has no public name either.
from torch._ops import HigherOrderOperator, OpOverload

# FakeTensorMode: tensors with shapes and no storage. torch.export uses it inside; no public constructor exists.
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

# A GraphModule that prints and compiles its code only on demand; most of ours never need it.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# Sees every op that runs; there is no public hook below autograd.
# without_modes: gives real values during a trace on fake tensors; nothing else suspends modes from inside.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from autopar._torch.attention import (
    by_rows,
    flash_attention,
    flash_attention_backward,
    flash_takes,
    joined_by_rows,
    zeros_by_rows,
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
    close_groups,
    fused_gather_product,
    fused_product_scatter,
    group_called,
    group_name,
    idle_gloo,
    idle_gloo_at_exit,
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
    gradient_of,
    intercept_data_assignment,
    output_of,
    redistribution_steps,
    replace_shard,
    shard_of,
    share_overflow_findings,
    strided_shard,
    strided_shard_type,
    wrap_total_norm,
)
from autopar._torch.tensors import (
    bump_versions,
    copy_each,
    keep_gpu_busy,
    profiler_is_running,
)
from autopar._torch.tracing import (
    JointInput,
    JointOutput,
    active_fake_mode,
    backported_fixes,
    changes_arguments,
    constant_of,
    defining_module,
    function_transforms,
    grouped_products,
    is_functionalized,
    is_mutable,
    is_random,
    joint_graph,
    lazy_graph_modules,
    storage_key,
    torch_decompositions,
    traced_constant,
    traced_node,
    with_signature_of,
    without_causal_detection,
    without_export_prints,
    without_leftover_hooks,
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
    "backported_fixes",
    "before_full_tensor",
    "bump_versions",
    "by_rows",
    "changes_arguments",
    "close_groups",
    "constant_of",
    "copy_each",
    "defining_module",
    "dtensor_like",
    "dtensor_spec",
    "flash_attention",
    "flash_attention_backward",
    "flash_takes",
    "function_transforms",
    "fused_gather_product",
    "fused_product_scatter",
    "gradient_of",
    "group_called",
    "group_name",
    "grouped_products",
    "idle_gloo",
    "idle_gloo_at_exit",
    "in_order",
    "inductor",
    "intercept_data_assignment",
    "is_functionalized",
    "is_mutable",
    "is_random",
    "joined_by_rows",
    "joint_graph",
    "keep_gpu_busy",
    "lazy_graph_modules",
    "load_shards",
    "output_of",
    "permute",
    "profiler_is_running",
    "realized_for",
    "redistribution_steps",
    "reduce_scatter",
    "replace_shard",
    "save_shards",
    "shard_of",
    "shard_reader",
    "share_overflow_findings",
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
    "with_signature_of",
    "without_causal_detection",
    "without_export_prints",
    "without_leftover_hooks",
    "without_modes",
    "wrap_total_norm",
    "zeros_by_rows",
]
