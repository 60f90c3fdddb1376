"""Utilities that a training loop needs around a parallel model."""

from autopar.training.accumulation import (
    GradAccumDataloader,
    GradAccumGradientHandler,
    GradAccumLrSchedulerByStep,
    GradAccumOptimizer,
    accumulate_gradient,
)
from autopar.training.annealing import AnnealingScheduler
from autopar.training.booster import AutoParallelPlugin, Booster
from autopar.training.checkpoint import Checkpointer, Resumed
from autopar.training.clipping import clip_grad_norm_, clip_grad_value_, grad_norm
from autopar.training.communication import (
    DistCoordinator,
    all_gather_tensors,
    all_reduce_mean,
    all_reduce_sum,
    is_rank_0,
    priority_execution,
    to_device,
)
from autopar.training.data import CycledDataLoader, ResumableDataLoader, sampler
from autopar.training.engine import Engine
from autopar.training.faults import guarded, watchdog
from autopar.training.handlers import (
    BaseGradientHandler,
    DataParallelGradientHandler,
    make_gradient_handlers,
    register_gradient_handler,
)
from autopar.training.launch import launch_from_openmpi, launch_from_slurm, launch_from_torch, set_seed
from autopar.training.master import MasterWeights
from autopar.training.optimizers import MixedPrecisionOptimizer, OptimizerWrapper
from autopar.training.pipeline import (
    InterleavedPipelineSchedule,
    PipelineSchedule,
    PipelineSharedModuleGradientHandler,
    PipelineSharedModuleWrapper,
    partition_balanced,
    partition_uniform,
)
from autopar.training.scaling import GradScaler
from autopar.training.schedules import BaseSchedule, NonPipelineSchedule

__all__ = [
    "AnnealingScheduler",
    "AutoParallelPlugin",
    "BaseGradientHandler",
    "BaseSchedule",
    "Booster",
    "Checkpointer",
    "CycledDataLoader",
    "DataParallelGradientHandler",
    "DistCoordinator",
    "Engine",
    "GradAccumDataloader",
    "GradAccumGradientHandler",
    "GradAccumLrSchedulerByStep",
    "GradAccumOptimizer",
    "GradScaler",
    "InterleavedPipelineSchedule",
    "MasterWeights",
    "MixedPrecisionOptimizer",
    "NonPipelineSchedule",
    "OptimizerWrapper",
    "PipelineSchedule",
    "PipelineSharedModuleGradientHandler",
    "PipelineSharedModuleWrapper",
    "ResumableDataLoader",
    "Resumed",
    "accumulate_gradient",
    "all_gather_tensors",
    "all_reduce_mean",
    "all_reduce_sum",
    "clip_grad_norm_",
    "clip_grad_value_",
    "grad_norm",
    "guarded",
    "is_rank_0",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "make_gradient_handlers",
    "partition_balanced",
    "partition_uniform",
    "priority_execution",
    "register_gradient_handler",
    "sampler",
    "set_seed",
    "to_device",
    "watchdog",
]
