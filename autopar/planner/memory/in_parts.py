"""What products never hold whole, because they gather an operand or scatter their result in parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.ir import Graph, Node
from autopar.planner.footprint.contraction import CONTRACTION, equation
from autopar.planner.footprint.transients_of_products import BLOCKS, least_share
from autopar.planner.problem.variables import Decisions, Variable, spec_made, spec_read
from autopar.sharding import ShardingSpec, Strategy

MayDecompose = Callable[[Graph, Node, tuple[Strategy, ...], int], npt.NDArray[np.bool_]]
"""Under which options a product may be decomposed beside the gather of an operand, or with -1 the scatter of its
result."""


def no_product(_: Graph, __: Node, options: tuple[Strategy, ...], ___: int) -> npt.NDArray[np.bool_]:
    """No product is decomposed."""
    return np.zeros(len(options), dtype=bool)


@dataclass(frozen=True, eq=False)
class Product:
    """A contraction, and the operand or with -1 the result that may be there in parts."""

    variable: Variable
    node: Node
    operand: int


@dataclass(frozen=True, eq=False)
class InParts:
    """The least shares of operands and results that are there at once."""

    d: Decisions
    may_decompose: MayDecompose = no_product
    _known: dict[Hashable, tuple[Mapping[ShardingSpec, float], object]] = field(default_factory=dict)

    def shares(self, product: Product | None, blocks: int = BLOCKS) -> Mapping[ShardingSpec, float]:
        """Return the specs of which less than the whole may be there at once, each with the least share.

        Args:
            blocks: the parts that are there.
        """
        if product is None:
            return {}
        node, options, graph = product.node, product.variable.options, self.d.graph
        key = id(options), equation(node), node.outputs, tuple(map(graph.meta, node.inputs)), product.operand, blocks
        if key not in self._known:
            made = product.operand < 0
            specs = (spec_made(o, 0) if made else spec_read(o, product.operand) for o in options)
            may = self.may_decompose(graph, node, options, product.operand).tolist()
            found = {
                s: least_share(s, self.d.mesh, made=made, blocks=blocks)
                for s, m in zip(specs, may, strict=True)
                if s and m
            }
            self._known[key] = {s: share for s, share in found.items() if share < 1}, options
        return self._known[key][0]

    def of(self, variable: int, operand: int) -> Product | None:
        """Return the product that a variable decides; None if it is about another op."""
        v = self.d.variables[variable]
        is_product = v.kind == "op" and v.node is not None and v.node.packet == CONTRACTION
        return Product(v, v.node, operand) if is_product and v.node is not None else None

    def first_of_copy(self, copy: int) -> Product | None:
        """Return the first product that reads a copy. Where that is decomposed, it gathers the copy, which until then
        is only what the rank has of it."""
        found = (self.of(use.target, use.position) for use in self.d.readers.get(copy, ()))
        products = (product for product in found if product is not None)
        return min(products, key=lambda product: self.d.graph.order[product.node.name], default=None)
