"""That this tier runs on a GPU where there is one, and says why not where there is none."""

from __future__ import annotations

import torch


def test_the_device_computes():
    x = torch.arange(4.0, device="cuda")
    assert (x * 2).sum().item() == 12.0
