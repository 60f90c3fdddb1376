"""Pipeline schedules under the documented names, and what models that are cut by hand need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopar.errors import AutoparError
from autopar.pipelines.partition import balanced, partition_uniform
from autopar.plans.pipeline import PipelinePlan
from autopar.runtime.pipeline.by_hand import StepByHand
from autopar.training.engine import Engine
from autopar.training.handlers import BaseGradientHandler, register_gradient_handler
from autopar.training.schedules import NonPipelineSchedule, Processed


def plan_of(model: nn.Module) -> PipelinePlan | None:
    """Return the plan of a model that runs as a pipeline; None for any other model."""
    plan = getattr(model, "plan", None)
    return plan if isinstance(plan, PipelinePlan) else None


class PipelineSchedule(NonPipelineSchedule):
    """Runs a batch through a pipeline, in the order of the model's plan.

    A model that is no pipeline runs its micro-batches one after the other.

    Args:
        num_microbatches: micro-batches of a batch; for a pipeline those of its plan.
        batch_data_process_func: see ``BaseSchedule``.
        tensor_shape: of what stages exchange for one micro-batch, checked against the plan.
        scatter_gather_tensors: whether what stages exchange is cut over the ranks of a stage, checked against the plan.
    """

    def __init__(
        self,
        num_microbatches: int,
        batch_data_process_func: Callable[[Any], Processed] | None = None,
        tensor_shape: Sequence[int] | torch.Size | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(batch_data_process_func, num_microbatches)
        self.tensor_shape = None if tensor_shape is None else tuple(tensor_shape)
        self.scatter_gather_tensors = scatter_gather_tensors
        self._loaded: Processed | None = None
        self._step: StepByHand | None = None

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
            ``(output, label, loss)`` as for ``NonPipelineSchedule``. A pipeline returns the loss on every rank, and
            outputs where its model does.

        Raises:
            AutoparError: the plan of the pipeline is another one than is described here.
        """
        plan = plan_of(engine.model)
        if plan is None:
            return super().forward_backward_step(engine, data_iter, forward_only, return_loss, return_output_label)
        self._check(plan)
        # The pipeline cuts the batch by itself.
        whole = NonPipelineSchedule(self.batch_data_process_func)
        result = whole.forward_backward_step(engine, data_iter, forward_only, return_loss, return_output_label)
        self.batch_size = whole.batch_size
        return result

    def load_batch(self, data_iter: Iterator[Any], to_gpu: bool = True) -> Processed:
        """Return the next batch as ``(data, label)``, and let ``forward_step`` begin with it."""
        self._loaded, self._step = super().load_batch(data_iter, to_gpu), None
        return self._loaded

    def forward_step(
        self,
        engine: Engine,
        input_tensor: Tensor | Sequence[Tensor] | None,
        return_tensors: list[Any],
        return_output_label: bool = True,
        accum_loss: Tensor | None = None,
    ) -> Tensor | list[Tensor] | None:
        """Run the next micro-batch of the batch that ``load_batch`` loaded through this rank's stage.

        ``forward_backward_step`` does not need it; it is for loops that send the tensors by themselves.

        Args:
            input_tensor: this rank's shards of what the stage receives; None in the first stage.
            return_tensors: gets ``(output, label)`` in the last stage, where the outputs are this rank's shards.
            accum_loss: is increased by the loss in the last stage; over all micro-batches it becomes that of the batch.

        Returns:
            What the next stage receives, a list if that is several tensors; in the last stage the loss.
        """
        step = self._running(engine)
        made = step.forward(_listed(input_tensor))
        plan = plan_of(engine.model)
        assert plan is not None
        if step.stage.number < len(plan.stages) - 1:
            return _alone(made)
        outputs = step.outputs()
        loss = next((t.detach() for t in outputs.values() if t.ndim == 0), None)
        if return_output_label:
            return_tensors.append((list(outputs.values()), self._label_of(step.forwards - 1)))
        if loss is not None and accum_loss is not None:
            accum_loss.add_(loss)
        return loss

    def backward_step(
        self,
        engine: Engine,
        input_tensor: Tensor | Sequence[Tensor] | None,
        output_tensor: Tensor | Sequence[Tensor] | None,
        output_tensor_grad: Tensor | Sequence[Tensor] | None,
    ) -> Tensor | list[Tensor] | None:
        """Run the next micro-batch backward through this rank's stage. After the last, parameters have gradients.

        Args:
            input_tensor, output_tensor: what ``forward_step`` took and returned; the stage has kept what it needs.
            output_tensor_grad: this rank's shards of the gradients of what the stage sent; None in the last stage.

        Returns:
            The gradients of what the stage received, a list if these are several; None in the first stage.
        """
        return _alone(self._running(engine).backward(_listed(output_tensor_grad)))

    def _running(self, engine: Engine) -> StepByHand:
        """Return the step of the batch that was loaded last."""
        plan = plan_of(engine.model)
        if plan is None or engine.criterion is not None:
            raise AutoparError(
                "A step by hand runs a model that is parallel as a pipeline and returns its loss.",
                found="a criterion" if plan is not None else type(engine.model).__name__,
                hint="call forward_backward_step.",
            )
        self._check(plan)
        if self._step is None:
            if self._loaded is None:
                raise AutoparError(
                    "There is no batch to run a step with.", found="no batch", hint="call load_batch(data_iter) first."
                )
            data = self._loaded[0]
            args, kwargs = ((), data) if isinstance(data, Mapping) else (data, {})
            self._step = StepByHand(engine.model, args if isinstance(args, (tuple, list)) else (args,), kwargs)  # type: ignore[arg-type]
        return self._step

    def _label_of(self, micro_batch: int) -> Any:
        assert self._loaded is not None
        rows = self.batch_size // self.num_microbatches

        def part(x: Any) -> Any:
            cut = isinstance(x, Tensor) and x.ndim and len(x) == self.batch_size
            return x[micro_batch * rows : (micro_batch + 1) * rows] if cut else x

        return tree_map(part, self._loaded[1])

    def _check(self, plan: PipelinePlan) -> None:
        if plan.micro_batches != self.num_microbatches:
            raise AutoparError(
                "The pipeline was planned for another number of micro-batches.",
                found=f"num_microbatches={self.num_microbatches}, {plan.micro_batches} in the plan",
                hint=f"pass num_microbatches={plan.micro_batches}, or plan with "
                f"autopar.Pipeline(micro_batches={self.num_microbatches}).",
            )
        exchanged = _exchanged(plan)
        if self.tensor_shape is not None and any(shape != self.tensor_shape for shape, _ in exchanged):
            raise AutoparError(
                "The stages of the pipeline exchange tensors of another shape.",
                found=f"tensor_shape={self.tensor_shape}, {sorted({shape for shape, _ in exchanged})} in the plan",
                hint="leave tensor_shape out: the plan has all shapes.",
            )
        if self.scatter_gather_tensors and not all(cut for _, cut in exchanged):
            raise AutoparError(
                "What the stages exchange is not cut over the ranks of a stage.",
                found="scatter_gather_tensors=True, and a plan that sends a tensor whole",
                hint="leave scatter_gather_tensors out: the plan has chosen what costs least.",
            )


def _listed(value: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)


def _alone(values: list[Tensor]) -> Tensor | list[Tensor] | None:
    return None if not values else values[0] if len(values) == 1 else values


def _exchanged(plan: PipelinePlan) -> list[tuple[tuple[int, ...], bool]]:
    """Return the shape of each activation that stages exchange, and whether it is cut."""
    tensors = (
        stage.program.tensors[name] for stage in plan.stages for o, name in stage.program.results if o.kind == "sent"
    )
    return [(t.meta.shape, bool(t.spec.axes) or plan.stage_mesh.size == 1) for t in tensors]


class InterleavedPipelineSchedule(PipelineSchedule):
    """Runs a batch through a pipeline with several stages on each rank.

    Args:
        num_microbatches: a multiple of the ranks along the pipeline.
        num_model_chunks: stages of each rank.
        batch_data_process_func, tensor_shape, scatter_gather_tensors: as for ``PipelineSchedule``.
    """

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        batch_data_process_func: Callable[[Any], Processed] | None = None,
        tensor_shape: Sequence[int] | torch.Size | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(num_microbatches, batch_data_process_func, tensor_shape, scatter_gather_tensors)
        if num_model_chunks < 1:
            raise AutoparError(
                "num_model_chunks is the number of stages of each rank.",
                found=repr(num_model_chunks),
                hint="pass a positive integer.",
            )
        self.num_model_chunks = num_model_chunks

    def _check(self, plan: PipelinePlan) -> None:
        super()._check(plan)
        chunks = len(plan.stages) // plan.ranks
        if chunks != self.num_model_chunks:
            raise AutoparError(
                "The pipeline was planned for another number of stages on each rank.",
                found=f"num_model_chunks={self.num_model_chunks}, {chunks} in the plan",
                hint=f"plan with autopar.Pipeline(chunks={self.num_model_chunks}).",
            )


def partition_balanced(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Cut a chain into ``parts`` whose largest sum of ``costs`` is as small as can be.

    Returns:
        The first index of each part, and the one behind its last.
    """
    return list(balanced(costs, parts))


@register_gradient_handler
class PipelineSharedModuleGradientHandler(BaseGradientHandler):
    """Adds up the gradients of modules that a ``PipelineSharedModuleWrapper`` shares between ranks."""

    def handle_gradient(self) -> None:
        for parameter in self._model.parameters():
            group = getattr(parameter, "pipeline_shared_module_pg", None)
            if group is not None and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)


class PipelineSharedModuleWrapper:
    """Shares a module between ranks of a pipeline that is cut by hand, such as tied embeddings.

    Args:
        pipeline_ranks: global ranks that hold a copy of the module. All of them create the wrapper and register their
            copy; ``PipelineSharedModuleGradientHandler`` adds up their gradients before each step.
    """

    def __init__(self, pipeline_ranks: Sequence[int]) -> None:
        self.ranks = sorted(set(pipeline_ranks))
        self.group: Any = None
        if dist.is_initialized() and dist.get_rank() in self.ranks and len(self.ranks) > 1:
            self.group = dist.new_group(self.ranks, use_local_synchronization=True)

    def register_module(self, module: nn.Module) -> None:
        """Give the module the values of the first of the ranks, and mark its parameters as shared.

        Raises:
            AutoparError: this rank is none of those that share.
        """
        if not dist.is_initialized() or dist.get_rank() not in self.ranks:
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise AutoparError(
                "This rank does not share the module.",
                found=f"rank {rank}, shared by {self.ranks}",
                hint="register the module on the ranks that were given to PipelineSharedModuleWrapper.",
            )
        if self.group is None:
            return
        for parameter in module.parameters():
            _broadcast(parameter, self.ranks[0], self.group)
            parameter.pipeline_shared_module_pg = self.group  # type: ignore[attr-defined]


def _broadcast(parameter: Tensor, source: int, group: Any) -> None:
    with torch.no_grad():
        dist.broadcast(parameter.data, src=source, group=group)


__all__ = [
    "InterleavedPipelineSchedule",
    "PipelineSchedule",
    "PipelineSharedModuleGradientHandler",
    "PipelineSharedModuleWrapper",
    "partition_balanced",
    "partition_uniform",
]
