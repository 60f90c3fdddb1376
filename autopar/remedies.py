"""What would make a model fit a memory budget that nothing fits, each found by planning."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
        only_loss: whether the forward is to return nothing else.
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
    only_loss: bool = False


@dataclass(frozen=True)
class Change:
    """A change of a request that may make the model fit.

    Args:
        text: as it ends the sentence "It fits ...".
        divides: by how much it divides kinds of memory at best.
        kinds: which it divides; None if it divides all.
    """

    text: str
    apply: Callable[[Request], Request]
    divides: float
    kinds: frozenset[str] | None = None


@dataclass(frozen=True)
class Trial:
    """A request with one change, or with several of different kinds."""

    request: Request
    changes: Sequence[Change]

    @property
    def text(self) -> str:
        return " and ".join(change.text for change in self.changes)

    @property
    def divides(self) -> float:
        return math.prod(change.divides for change in self.changes)

    def may_fit(self, short: Shortfall) -> bool:
        """Whether the plan that holds the least would fit if the changes divided all that they can."""
        return sum(size / self._divides(kind) for kind, size in short.by_kind.items()) <= short.budget_bytes

    def _divides(self, kind: str) -> float:
        return math.prod(change.divides for change in self.changes if change.kinds is None or kind in change.kinds)

    @property
    def changed(self) -> Request:
        """The request with all changes."""
        return functools.reduce(lambda request, change: change.apply(request), self.changes, self.request)

    def fits(self, seconds: float) -> bool:
        """Whether a plan is found in so many seconds, capture included."""
        began, r = time.monotonic(), self.changed
        mesh = as_mesh(r.mesh)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the search has given them
                graph = r.graph or capture_model(r.model, r.call, r.options, mesh.size).graph
                if r.only_loss:  # logits that are not returned can be computed in chunks
                    graph = with_chunked_losses(loss_alone(graph), CHUNKS[r.cluster.device.kind])
                left = max(seconds - (time.monotonic() - began), LEAST_S)
                options = dataclasses.replace(r.options, time_limit_s=left, compare=False, gap=ANY_GAP)
                planner.plan_forms(graph, mesh, r.cluster.sized(mesh.size), options)
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
    """The least change of each kind with which a plan was found within the budget; where none was, changes of two kinds
    at once, and so on.

    Where the time was too short for the search, it is for most trials: then only the greatest change of each kind is
    tried, what divides memory most first, and each may take all the time that is left.
    """
    mesh = Mesh(short.mesh_shape, () if request.mesh is None else as_mesh(request.mesh).names)
    request = dataclasses.replace(_at_largest(request), mesh=mesh)
    kinds = [kind for kind in _changes(request) if kind]
    until = time.monotonic() + request.options.time_limit_s
    for count in range(1, len(kinds) + 1):
        together = [_trials(request, some, short) for some in itertools.combinations(kinds, count)]
        if found := _fitting([trials for trials in together if trials], request, short.late, until):
            return found
    return []


def _trials(request: Request, kinds: Sequence[Sequence[Change]], short: Shortfall) -> list[Trial]:
    """The trials of a change of each of these kinds that may fit, the least changes first."""
    trials = sorted((Trial(request, changes) for changes in itertools.product(*kinds)), key=lambda t: t.divides)
    return [trial for trial in trials if trial.may_fit(short)]


def _fitting(together: list[list[Trial]], request: Request, late: bool, until: float) -> list[str]:
    """The first of each list of trials that fits."""
    if late:
        together = sorted((trials[-1:] for trials in together), key=lambda trials: -trials[0].divides)
    found: list[str] = []
    for i, trials in enumerate(together):
        for j, trial in enumerate(trials):
            left = len(trials) - j + sum(map(len, together[i + 1 :]))
            seconds = until - time.monotonic()
            if not late:
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


def _changes(request: Request) -> Iterator[list[Change]]:
    """The changes of each kind, the least first."""
    yield [Change('with mixed_precision="bf16"', _in_bf16, 2, OF_VALUES)] if _may_use_bf16(request) else []
    yield [_to_more_ranks(request, factor) for factor in FACTORS]
    batch = batch_of(request.call)
    # In a range the batch is the user's to vary.
    divisors = [factor for factor in FACTORS if batch % factor == 0 and request.options.ranges is None]
    yield [_to_micro_batches(request, factor) for factor in divisors]
    only_loss = Change("if forward returns only the loss", _with_the_loss_alone, math.inf, OF_VALUES)
    yield [only_loss] if request.graph is not None and _returns_more(request.graph) else []


def _may_use_bf16(request: Request) -> bool:
    stored = {p.dtype for p in request.model.parameters()}
    chosen = request.options.mixed_precision is not None or torch.is_autocast_enabled("cpu")
    return torch.float32 in stored and not chosen and not torch.is_autocast_enabled("cuda")


def _in_bf16(request: Request) -> Request:
    options = dataclasses.replace(request.options, mixed_precision="bf16")
    return dataclasses.replace(request, options=options, graph=None)


def _to_more_ranks(request: Request, factor: int) -> Change:
    mesh = as_mesh(request.mesh)
    larger = Mesh((factor * mesh.shape[0], *mesh.shape[1:]), mesh.names)

    def apply(r: Request) -> Request:
        # Where the devices were counted, the cluster has that many; more would be of the same kind.
        cluster = dataclasses.replace(r.cluster, fixed=False)
        graph = r.graph if r.options.batch == "global" else None
        return dataclasses.replace(r, mesh=larger, cluster=cluster, graph=graph)

    job = f"in a job of {larger.size} ranks on mesh {larger}"
    return Change(job if request.running else f"on mesh {larger} with {larger.size} ranks", apply, factor)


def _to_micro_batches(request: Request, factor: int) -> Change:
    rows, steps = batch_of(request.call) // factor, factor * request.options.accumulation_steps

    def apply(r: Request) -> Request:
        options = dataclasses.replace(r.options, accumulation_steps=steps)
        return dataclasses.replace(r, options=options, call=with_batch(r.call, rows), graph=None)

    return Change(f"with accumulation_steps={steps} and batches of {rows}", apply, factor, OF_THE_BATCH)


def _with_the_loss_alone(request: Request) -> Request:
    return dataclasses.replace(request, only_loss=True)


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
