"""autopar: an automatic parallelization compiler for PyTorch.

Names are imported on first use: the planner below them starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import autoparallelize, plan, simulate
    from autopar.comparison import compare
    from autopar.errors import AutoparError
    from autopar.mesh import Cluster
    from autopar.pipelines.request import Pipeline
    from autopar.plan_options import PlanOptions
    from autopar.plans import Plan
    from autopar.plans.pipeline import PipelinePlan
    from autopar.precision import MixedPrecision
    from autopar.runtime.safetensors import load_safetensors
    from autopar.strategies import register_rule
    from autopar.tracer import ColoTracer
    from autopar.training.launch import launch_from_openmpi, launch_from_slurm, launch_from_torch

__version__ = "0.1.0"

_HOMES = {
    "AutoparError": "errors",
    "Cluster": "mesh",
    "ColoTracer": "tracer",
    "MixedPrecision": "precision",
    "Pipeline": "pipelines.request",
    "PipelinePlan": "plans.pipeline",
    "Plan": "plans",
    "PlanOptions": "plan_options",
    "autoparallelize": "api",
    "compare": "comparison",
    "launch_from_openmpi": "training.launch",
    "launch_from_slurm": "training.launch",
    "launch_from_torch": "training.launch",
    "load_safetensors": "runtime.safetensors",
    "plan": "api",
    "register_rule": "strategies",
    "simulate": "api",
}

__all__ = [
    "AutoparError",
    "Cluster",
    "ColoTracer",
    "MixedPrecision",
    "Pipeline",
    "PipelinePlan",
    "Plan",
    "PlanOptions",
    "autoparallelize",
    "compare",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "load_safetensors",
    "plan",
    "register_rule",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"autopar.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
