"""Sharding specs, strategies and redistribution between specs."""

from autopar.sharding.local import LocalLength, LocalOffset
from autopar.sharding.paths import CollectivePricing, Path, all_pairs, cheapest_path
from autopar.sharding.redistribution import Step, StepKind, steps_from
from autopar.sharding.spec import Reduction, ShardingSpec
from autopar.sharding.strategy import Strategy

__all__ = [
    "CollectivePricing",
    "LocalLength",
    "LocalOffset",
    "Path",
    "Reduction",
    "ShardingSpec",
    "Step",
    "StepKind",
    "Strategy",
    "all_pairs",
    "cheapest_path",
    "steps_from",
]
