"""Sharding specs, strategies, and redistribution between specs."""

from autopar.sharding.greedy import greedy_path
from autopar.sharding.halo import Halo
from autopar.sharding.loan import Loan
from autopar.sharding.local import LocalChoice, LocalLength, LocalOffset, local_length
from autopar.sharding.pareto import Line, LinearPricing, ParetoSet, pareto_set
from autopar.sharding.paths import Path, all_pairs, cheapest_path
from autopar.sharding.priced_graph import CollectivePricing
from autopar.sharding.redistribution import Step, StepKind, steps_from
from autopar.sharding.spec import Reduction, ShardingSpec
from autopar.sharding.strategy import Strategy

__all__ = [
    "CollectivePricing",
    "Halo",
    "Line",
    "LinearPricing",
    "Loan",
    "LocalChoice",
    "LocalLength",
    "LocalOffset",
    "ParetoSet",
    "Path",
    "Reduction",
    "ShardingSpec",
    "Step",
    "StepKind",
    "Strategy",
    "all_pairs",
    "cheapest_path",
    "greedy_path",
    "local_length",
    "pareto_set",
    "steps_from",
]
