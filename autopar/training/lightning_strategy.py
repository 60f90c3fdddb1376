"""A PyTorch Lightning strategy for modules whose network is parallel."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn


class AutoparStrategy(DDPStrategy):  # type: ignore[misc]
    """Uses DDP's processes, samplers and reductions of logged values for models that ``autopar`` made parallel.

    All communication of a step is part of the model's program, so the model is not wrapped. Make the network parallel
    in ``configure_model``, with ``batch="local"``.
    """

    strategy_name = "autopar"

    def setup(self, trainer: Any) -> None:
        """Skip DDP's synchronization of parameters outside of a fit: each rank has its own shards."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def _register_ddp_hooks(self) -> None:
        """Register nothing: the model's program reduces the gradients."""
