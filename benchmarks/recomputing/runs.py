"""Real steps: of a plan in this process, and of torch.compile under its own budgets."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

from torch import Tensor, nn

import autopar
from autopar import codegen, passes
from autopar.planner import Planned
from autopar.planner.answers.make_plan import make_plan
from recomputing.rules import ONE, Case

Record = dict[str, Any]

REPEATS = 7


def measured(case: Case, planned: Planned) -> Record:
    """Return the median seconds of real steps in this process, and the peak bytes of a simulated one."""
    graph = case.capture.graph
    lowered = passes.lower(planned.program, graph, ONE)
    source = codegen.emit(lowered, ONE, [case.name])
    plan = make_plan(planned, graph, ONE, case.cluster, case.options(), source, ())
    held = autopar.simulate(case.model, case.inputs, plan=plan).peak_memory
    model = autopar.autoparallelize(copy.deepcopy(case.model), case.inputs, plan=plan)
    taken = []
    for _ in range(REPEATS + 1):
        model.zero_grad(set_to_none=True)
        start_s = time.process_time()
        returned = model(**case.inputs)
        (returned if isinstance(returned, Tensor) else returned.loss).backward()
        taken.append(time.process_time() - start_s)
    return {"measured_s": statistics.median(taken[1:]), "measured_bytes": held}


def compiled(case: Case) -> list[Record]:
    """Measure torch.compile under its own budgets, without fusing: seconds, and bytes saved for the backward."""
    import torch._dynamo
    import torch._functorch.config as functorch

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        returned = model(**case.inputs)
        (returned if isinstance(returned, Tensor) else returned.loss).backward()

    rows = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        torch._dynamo.reset()
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with functorch.patch(activation_memory_budget=share):
            model = torch.compile(copy.deepcopy(case.model), backend="aot_eager_decomp_partition")
            own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *case.inputs.values())}
            step(model)
            taken = []
            for _ in range(REPEATS):
                start_s = time.process_time()
                step(model)
                taken.append(time.process_time() - start_s)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                step(model)
        held = sum(size for at, size in saved.items() if at not in own)
        rows.append(
            {
                "model": case.name,
                "share": share,
                "measured_s": statistics.median(taken),
                "saved_bytes": held,
            }
        )
    return rows
