"""Models that cannot be captured, one of each kind, and what their errors must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.zoo.entry import BATCH, CLASSES, Entry, Inputs, hugging_face
from tests.zoo.image_models import create
from tests.zoo.media import TEXT, matched


@dataclass(frozen=True)
class Refused:
    """A model, the reason why it is refused, and words that the error must contain."""

    entry: Entry
    why: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.entry.name


def voted() -> Inputs:
    """Return questions about images with weighted answers."""
    return matched() | {"labels": torch.rand(BATCH, CLASSES)}


class Halting(nn.Module):
    """A network that runs steps until every sample is done (Graves 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt = nn.GRUCell(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, left = torch.zeros_like(x), torch.ones(len(x), 1, dtype=x.dtype)
        while (left > 0).any():
            h = self.cell(x, h)
            left = left - self.halt(h).sigmoid() - 0.1
        return h.square().mean()


def other(name: str, build: Callable[[], nn.Module], inputs: Callable[[], Inputs]) -> Entry:
    return Entry(name, "refused", build, inputs)


REFUSED = [
    Refused(
        hugging_face(
            "vilt",
            "refused",
            "ViltForQuestionAnswering",
            voted,
            **TEXT,
            image_size=12,
            patch_size=4,
            num_labels=CLASSES,
        ),
        "it reads the sizes of images from their masks, so that shapes depend on values",
        ("modeling_vilt.py", "values of a tensor"),
    ),
    Refused(
        other(
            "timm_convit",
            lambda: create("convit_tiny", img_size=32, embed_dim=32, depth=2, num_heads=4, local_up_to_layer=1),
            lambda: {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.zeros(BATCH, dtype=torch.int64)},
        ),
        "its first forward gives a buffer another shape",
        ("rel_indices", "final shape"),
    ),
    Refused(
        other("halting", Halting, lambda: {"x": torch.randn(BATCH, 8)}),
        "a loop whose end depends on values",
        ("while (left > 0).any()", "values of a tensor"),
    ),
]
