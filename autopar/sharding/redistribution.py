"""The steps between specs of a tensor; each is one collective or one local copy.

Only the innermost axis of a dim can be gathered, moved or appended in one step: an outer axis has cut the dim first, so
its ranks hold interleaved pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import Literal

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding.spec import Reduction, ShardingSpec

StepKind = Literal["all_gather", "slice", "all_to_all", "all_reduce", "reduce_scatter", "permute"]

_LINEAR = frozenset({"sum", "avg"})


@dataclass(frozen=True)
class Step:
    """One step of a redistribution of one tensor.

    ============== ========================================================================================
    all_gather     removes the innermost ``axis`` of ``dim``
    slice          makes ``axis``, so far unused, the innermost of ``dim``; local
    all_to_all     moves the innermost ``axis`` of ``dim`` to the innermost of ``to_dim``
    all_reduce     reduces the values that are partial over ``axis``
    reduce_scatter the same, and makes ``axis`` the innermost of ``dim``
    permute        ranks exchange whole shards. With ``dim``: its axes take the order ``axes`` (S01 -> S10).
                   Without: the two ``axes``, of equal size, swap places in the whole spec (S0S1 -> S1S0)
    ============== ========================================================================================

    ``axis`` of a permute is the first of its ``axes``; other kinds leave ``axes`` empty.
    """

    kind: StepKind
    axis: int
    dim: int = -1
    to_dim: int = -1
    reduction: Reduction = "sum"
    axes: tuple[int, ...] = ()

    def apply(self, spec: ShardingSpec) -> ShardingSpec:
        """Return the spec after this step.

        Raises:
            SpecError: if the step cannot be taken from ``spec``.
        """
        self._require_dims(spec)
        dims, partial = list(spec.dims), spec.partial
        if self.kind in ("all_gather", "all_to_all"):
            self._require(self.axis in dims[self.dim][-1:], spec)
            dims[self.dim] = dims[self.dim][:-1]
        if self.kind in ("all_reduce", "reduce_scatter"):
            self._require((self.axis, self.reduction) in partial, spec)
            partial = tuple(p for p in partial if p[0] != self.axis)
        if self.kind in ("slice", "reduce_scatter"):
            self._require(self.kind != "slice" or self.axis not in spec.axes, spec)
            dims[self.dim] = (*dims[self.dim], self.axis)
        if self.kind == "all_to_all":
            self._require(self.to_dim != self.dim, spec)
            dims[self.to_dim] = (*dims[self.to_dim], self.axis)
        if self.kind == "permute":
            return self._permuted(spec)
        return _spec(tuple(dims), partial)

    def fits(self, spec: ShardingSpec, shape: Sequence[int], mesh: Mesh) -> bool:
        """Whether the step exists for a tensor of ``shape``: the specs around a permute must cut at the same places."""
        if self.kind != "permute" or self.dim < 0:
            return True
        old = [mesh.shape[a] for a in spec.dims[self.dim]]
        new = [mesh.shape[a] for a in self.axes]
        ways = spec.ways(mesh) // ShardingSpec(_uncut(spec.dims, self.dim)).ways(mesh)
        return old == new or shape[self.dim] % ways == 0

    def moved_axes(self, spec: ShardingSpec) -> tuple[int, ...]:
        """Return the mesh axes along which data moves."""
        if self.kind != "permute":
            return (self.axis,)
        if self.dim < 0:
            return self.axes
        old = spec.dims[self.dim]
        return tuple(sorted({a for pair in zip(old, self.axes, strict=True) if pair[0] != pair[1] for a in pair}))

    def _permuted(self, spec: ShardingSpec) -> ShardingSpec:
        if self.dim < 0:
            a, b = self.axes
            swap = {a: b, b: a}
            dims = tuple(tuple(swap.get(x, x) for x in dim) for dim in spec.dims)
            return _spec(dims, tuple((swap.get(x, x), r) for x, r in spec.partial))
        self._require(sorted(self.axes) == sorted(spec.dims[self.dim]), spec)
        dims = (*spec.dims[: self.dim], self.axes, *spec.dims[self.dim + 1 :])
        return _spec(dims, spec.partial)

    @property
    def link(self) -> int:
        """The axis whose links it occupies: the outermost that it sends over, whose links are the slowest of them."""
        return min((self.axis, *self.axes))

    def _require_dims(self, spec: ShardingSpec) -> None:
        named = [self.dim] if self.kind != "all_reduce" and (self.kind != "permute" or self.dim >= 0) else []
        named += [self.to_dim] if self.kind == "all_to_all" else []
        for dim in named:
            if not 0 <= dim < spec.ndim:
                raise SpecError(
                    f"The step {self} names dim {dim}, but the tensor has {spec.ndim} dims.",
                    found=str(spec),
                    hint=f"dims count from 0 to {spec.ndim - 1}." if spec.ndim else "a scalar has no dim to cut.",
                )

    def _require(self, condition: bool, spec: ShardingSpec) -> None:
        if not condition:
            raise SpecError(
                f"The step {self} cannot be taken from this spec.",
                found=str(spec),
                hint="only the innermost axis of a dim can be gathered or moved, only an unused axis can be sliced.",
            )

    def __str__(self) -> str:
        if self.kind == "permute":
            return f"permute({f'dim {self.dim} to ' if self.dim >= 0 else ''}axes {','.join(map(str, self.axes))})"
        reduction = f", {self.reduction}" if self.reduction != "sum" else ""
        dims = f"dim {self.dim}" + (f" -> {self.to_dim}" if self.kind == "all_to_all" else "")
        return f"{self.kind}({f'{dims}, ' if self.dim >= 0 else ''}axis {self.axis}{reduction})"


def reducible(spec: ShardingSpec) -> bool:
    """Whether the partial axes may be reduced in any order.

    Sums and averages commute; a sum and a maximum do not, and a spec does not record which came first.
    """
    kinds = {kind for _, kind in spec.partial}
    return len(kinds) <= 1 or kinds <= _LINEAR


@lru_cache(maxsize=65536)
def steps_from(spec: ShardingSpec, ndim: int, mesh: Mesh) -> tuple[tuple[Step, ShardingSpec], ...]:
    """Return every step that can be taken from ``spec`` with the spec after it, in a fixed order.

    No two steps lead to the same spec unless they are different collectives. A permute also needs ``Step.fits``.
    """
    spec.check(ndim, mesh)
    steps = [*_reductions(spec, ndim), *_gathers(spec), *_moves(spec, ndim), *_slices(spec, ndim, mesh)]
    found = [(s, s.apply(spec)) for s in steps]
    reached = {after for _, after in found} | {spec}
    for step in _permutes(spec, mesh):
        after = step.apply(spec)
        if after not in reached:
            reached.add(after)
            found.append((step, after))
    return tuple(found)


def _reductions(spec: ShardingSpec, ndim: int) -> Iterator[Step]:
    if reducible(spec):
        for axis, reduction in spec.partial:
            yield _step("all_reduce", axis, reduction=reduction)
            yield from (_step("reduce_scatter", axis, dim, reduction=reduction) for dim in range(ndim))


def _gathers(spec: ShardingSpec) -> Iterator[Step]:
    yield from (_step("all_gather", axes[-1], dim) for dim, axes in enumerate(spec.dims) if axes)


def _moves(spec: ShardingSpec, ndim: int) -> Iterator[Step]:
    for dim, axes in enumerate(spec.dims):
        if axes:
            yield from (_step("all_to_all", axes[-1], dim, to) for to in range(ndim) if to != dim)


def _slices(spec: ShardingSpec, ndim: int, mesh: Mesh) -> Iterator[Step]:
    for axis in range(mesh.ndim):
        if axis not in spec.axes:
            yield from (_step("slice", axis, dim) for dim in range(ndim))


def _permutes(spec: ShardingSpec, mesh: Mesh) -> Iterator[Step]:
    for dim, axes in enumerate(spec.dims):
        yield from (_step("permute", order[0], dim, axes=order) for order in permutations(axes) if order != axes)
    for a, b in combinations(range(mesh.ndim), 2):
        if mesh.shape[a] == mesh.shape[b] and {a, b} & spec.axes:
            yield _step("permute", a, axes=(a, b))


def _uncut(dims: tuple[tuple[int, ...], ...], dim: int) -> tuple[tuple[int, ...], ...]:
    return (*dims[:dim], (), *dims[dim + 1 :])


# Cached: a graph has few distinct specs and steps, but very many arcs.
_spec = lru_cache(maxsize=65536)(ShardingSpec)
_step = lru_cache(maxsize=65536)(Step)
