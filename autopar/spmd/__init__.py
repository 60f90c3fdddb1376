"""What a local program calls: collectives, transfers, and the ranks, real or simulated."""

from autopar.spmd.buckets import (
    COLLECTIVES,
    all_gather_bucket,
    all_reduce_bucket,
    bucket_call,
    reduce_scatter_bucket,
)
from autopar.spmd.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    choice,
    device,
    length,
    offset,
    permute,
    reduce_scatter,
    resolve,
    simulate,
    slice_shard,
    step_call,
    wait,
)
from autopar.spmd.copies import on_copies
from autopar.spmd.halos import shift, window
from autopar.spmd.lending import LENDING, balanced_attention, balanced_attention_backward
from autopar.spmd.lowered import Ends, Lowered, Results
from autopar.spmd.placements import from_placements, to_placements
from autopar.spmd.products import PRODUCTS, gather_product, product_scatter
from autopar.spmd.ranks import LocalRank, ProcessRank, Rank, at_micro_batch, local_ranks
from autopar.spmd.ring_attention import RING_ATTENTION, ring_attention, ring_attention_backward
from autopar.spmd.rings import simulate_ring
from autopar.spmd.routing import ROUTINGS, collect, route, send
from autopar.spmd.sections import section
from autopar.spmd.transfers import HostTensor, Transfer, allocating_on_host, arrived, fetch, host_memory, offload

RINGS = {**PRODUCTS, **LENDING, **RING_ATTENTION, **ROUTINGS}
"""The generators of functions in which ranks exchange several times."""

__all__ = [
    "COLLECTIVES",
    "RINGS",
    "Ends",
    "HostTensor",
    "LocalRank",
    "Lowered",
    "Pending",
    "ProcessRank",
    "Rank",
    "Results",
    "Transfer",
    "all_gather",
    "all_gather_bucket",
    "all_reduce",
    "all_reduce_bucket",
    "all_to_all",
    "allocating_on_host",
    "arrived",
    "at_micro_batch",
    "balanced_attention",
    "balanced_attention_backward",
    "bucket_call",
    "choice",
    "collect",
    "device",
    "fetch",
    "from_placements",
    "gather_product",
    "host_memory",
    "length",
    "local_ranks",
    "offload",
    "offset",
    "on_copies",
    "permute",
    "product_scatter",
    "reduce_scatter",
    "reduce_scatter_bucket",
    "resolve",
    "ring_attention",
    "ring_attention_backward",
    "route",
    "section",
    "send",
    "shift",
    "simulate",
    "simulate_ring",
    "slice_shard",
    "step_call",
    "to_placements",
    "wait",
    "window",
]
