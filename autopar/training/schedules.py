"""Schedules: how a batch goes through a model. One without pipelining; others derive from ``BaseSchedule``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from autopar.errors import AutoparError
from autopar.training.communication import to_device
from autopar.training.engine import Engine

Processed = tuple[Any, Any]


class BaseSchedule(ABC):
    """How a batch goes through a model.

    Args:
        batch_data_process_func: splits an item of the iterator into ``(data, label)``. By default a pair is taken as
            that, and a dict of keyword arguments is the data, with its ``labels`` as label.

    Attributes:
        batch_size: of the batch loaded last: the first dim of its first tensor.
    """

    def __init__(self, batch_data_process_func: Callable[[Any], Processed] | None = None) -> None:
        self.batch_data_process_func = batch_data_process_func
        self.batch_size = 0

    def load_batch(self, data_iter: Iterator[Any], to_gpu: bool = True) -> Processed:
        """Return the next batch as ``(data, label)``.

        Args:
            to_gpu: whether to move tensors to the current CUDA device, if there is one.

        Raises:
            StopIteration: no batch is left.
            AutoparError: there is no iterator, or the batch cannot be split.
        """
        if data_iter is None:
            raise AutoparError(
                "There is no data iterator to load a batch from.", found="data_iter=None", hint="pass iter(dataloader)."
            )
        data, label = self._split(next(data_iter))
        first = next((t for t in tree_leaves((data, label)) if isinstance(t, Tensor) and t.ndim), None)
        self.batch_size = 0 if first is None else first.shape[0]
        if to_gpu and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            return to_device(data, device), to_device(label, device)
        return data, label

    def _split(self, batch: Any) -> Processed:
        if self.batch_data_process_func is not None:
            data, label = self.batch_data_process_func(batch)
            return data, label
        if isinstance(batch, Mapping):
            return batch, batch.get("labels")
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        raise AutoparError(
            "The batch is neither a pair of data and label nor a dict.",
            found=type(batch).__name__,
            hint="pass the schedule a batch_data_process_func that returns (data, label).",
        )

    @abstractmethod
    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Any]:
        """Load a batch and run it forward, and backward unless ``forward_only``; return (output, label, loss)."""


class NonPipelineSchedule(BaseSchedule):
    """Runs the whole model, one micro-batch after the other.

    Args:
        batch_data_process_func: see ``BaseSchedule``.
        num_microbatches: pieces into which the first dim of a batch is cut, so that only one piece's activations are
            held at a time. Each piece's loss is weighted by its share of the batch, so the gradients are those of the
            whole batch if the loss is a mean over it.
    """

    def __init__(
        self, batch_data_process_func: Callable[[Any], Processed] | None = None, num_microbatches: int = 1
    ) -> None:
        super().__init__(batch_data_process_func)
        if num_microbatches < 1:
            raise AutoparError(
                "num_microbatches must be at least 1.", found=repr(num_microbatches), hint="pass a positive integer."
            )
        self.num_microbatches = num_microbatches

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Any]:
        """Load a batch and run it forward, and backward unless ``forward_only``.

        Returns:
            ``(output, label, loss)``: output and label are None without ``return_output_label``, label and loss
            without ``return_loss``. The loss is detached from the graph.
        """
        data, label = self.load_batch(data_iter)
        pieces = list(zip(self._pieces(data), self._pieces(label), strict=True))
        sizes = [_rows(piece) for piece in pieces]
        outputs, total = [], None
        for i, (inputs, wanted) in enumerate(pieces):
            output, loss = _forward(engine, inputs, wanted, forward_only, needs_loss=return_loss or not forward_only)
            if loss is not None:
                share = loss if len(pieces) == 1 else loss * (sizes[i] / sum(sizes))
                if not forward_only:
                    engine.backward(share, last=i == len(pieces) - 1)
                total = share.detach() if total is None else total + share.detach()
            if return_output_label:
                outputs.append(output if forward_only else tree_map(_detached, output))
        return (
            _joined(outputs) if return_output_label else None,
            label if return_output_label and return_loss else None,
            total if return_loss else None,
        )

    def _pieces(self, value: Any) -> list[Any]:
        """Split ``value`` along the first dim of its batched tensors; everything else goes to every piece."""
        count = min(self.num_microbatches, max(self.batch_size, 1))
        if count == 1:
            return [value]
        leaves, structure = tree_flatten(value)
        cut = [
            torch.tensor_split(x, count)
            if isinstance(x, Tensor) and x.ndim and len(x) == self.batch_size
            else [x] * count
            for x in leaves
        ]
        return [tree_unflatten([each[i] for each in cut], structure) for i in range(count)]


def _forward(
    engine: Engine, data: Any, label: Any, forward_only: bool, *, needs_loss: bool
) -> tuple[Any, Tensor | None]:
    with torch.set_grad_enabled(not forward_only and torch.is_grad_enabled()):
        if isinstance(data, Mapping):
            output = engine(**data)
        elif isinstance(data, (tuple, list)):
            output = engine(*data)
        else:
            output = engine(data)
        return output, _loss(engine, output, label) if needs_loss else None


def _loss(engine: Engine, output: Any, label: Any) -> Tensor:
    """Return the criterion's loss, or the one that the model returns."""
    if engine.criterion is not None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        labels = label if isinstance(label, (tuple, list)) else () if label is None else (label,)
        return engine.criterion(*outputs, *labels)
    found = getattr(output, "loss", None)
    if found is None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(found, Tensor) or found.ndim:
        raise AutoparError(
            "The model returns no loss, and there is no criterion.",
            found=f"an output of type {type(output).__name__}",
            hint="pass Engine(model, optimizer, criterion) a criterion(output, label).",
        )
    return found


def _rows(piece: Any) -> int:
    return next((t.shape[0] for t in tree_leaves(piece) if isinstance(t, Tensor) and t.ndim), 1)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _joined(outputs: list[Any]) -> Any:
    """Join the outputs of all micro-batches: concatenate tensors, and average scalars."""
    if len(outputs) == 1:
        return outputs[0]
    structure = tree_flatten(outputs[0])[1]
    return tree_unflatten([_joined_leaf(each) for each in zip(*map(tree_leaves, outputs), strict=True)], structure)


def _joined_leaf(values: tuple[Any, ...]) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].ndim == 0:
        return torch.stack(list(values)).mean()
    whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in values]
    return torch.cat(whole)
