"""PyTorch Lightning's strategy for modules whose network is parallel."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn


class AutoparStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's processes, samplers and reductions of what is logged, as with DDP, around models that ``autopar``
    made parallel: all communication of a step is in their programs, so the model is wrapped in nothing.

    Make the network parallel in ``configure_model``, with ``batch="local"``.
    """

    strategy_name = "autopar"

    def setup(self, trainer: Any) -> None:
        """Without a fit, DDP's strategy would give all ranks the same parameters; here each has its own shards."""
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
        """Nor has it gradients to reduce."""
