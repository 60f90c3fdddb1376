"""A capture that takes long tells which line of the model it is at."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import Tensor, nn

from autopar.tracer import ColoTracer, slow_captures


class Scan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x + 1
            time.sleep(0.05)
        return x


def test_a_slow_capture_names_the_loop_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.tracer.export.telling_where", lambda: slow_captures.telling_where(1.0))
    with pytest.warns(UserWarning, match=r"taken 1 s so far and is at .*test_slow_captures\.py:\d+ in forward: "):
        ColoTracer().trace(Scan(), {"x": torch.zeros(2)})


def test_a_quick_capture_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.tracer.export.telling_where", lambda: slow_captures.telling_where(30.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ColoTracer().trace(Scan(), {"x": torch.zeros(2)})
