"""Separation of music into its sources from the wave form (Demucs, Défossez et al. 2019)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def trimmed(x: Tensor, length: int) -> Tensor:
    """The middle of ``x``, of so many samples."""
    start = (x.shape[-1] - length) // 2
    return x[..., start : start + length]


class Demucs(nn.Module):
    """Strided convolutions with gates, a bidirectional LSTM, transposed convolutions, and skip connections.

    The defaults are those of the first release's training script. ``mix`` must have a length that every
    convolution divides, such as 451,924 for ten seconds at 44.1 kHz.
    """

    def __init__(
        self,
        sources: int = 4,
        audio_channels: int = 2,
        channels: int = 100,
        depth: int = 6,
        kernel: int = 8,
        stride: int = 4,
        context: int = 3,
        lstm_layers: int = 2,
    ) -> None:
        super().__init__()
        self.sources = sources
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        inputs, outputs = audio_channels, sources * audio_channels
        for level in range(depth):
            width = channels << level
            self.encoder.append(
                nn.Sequential(
                    nn.Conv1d(inputs, width, kernel, stride), nn.ReLU(), nn.Conv1d(width, 2 * width, 1), nn.GLU(1)
                )
            )
            decode = [
                nn.Conv1d(width, 2 * width, context),
                nn.GLU(1),
                nn.ConvTranspose1d(width, outputs, kernel, stride),
            ]
            self.decoder.insert(0, nn.Sequential(*decode, *([nn.ReLU()] if level else [])))
            inputs = outputs = width
        self.lstm = nn.LSTM(inputs, inputs, lstm_layers, batch_first=True, bidirectional=True)
        self.merge = nn.Linear(2 * inputs, inputs)

    def forward(self, mix: Tensor, separated: Tensor) -> Tensor:
        x, kept = mix, []
        for encode in self.encoder:
            x = encode(x)
            kept.append(x)
        x = self.merge(self.lstm(x.transpose(1, 2))[0]).transpose(1, 2)
        for decode in self.decoder:
            x = decode(x + trimmed(kept.pop(), x.shape[-1]))
        made = x.unflatten(1, (self.sources, -1))
        return F.l1_loss(made, trimmed(separated, made.shape[-1]))
