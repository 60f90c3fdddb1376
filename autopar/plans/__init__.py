"""Plans: immutable decisions and predictions, saved as canonical JSON."""

from autopar.plans.plan import Plan
from autopar.plans.records import Activation, Collective, ring_bytes
from autopar.plans.sampling import LocalSampler

__all__ = ["Activation", "Collective", "LocalSampler", "Plan", "ring_bytes"]
