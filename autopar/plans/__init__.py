"""Plans: decisions and predictions, immutable, saved as canonical JSON."""

from autopar.plans.plan import Plan
from autopar.plans.records import Activation, Collective, ring_bytes

__all__ = ["Activation", "Collective", "Plan", "ring_bytes"]
