"""timm's image models: convolutional networks, transformers, and hybrids."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.zoo.entry import CLASSES, Entry, images


class Classifier(nn.Module):
    """Adds a loss to a model that returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(pixel_values)
        return nn.functional.cross_entropy(logits, labels), logits


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """Import timm without torchvision, of which each build needs one build of torch; timm only reads images with it."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    parts = ("datasets", "models", "ops", "ops.misc", "transforms", "transforms.functional", "utils")
    stand_ins = {n: mock.MagicMock() for n in ("torchvision", *(f"torchvision.{p}" for p in parts))}
    stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def library() -> Any:
    with without_torchvision():
        return importlib.import_module("timm")


def create(name: str, **options: Any) -> nn.Module:
    """Create a model from timm's registry, or from its class where no entry of the registry takes these options."""
    module, _, made = name.partition(".")
    if made:
        return Classifier(getattr(getattr(library().models, module), made)(num_classes=CLASSES, **options))
    return Classifier(library().create_model(name, num_classes=CLASSES, **options))


def gated_mixer(**options: Any) -> nn.Module:
    """gMLP (Liu et al. 2021), which timm builds from the MLP-Mixer."""
    timm = library()
    block, layer = timm.models.mlp_mixer.SpatialGatingBlock, timm.layers.GatedMlp
    return create("mlp_mixer.MlpMixer", block_layer=block, mlp_layer=layer, **options)


def image_model(
    name: str, kind: str, architecture: str, size: int = 32, *, quick: bool = False, **options: Any
) -> Entry:
    return Entry(
        f"timm_{name}", f"timm, {kind}", lambda: create(architecture, **options), images(size), torch.float64, quick
    )


def convolutional(name: str, architecture: str, size: int = 32, **options: Any) -> Entry:
    return image_model(name, "convolutional", architecture, size, **options)


def transformer(name: str, architecture: str, size: int = 32, **options: Any) -> Entry:
    return image_model(name, "transformer", architecture, size, **options)


def mixed(name: str, architecture: str, size: int = 32, **options: Any) -> Entry:
    return image_model(name, "mixed", architecture, size, **options)


PLAIN = dict(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=4)
STAGES = dict(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
MIXER = dict(img_size=16, patch_size=4, embed_dim=32, num_blocks=1)

IMAGES = [
    convolutional("resnet", "resnet18", layers=(1, 1, 1, 1), channels=(8, 8, 12, 12), stem_width=4),
    convolutional("resnext", "resnext50_32x4d", layers=(1, 1, 1, 1), channels=(8,) * 4, cardinality=2, base_width=32),
    convolutional("senet", "seresnet18", layers=(1, 1, 1, 1), channels=(16,) * 4),
    convolutional("densenet", "densenet121", growth_rate=4, block_config=(1, 1)),
    convolutional("efficientnet", "test_efficientnet"),
    convolutional("byobnet", "test_byobnet"),
    convolutional("nfnet", "test_nfnet"),
    convolutional("mambaout", "test_mambaout"),
    convolutional("convnext", "convnext_atto", **STAGES),
    convolutional("convnextv2", "convnextv2_atto", **STAGES),
    transformer("vit", "vit_tiny_patch16_224", 16, **PLAIN),
    transformer("deit3", "deit3_small_patch16_224", 16, **PLAIN),
    transformer("beit", "beit_base_patch16_224", 16, **PLAIN),
    transformer("cait", "cait_xxs24_224", 16, **PLAIN, depth_token_only=1),
    transformer(
        "swin",
        "swin_tiny_patch4_window7_224",
        img_size=32,
        patch_size=4,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 4),
        window_size=4,
    ),
    transformer("xcit", "xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=4),
    transformer("davit", "davit_tiny", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4)),
    transformer("mixer", "mlp_mixer.MlpMixer", 16, **MIXER),
    Entry("timm_gmlp", "timm, transformer", lambda: gated_mixer(**MIXER, mlp_ratio=6), images(16)),
    mixed(
        "levit", "levit_128s", 64, img_size=64, embed_dim=(16, 24, 32), num_heads=(2, 3, 4), depth=(1, 1, 1), key_dim=8
    ),
    mixed("coatnet", "coatnet_nano_rw_224", img_size=32, embed_dim=(32,) * 4, depths=(1, 1, 1, 1), stem_width=8),
    mixed("maxvit", "maxvit_rmlp_pico_rw_256", img_size=32, embed_dim=(32, 32), depths=(1, 1), stem_width=8),
    mixed("pvt_v2", "pvt_v2_b0", 64, depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2)),
    mixed("edgenext", "edgenext_xx_small", 64, depths=(1, 1, 2, 1), dims=(8, 16, 16, 16)),
    mixed("visformer", "visformer_tiny", img_size=32, embed_dim=32, depth=1),
    mixed("metaformer", "metaformer.MetaFormer", depths=(1, 1), dims=(8, 12)),
]
