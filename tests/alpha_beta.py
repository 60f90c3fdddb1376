"""A cost model of collectives that is simple enough to check by hand."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.mesh import Mesh


@dataclass(frozen=True)
class AlphaBeta:
    """Ring collectives that take ``alpha`` seconds per launch and ``beta`` per byte sent; a slice has no latency."""

    mesh: Mesh
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    def seconds(self, kind: str, nbytes: int, axis: int) -> float:
        k = self.mesh.shape[axis]
        if kind == "slice":
            return 1e-9 + nbytes / k * 1e-13
        share = (k - 1) / k
        sent = {
            "all_gather": share * nbytes,
            "reduce_scatter": share * nbytes,
            "all_reduce": 2 * share * nbytes,
            "all_to_all": share * nbytes,
            "permute": 1.0 * nbytes,
        }[kind]
        return self.alpha[axis] + self.beta[axis] * sent


def uniform(mesh: Mesh, alpha: float = 1e-5, beta: float = 1e-10) -> AlphaBeta:
    return AlphaBeta(mesh, (alpha,) * mesh.ndim, (beta,) * mesh.ndim)


def uneven(mesh: Mesh) -> AlphaBeta:
    """Make axis 0 the slow one, as between nodes."""
    speeds = [8.0 if axis == 0 else 1.0 / (axis + 1) for axis in range(mesh.ndim)]
    return AlphaBeta(mesh, tuple(1e-5 * s for s in speeds), tuple(1e-10 * s for s in speeds))
