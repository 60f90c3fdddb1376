"""Train a small vision transformer on scikit-learn's 1,797 handwritten digits, with `Engine` and `NonPipelineSchedule`.

    pip install scikit-learn
    torchrun --nproc-per-node 2 examples/vit_digits.py        # or: python examples/vit_digits.py

Every rank passes the whole batch, and each step is split into two micro-batches. It needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,536 samples for training and 261 for testing: images [n, 1, 8, 8] in 0..1, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


def build_model() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return ViTForImageClassification(config)


def train(epochs: int) -> float:
    """Train, and return the accuracy on the test images."""
    import autopar
    from autopar.training import DistCoordinator, Engine, NonPipelineSchedule, set_seed

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_seed(0)
    coordinator = DistCoordinator()
    training, testing = digits()
    example = {"pixel_values": torch.empty(BATCH // 2, 1, 8, 8)}
    model = autopar.autoparallelize(build_model(), example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def criterion(output, label):
        return nn.functional.cross_entropy(output.logits, label)

    engine = Engine(model, optimizer, criterion, clip_grad_norm=1.0)
    schedule = NonPipelineSchedule(lambda batch: ({"pixel_values": batch[0]}, batch[1]), num_microbatches=2)
    loader = DataLoader(training, BATCH, shuffle=True)
    engine.train()
    for epoch in range(epochs):
        batches, losses = iter(loader), []
        for _ in range(len(loader)):
            engine.zero_grad()
            _, _, loss = schedule.forward_backward_step(engine, batches, return_output_label=False)
            engine.step()
            losses.append(float(loss))
        coordinator.print_on_master(f"epoch {epoch + 1}   loss {sum(losses) / len(losses):.4f}")

    engine.eval()
    images, labels = testing.tensors
    output, _, _ = NonPipelineSchedule().forward_backward_step(
        engine, iter([({"pixel_values": images}, labels)]), forward_only=True
    )
    accuracy = float((output.logits.argmax(-1) == labels).float().mean())
    coordinator.print_on_master(f"accuracy: {accuracy:.1%} of {len(labels)} test images")
    return accuracy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    train(parser.parse_args().epochs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
