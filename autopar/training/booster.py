"""``Booster``: makes the parts of a training script parallel, and saves and loads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from autopar.api import autoparallelize
from autopar.errors import AutoparError
from autopar.plans import LocalSampler
from autopar.precision import as_precision, policy_of
from autopar.training import files
from autopar.training.master import MasterWeights
from autopar.training.optimizers import MixedPrecisionOptimizer, backward, no_sync, parameters
from autopar.training.scaling import GradScaler

Boosted = tuple[nn.Module, Any, Any, Any, Any]


class AutoParallelPlugin:
    """Makes a model parallel with ``autopar.autoparallelize``.

    Args:
        meta_inputs: as in ``autoparallelize``; values do not matter.
        max_norm: gradients are clipped to this norm before each step; 0 disables clipping.
        scaler: options of the ``GradScaler`` for fp16, such as ``{"init_scale": 2.0**16}``.
        options: further arguments of ``autoparallelize``. If ``optimizer`` is not among them, the budget includes
            the state of the boosted optimizer.
    """

    def __init__(
        self, meta_inputs: Any, *, max_norm: float = 0.0, scaler: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.meta_inputs = meta_inputs
        self.max_norm = max_norm
        self.scaler = dict(scaler or {})
        self.options = options

    @property
    def dp_group(self) -> Any:
        """The process group of the ranks that read different data; None stands for all ranks."""
        return None

    @property
    def dp_size(self) -> int:
        """How many ranks read different data: all with ``batch="local"``, otherwise one."""
        local = self.options.get("batch", "global") == "local"
        return dist.get_world_size() if local and dist.is_initialized() else 1

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None, mixed_precision: Any = None
    ) -> tuple[nn.Module, Any]:
        """Return the parallel model and the optimizer on its parameters.

        Raises:
            AutoparError: the optimizer has parameters of another model, or two different precisions were given.
        """
        options = dict(self.options)
        precision = options.setdefault("mixed_precision", mixed_precision)
        if mixed_precision is not None and as_precision(precision) != as_precision(mixed_precision):
            raise AutoparError(
                "Booster and plugin name different precisions.",
                found=f"mixed_precision={mixed_precision!r} and {precision!r}",
                hint="name the precision in one place only.",
            )
        if optimizer is not None:
            _check_parameters(model, optimizer)
            options.setdefault("optimizer", _unwrapped_type(optimizer))
        parallel = autoparallelize(model, self.meta_inputs, **options)
        policy = policy_of(parallel.plan.options.get("mixed_precision"))  # type: ignore[union-attr, operator]
        scales = policy.compute == "float16"
        if optimizer is not None and policy.master is not None:
            optimizer = MasterWeights(optimizer, getattr(torch, policy.master))
        if optimizer is None or not (scales or self.max_norm > 0):
            return parallel, optimizer
        device = next(parallel.parameters()).device.type
        scaler = GradScaler(**{"device": device, **self.scaler}) if scales else None
        return parallel, MixedPrecisionOptimizer(optimizer, scaler, self.max_norm)

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = True,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a loader of the batches that this rank passes to the model.

        Args:
            batch_size: size of this rank's batches: the global batch, or its local part with ``batch="local"``.
            shuffle: whether each epoch has its own order; call ``loader.sampler.set_epoch(epoch)``.
            options: further arguments of torch's DataLoader.
        """
        rank = dist.get_rank() if self.dp_size > 1 else 0
        sampler = LocalSampler(
            dataset,  # type: ignore[arg-type]
            rank,
            self.dp_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        return DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, **options)


class Booster:
    """Prepares the parts of a training loop, and runs the steps of it that depend on how the model is parallelized.

        booster = Booster(plugin=AutoParallelPlugin(example_batch, memory_budget="60GiB"), mixed_precision="bf16")
        model, optimizer, _, dataloader, lr_scheduler = booster.boost(
            model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
        )
        for batch in dataloader:
            booster.backward(model(**batch).loss, optimizer)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

    Args:
        plugin: how models are made parallel; None leaves them unchanged.
        mixed_precision: as in ``autoparallelize``; fp16 scales losses, and the optimizer keeps master weights if the
            policy has them; None is full precision.
    """

    def __init__(self, plugin: AutoParallelPlugin | None = None, mixed_precision: Any = None) -> None:
        if plugin is None and mixed_precision is not None:
            raise AutoparError(
                "Mixed precision needs a plugin, because it is part of the program that the plugin makes.",
                found=f"mixed_precision={mixed_precision!r} without a plugin",
                hint="pass Booster(plugin=AutoParallelPlugin(meta_inputs)).",
            )
        self.plugin = plugin
        self.mixed_precision = mixed_precision

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Tensor] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Make ``model`` parallel, and bind ``optimizer`` to its new parameters.

        Returns:
            model, optimizer, criterion, dataloader, lr_scheduler. The optimizer is the given one, or a wrapper of it
            if losses are scaled or gradients clipped; criterion, dataloader and lr_scheduler are unchanged.

        Raises:
            AutoparError: as in ``autoparallelize``, or if the optimizer does not fit; nothing has changed then.
        """
        if self.plugin is not None:
            model, optimizer = self.plugin.configure(model, optimizer, self.mixed_precision)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: Any = None) -> None:
        """Add the gradients of ``loss``, scaled if the optimizer needs it."""
        backward(loss, optimizer)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run forward and backward of the next batch, in micro-batches where the model is a pipeline.

        A model that is no pipeline runs the whole batch.

        Args:
            data_iter: yields batches: mappings of keyword arguments, tuples of positional ones, or a tensor.
            criterion: called as ``criterion(outputs, inputs)``; returns the loss.
            optimizer: the boosted one, which may scale the loss; it does not step.

        Returns:
            ``loss``, detached, on every rank, and ``outputs``; None where they are not asked for.

        Raises:
            StopIteration: no batch is left.
        """
        inputs = next(data_iter)
        if isinstance(inputs, Mapping):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        loss = criterion(outputs, inputs)
        backward(loss, optimizer)
        return {"loss": loss.detach() if return_loss else None, "outputs": outputs if return_outputs else None}

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which backwards need not reduce gradients yet, if the model can delay the reduction."""
        return no_sync(model)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: files.PathLike,
        shard: bool = False,
        *,
        size_per_shard: int = 1024,
        prefix: str = "model",
    ) -> None:
        """See ``autopar.training.files.save_model``."""
        files.save_model(model, checkpoint, shard, size_per_shard=size_per_shard, prefix=prefix)

    def load_model(self, model: nn.Module, checkpoint: files.PathLike, strict: bool = True) -> None:
        """See ``autopar.training.files.load_model``."""
        files.load_model(model, checkpoint, strict)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: files.PathLike,
        shard: bool = False,
        *,
        size_per_shard: int = 1024,
        prefix: str = "optimizer",
    ) -> None:
        """See ``autopar.training.files.save_optimizer``."""
        files.save_optimizer(optimizer, checkpoint, shard, size_per_shard=size_per_shard, prefix=prefix)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: files.PathLike) -> None:
        """See ``autopar.training.files.load_optimizer``."""
        files.load_optimizer(optimizer, checkpoint)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: files.PathLike) -> None:
        """Write the scheduler's state to a file."""
        files.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: files.PathLike) -> None:
        """Read the scheduler's state from a file."""
        files.load_lr_scheduler(lr_scheduler, checkpoint)


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    known = set(map(id, model.parameters()))
    foreign = [p for p in parameters(optimizer) if id(p) not in known]
    if foreign:
        raise AutoparError(
            "The optimizer has parameters that are not the model's.",
            found=f"{len(foreign)} of {len(parameters(optimizer))}, the first of shape {tuple(foreign[0].shape)}",
            hint="create it from model.parameters() after the model was moved or converted.",
        )


def _unwrapped_type(optimizer: Optimizer) -> Any:
    unwrap = getattr(optimizer, "unwrap", None)
    return type(optimizer if unwrap is None else unwrap())
