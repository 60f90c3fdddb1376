"""An entry of the zoo, and the batches that entries share.

Sizes are small, and differ wherever they can, so that one dim cannot be mistaken for another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Any]

BATCH, SEQUENCE, HIDDEN, FEED_FORWARD, HEADS, VOCABULARY, CLASSES = 8, 6, 32, 48, 4, 40, 5


@dataclass(frozen=True)
class Entry:
    """A model of the zoo, as its library builds it.

    Args:
        name: a name that is unique in the zoo.
        family: text, vision, audio, multimodal, timm, or other.
        build: makes the model in float32, in training mode, without dropout.
        inputs: makes a batch as keyword arguments, labels included.
        dtype: the dtype in which the sharded model is compared with the whole one.
        quick: whether ``make test`` includes it.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    dtype: torch.dtype = torch.float64
    quick: bool = False

    def made(self) -> tuple[nn.Module, Inputs]:
        """Return the model with random parameters, and its batch; both are the same each time."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self.build()
        for module in model.modules():  # some dropout probabilities are not in the configuration
            for name in ("p", "drop_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # zero biases and unit scales would hide errors
                nn.init.normal_(parameter, float(parameter.detach().mean()), 0.1)
        inputs = {
            k: t.to(self.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
            for k, t in self.inputs().items()
        }
        return model.to(self.dtype).train(), inputs


def hugging_face(
    name: str,
    family: str,
    model: str,
    inputs: Callable[[], Inputs],
    *,
    quick: bool = False,
    dtype: torch.dtype = torch.float64,
    config: str = "",
    **sizes: object,
) -> Entry:
    """Return an entry for a class of transformers, configured with ``sizes`` and without dropout."""
    stem = config or next(model[: -len(s)] for s in _HEADS if model.endswith(s))

    def build() -> nn.Module:
        made = getattr(transformers, f"{stem}Config")(**sizes)
        for part in _configurations(made):
            for key, value in vars(part).items():
                if "drop" in key and isinstance(value, float):
                    setattr(part, key, 0.0)
        module: nn.Module = getattr(transformers, model)(made)
        return module

    return Entry(name, family, build, inputs, dtype, quick)


_HEADS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForImageClassification",
    "ForCTC",
    "ForSequenceClassification",
    "ForAudioClassification",
    "ForSemanticSegmentation",
    "ForPreTraining",
    "Model",
    "ForDepthEstimation",
    "ForMaskedImageModeling",
    "ForQuestionAnswering",
    "ForObjectDetection",
)


def _configurations(config: transformers.PretrainedConfig) -> Iterable[transformers.PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _configurations(value)


def token_ids(sequence: int = SEQUENCE) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, sequence))


def labels_of(ids: Tensor) -> Tensor:
    """Return ids as labels of which a different number in each sequence is ignored."""
    return ids.masked_fill(torch.rand(ids.shape) < torch.linspace(0.1, 0.6, len(ids))[:, None], -100)


def language() -> Inputs:
    ids = token_ids()
    return {"input_ids": ids, "labels": labels_of(ids)}


def padded_language() -> Inputs:
    """Return a batch of sequences of different lengths, padded at the end."""
    lengths = torch.arange(BATCH) % 3 + SEQUENCE - 2
    mask = (torch.arange(SEQUENCE) < lengths[:, None]).long()
    batch = language()
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def images(size: int, name: str = "pixel_values") -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH,))}


def segmented(size: int) -> Callable[[], Inputs]:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, CLASSES, (BATCH, size, size)),
    }
