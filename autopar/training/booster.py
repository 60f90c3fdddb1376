"""``Booster``: what a training script hands its parts to, and saves and loads them with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
        meta_inputs: as of ``autoparallelize``; values do not matter.
        max_norm: to which gradients are clipped before each step; 0 leaves them.
        scaler: options of the ``GradScaler`` of fp16, such as ``{"init_scale": 2.0**16}``.
        options: further arguments of ``autoparallelize``. Without ``optimizer`` the budget holds the state of the one
            that is boosted.
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
        """The ranks that read different data; None is all of them."""
        return None

    @property
    def dp_size(self) -> int:
        """How many ranks read different data: all with ``batch="local"``, else one."""
        local = self.options.get("batch", "global") == "local"
        return dist.get_world_size() if local and dist.is_initialized() else 1

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None, mixed_precision: Any = None
    ) -> tuple[nn.Module, Any]:
        """The parallel model, and the optimizer on its parameters.

        Raises:
            AutoparError: the optimizer has parameters of another model, or two precisions were asked for.
        """
        options = dict(self.options)
        asked = options.setdefault("mixed_precision", mixed_precision)
        if mixed_precision is not None and as_precision(asked) != as_precision(mixed_precision):
            raise AutoparError(
                "Booster and plugin name different precisions.",
                found=f"mixed_precision={mixed_precision!r} and {asked!r}",
                hint="name it once.",
            )
        if optimizer is not None:
            _refuse_others(model, optimizer)
            options.setdefault("optimizer", _kind(optimizer))
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
        """A loader of what this rank passes to the model.

        Args:
            batch_size: of this rank's batches: the whole batch, or with ``batch="local"`` its part of it.
            shuffle: whether each epoch has an order of its own; call ``loader.sampler.set_epoch(epoch)``.
            options: of torch's DataLoader.
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
    """Prepares the parts of a training loop, and runs those lines of it that depend on how a model is parallel.

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
        plugin: how models become parallel; None leaves them.
        mixed_precision: as of ``autoparallelize``; fp16 scales losses, and with master weights the optimizer keeps
            them; None is full.
    """

    def __init__(self, plugin: AutoParallelPlugin | None = None, mixed_precision: Any = None) -> None:
        if plugin is None and mixed_precision is not None:
            raise AutoparError(
                "Mixed precision is part of the program that a plugin makes.",
                found=f"mixed_precision={mixed_precision!r} without a plugin",
                hint="give Booster(plugin=AutoParallelPlugin(meta_inputs)).",
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
        """Make ``model`` parallel, with ``optimizer`` on its new parameters.

        Returns:
            model, optimizer, criterion, dataloader, lr_scheduler. The optimizer is the given one, or a wrapper of it
            where losses are scaled or gradients clipped; criterion, dataloader and lr_scheduler are as they were.

        Raises:
            AutoparError: as ``autoparallelize``, or the optimizer does not fit; all is as it was.
        """
        if self.plugin is not None:
            model, optimizer = self.plugin.configure(model, optimizer, self.mixed_precision)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: Any = None) -> None:
        """Add the gradients of ``loss``, scaled as the optimizer needs it."""
        backward(loss, optimizer)

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> contextlib.AbstractContextManager[Any]:
        """A context whose backwards need not reduce gradients yet, where the model can put that off."""
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


def _refuse_others(model: nn.Module, optimizer: Optimizer) -> None:
    known = set(map(id, model.parameters()))
    strange = [p for p in parameters(optimizer) if id(p) not in known]
    if strange:
        raise AutoparError(
            "The optimizer has parameters that are not the model's.",
            found=f"{len(strange)} of {len(parameters(optimizer))}, the first of shape {tuple(strange[0].shape)}",
            hint="make it of model.parameters(), after the model was moved or converted.",
        )


def _kind(optimizer: Optimizer) -> Any:
    unwrap = getattr(optimizer, "unwrap", None)
    return type(optimizer if unwrap is None else unwrap())
