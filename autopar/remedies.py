"""What would make a model fit a memory budget that nothing fits, each found by planning."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from autopar import planner
from autopar.arguments import as_mesh
from autopar.errors import InfeasibleError, Shortfall
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options
from autopar.planner.footprint.transients_of_losses import CHUNKS
from autopar.planner.graphs.chunked import with_chunked_losses
from autopar.planner.search.infeasible import MORE_RANKS
from autopar.planning import MeshLike, batch_of, capture_model, with_batch
from autopar.ranged import largest, resized
from autopar.solver.clock import hurried
from autopar.tracer.calls import Call

FACTORS = (2, 4, 8)
"""By how much the ranks and the micro-batches of a step are multiplied, until the model fits."""

MOST_S = 10.0
"""Seconds that one trial may take at most, beside its capture; all together take at most the time limit of the search.
Twelve layers of GPT-2 fit with two micro-batches, which ten seconds find and five do not."""

ANY_GAP = 0.999
"""With which the first plan that is found ends a trial."""

LEAST_S = 0.5
"""Seconds of a trial below which it is not begun."""

OF_VALUES = frozenset({"activations", "temporaries", "outputs"})
"""Kinds of memory that are smaller under autocast, which leaves parameters, their gradients and optimizer state."""

OF_THE_BATCH = OF_VALUES | {"inputs"}
"""Kinds of memory that are smaller for a smaller batch."""


Found = TypeVar("Found")


@dataclass(frozen=True)
class Request:
    """What was asked of a plan.

    Args:
        mesh: None where the search chose it.
        running: whether the job runs already, so that its ranks are given.
        graph: of the model with these inputs; None where it has to be captured again.
        captured_s: seconds that the capture took.
    """

    model: nn.Module
    call: Call
    mesh: MeshLike
    cluster: Cluster
    options: Options
    running: bool
    graph: Graph | None
    captured_s: float
    progress: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Trial:
    """A change of the request that may make the model fit.

    Args:
        text: the change, as it ends the sentence "It fits ...".
        divides: by how much it divides kinds of memory at best.
        kinds: which it divides; None if it divides all.
        rewrite: of the captured graph.
    """

    text: str
    request: Request
    mesh: Mesh
    divides: float
    kinds: frozenset[str] | None = None
    rewrite: Callable[[Graph], Graph] | None = None

    def may_fit(self, short: Shortfall) -> bool:
        """Whether the plan that holds the least would fit if those kinds were divided."""
        shares = (
            size / self.divides if self.kinds is None or kind in self.kinds else size
            for kind, size in short.by_kind.items()
        )
        return sum(shares) <= short.budget_bytes

    def fits(self, seconds: float) -> bool:
        """Whether a plan is found in so many seconds, capture included."""
        r, began = self.request, time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the search has given them
                graph = r.graph or capture_model(r.model, r.call, r.options, self.mesh.size).graph
                graph = graph if self.rewrite is None else self.rewrite(graph)
                left = max(seconds - (time.monotonic() - began), LEAST_S)
                options = dataclasses.replace(r.options, time_limit_s=left, compare=False, gap=ANY_GAP)
                planner.plan_forms(graph, self.mesh, r.cluster.sized(self.mesh.size), options)
        except Exception:  # noqa: BLE001  a model may refuse another batch or dtype with any error
            return False
        return True


def planned_or_remedied(search: Callable[[], Found], request: Request) -> Found:
    """The plan that ``search`` finds.

    Raises:
        InfeasibleError: nothing fits the budget; the hint names changes with which a plan was found.
    """
    try:
        return search()
    except InfeasibleError as error:
        raise with_remedies(error, request) from None


def with_remedies(error: InfeasibleError, request: Request) -> InfeasibleError:
    """``error`` with the changes of ``request`` that fit in its hint; ``error`` itself where there are none."""
    short = error.shortfall
    found = [] if short is None else remedies(request, short)
    if not found:
        return error
    listed = found[0] if len(found) == 1 else f"{', '.join(found[:-1])}, or {found[-1]}"
    kept = error.hint.removesuffix(MORE_RANKS)
    begun = "it fits" if kept.endswith("; ") else " It fits"
    remedied = InfeasibleError(error.what, found=error.found, hint=f"{kept}{begun} {listed}.")
    remedied.shortfall = short
    return remedied


def remedies(request: Request, short: Shortfall) -> list[str]:
    """The least change of each kind with which a plan was found within the budget.

    Where the time was too short for the search, it is for most trials: then only the greatest change of each kind is
    tried, what divides memory most first, and each may take all the time that is left.
    """
    kinds = [[trial for trial in kind if trial.may_fit(short)] for kind in _trials(_at_largest(request), short)]
    if short.late:
        kinds = sorted((kind[-1:] for kind in kinds if kind), key=lambda kind: -kind[0].divides)
    until = time.monotonic() + request.options.time_limit_s
    found: list[str] = []
    for i, kind in enumerate(kinds):
        for j, trial in enumerate(kind):
            left = len(kind) - j + sum(map(len, kinds[i + 1 :]))
            seconds = until - time.monotonic()
            if not short.late:
                seconds = min(request.captured_s + MOST_S, seconds / left)
            if hurried() or seconds < request.captured_s + LEAST_S:
                return found
            if request.progress is not None:
                request.progress(f"whether it fits {trial.text}")
            if trial.fits(seconds):
                found.append(trial.text)
                break
    return found


def _at_largest(request: Request) -> Request:
    """The request for the largest sizes of a range, which have to fit too."""
    ranges = request.options.ranges
    if ranges is None:
        return request
    return dataclasses.replace(request, call=resized(request.call, ranges, largest(ranges)), graph=None)


def _trials(request: Request, short: Shortfall) -> Iterator[list[Trial]]:
    """The trials of each kind, the least change first."""
    names = () if request.mesh is None else as_mesh(request.mesh).names
    mesh = Mesh(short.mesh_shape, names)
    yield [_in_bf16(request, mesh)] if _may_use_bf16(request) else []
    yield [_on_more_ranks(request, mesh, factor) for factor in FACTORS]
    batch = batch_of(request.call)
    # In a range the batch is the user's to vary.
    divisors = [factor for factor in FACTORS if batch % factor == 0 and request.options.ranges is None]
    yield [_in_micro_batches(request, mesh, factor) for factor in divisors]
    yield [_with_the_loss_alone(request, mesh)] if request.graph is not None and _returns_more(request.graph) else []


def _may_use_bf16(request: Request) -> bool:
    stored = {p.dtype for p in request.model.parameters()}
    chosen = request.options.mixed_precision is not None or torch.is_autocast_enabled("cpu")
    return torch.float32 in stored and not chosen and not torch.is_autocast_enabled("cuda")


def _in_bf16(request: Request, mesh: Mesh) -> Trial:
    options = dataclasses.replace(request.options, mixed_precision="bf16")
    changed = dataclasses.replace(request, options=options, graph=None)
    return Trial('with mixed_precision="bf16"', changed, mesh, 2, OF_VALUES)


def _on_more_ranks(request: Request, mesh: Mesh, factor: int) -> Trial:
    larger = Mesh((factor * mesh.shape[0], *mesh.shape[1:]), mesh.names)
    # Where the devices were counted, the cluster has that many; more would be of the same kind.
    cluster = dataclasses.replace(request.cluster, fixed=False)
    text = f"on mesh {larger} with {larger.size} ranks"
    if request.running:
        text = f"in a job of {larger.size} ranks on mesh {larger}"
    graph = request.graph if request.options.batch == "global" else None
    return Trial(text, dataclasses.replace(request, cluster=cluster, graph=graph), larger, factor)


def _in_micro_batches(request: Request, mesh: Mesh, factor: int) -> Trial:
    rows = batch_of(request.call) // factor
    steps = factor * request.options.accumulation_steps
    options = dataclasses.replace(request.options, accumulation_steps=steps)
    smaller = dataclasses.replace(request, options=options, call=with_batch(request.call, rows), graph=None)
    return Trial(f"with accumulation_steps={steps} and batches of {rows}", smaller, mesh, factor, OF_THE_BATCH)


def _with_the_loss_alone(request: Request, mesh: Mesh) -> Trial:
    """Logits that are not returned can be computed in chunks."""
    chunk = CHUNKS[request.cluster.device.kind]
    return Trial(
        "if forward returns only the loss",
        request,
        mesh,
        math.inf,
        OF_VALUES,
        lambda graph: with_chunked_losses(loss_alone(graph), chunk),
    )


def _returns_more(graph: Graph) -> bool:
    """Whether the model returns a loss and something besides."""
    returned = [o.name for o in graph.outputs if o.kind == "output"]
    return graph.has_loss and graph.lone_scalar in returned and len(returned) > 1


def loss_alone(graph: Graph) -> Graph:
    """The graph of a model that returns only its loss."""
    outputs = tuple(o for o in graph.outputs if o.kind != "output" or o.name == graph.lone_scalar)
    read = {o.value.node for o in outputs}
    nodes = []
    for node in reversed(graph.nodes):
        if node.op == "placeholder" or node.name in read:
            nodes.append(node)
            read |= {value.node for value in node.inputs}
    return dataclasses.replace(graph, nodes=tuple(reversed(nodes)), outputs=outputs)
