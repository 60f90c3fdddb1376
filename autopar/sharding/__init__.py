"""Sharding specs, strategies and redistribution between specs."""

from autopar.sharding.spec import Reduction, ShardingSpec
from autopar.sharding.strategy import Strategy

__all__ = ["Reduction", "ShardingSpec", "Strategy"]
