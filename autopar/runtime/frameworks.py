"""Lets Hugging Face's Trainer and Accelerate, and Lightning, write checkpoints of parallel models.

They write on one rank, so all ranks must gather first. None of them has a hook for this that a model could fill, so
their functions are wrapped once they are imported. Models that are not parallel pass through.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

from autopar import _torch
from autopar.runtime.agreement import on_all_ranks
from autopar.runtime.gathering import gather_state, gathered_model, gathered_optimizer, is_parallel

_wrapped: set[str] = set()


def wrap_frameworks() -> None:
    """Wrap the frameworks that are imported by now."""
    for name, wrap in _WRAPS.items():
        module = sys.modules.get(name)
        if module is not None and name not in _wrapped:
            _wrapped.add(name)
            wrap(module)


class Prepared:
    """An attribute that is True when a framework asks whether the model is prepared.

    A framework asks before it trains, possibly having been imported after the model was made, so asking wraps it.
    """

    def __get__(self, model: object, kind: type) -> bool:
        wrap_frameworks()
        return True


def _trainer(module: Any) -> None:
    kind = module.Trainer
    save, save_optimizer = kind._save, kind._save_optimizer_and_scheduler

    @functools.wraps(save)
    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> Any:
        if state_dict is not None or not is_parallel(self.model.parameters()):
            return save(self, output_dir, state_dict)
        state = gathered_model(self.model, "Trainer.save_model", keep=self.args.should_save)
        return on_all_ranks(lambda: save(self, output_dir, state))

    @functools.wraps(save_optimizer)
    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> Any:
        if not is_parallel(self.model.parameters()):
            return save_optimizer(self, output_dir)
        optimizer = self.optimizer
        self.optimizer = gathered_optimizer(optimizer, "Trainer's checkpoint", keep=self.args.should_save)
        try:
            return on_all_ranks(lambda: save_optimizer(self, output_dir))
        finally:
            self.optimizer = optimizer

    kind._save, kind._save_optimizer_and_scheduler = _save, _save_optimizer_and_scheduler


def _accelerate(module: Any) -> None:
    kind = module.Accelerator
    get, save, load = kind.get_state_dict, module.save_accelerator_state, module.load_accelerator_state

    def writes(accelerator: Any) -> bool:
        each_node = accelerator.project_configuration.save_on_each_node
        return bool(accelerator.is_local_main_process if each_node else accelerator.is_main_process)

    @functools.wraps(get)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        state = get(self, model, *args, **kwargs)
        if not is_parallel(model.parameters()):
            return state
        if hasattr(model, "gathered_state"):  # a pipeline, of which ``state`` is this rank's part
            return gathered_model(model, "Accelerator.get_state_dict", keep=writes(self))
        return gather_state(state, "Accelerator.get_state_dict", keep=writes(self))

    @functools.wraps(save)
    def save_accelerator_state(output_dir: Any, model_states: Any, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        ours = [is_parallel(p for g in o.param_groups for p in g["params"]) for o in optimizers]
        if not any(ours):
            return save(output_dir, model_states, optimizers, *args, **kwargs)
        keep = module.PartialState().is_local_main_process
        stand_ins = [
            gathered_optimizer(o, "Accelerator.save_state", keep=keep) if mine else o
            for o, mine in zip(optimizers, ours, strict=True)
        ]
        return on_all_ranks(lambda: save(output_dir, model_states, stand_ins, *args, **kwargs))

    @functools.wraps(load)
    def load_accelerator_state(input_dir: Any, models: Any, *args: Any, **kwargs: Any) -> Any:
        return load(input_dir, [_loadable(model) for model in models], *args, **kwargs)

    kind.get_state_dict, module.save_accelerator_state = get_state_dict, save_accelerator_state
    module.load_accelerator_state = load_accelerator_state


def _loadable(model: Any) -> Any:
    """Return a stand-in for a model to be loaded: safetensors asks for the memory addresses of its tensors."""
    if not is_parallel(model.parameters()):
        return model
    shards = {name: _torch.shard_of(tensor) for name, tensor in model.state_dict().items()}
    return SimpleNamespace(state_dict=lambda: shards, load_state_dict=model.load_state_dict)


def _lightning(module: Any) -> None:
    save = module.Strategy.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self: Any, checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if self.lightning_module is None or not is_parallel(self.lightning_module.parameters()):
            return save(self, checkpoint, filepath, *args, **kwargs)
        state = gather_state(checkpoint, "Lightning's checkpoint", keep=self.is_global_zero)
        return on_all_ranks(lambda: save(self, state, filepath, *args, **kwargs))

    module.Strategy.save_checkpoint = save_checkpoint


_WRAPS = {
    "transformers.trainer": _trainer,
    "accelerate.accelerator": _accelerate,
    "lightning.pytorch.strategies.strategy": _lightning,
    "pytorch_lightning.strategies.strategy": _lightning,
}
