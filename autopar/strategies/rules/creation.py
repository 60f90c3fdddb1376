"""Tensors created from a shape alone, and the program's inputs: each shard can be created independently.

Random numbers are the exception: the generator of each rank would give another stream, so they are never cut.
"""

from __future__ import annotations

from autopar.ir import Node
from autopar.mesh import Mesh
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_shape
from autopar.strategies.registry import LocalCall, Metas, aten, lowering, rule
from autopar.strategies.rules.terms import names, replicated, term

for _op in (aten.full, aten.zeros, aten.ones, aten.empty.memory_format, aten._efficientzerotensor):
    rule(_op, "-> ...", shape_args={0: 0, "size": 0})

rule("placeholder", "-> ...")

for _op in (
    aten.arange,
    aten.scalar_tensor,
    aten.rand,
    aten.randn,
    aten.randint,
    aten.randperm,
    aten.eye,
    aten.linspace,
    aten.logspace,
    aten.hann_window,
    aten.hamming_window,
    aten.blackman_window,
    aten.bartlett_window,
    aten.kaiser_window,
    aten.tril_indices,
    aten.triu_indices,
):
    rule(_op, replicated)


def _of_shape(node: Node, metas: Metas) -> str:
    """Write the rule. The operand only gives dtype and device, so its dims follow the result's where sizes agree."""
    shape = list(metas[0].shape)
    result = node.outputs[0]
    assert result is not None
    dims, at, after = names(len(shape)), 0, []
    for i, n in enumerate(result.shape):
        match = next((j for j in range(at, len(shape)) if shape[j] == n), None)
        after.append(f"e{i}" if match is None else dims[match])
        at = at if match is None else match + 1
    free = [d for d in dims if d not in after]
    return f"{term(dims)} -> {term(after)}{' / ' + ' '.join(free) if free else ''}"


for _op in (aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty):
    rule(_op, _of_shape, shape_args={1: 0, "size": 0})

rule(aten.new_empty_strided, _of_shape)


@lowering(aten.new_empty_strided)
def _lower_new_empty_strided(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    """Return a call without the strides, which are those of the global tensor."""
    result, spec = node.outputs[0], strategy.outputs[0]
    assert result is not None
    assert spec is not None
    return "aten.new_empty.default", (node.args[0], local_shape(result.shape, spec, mesh)), node.kwargs


for _op in (aten.bernoulli, aten.rand_like, aten.randn_like, aten.randint_like, aten.multinomial, aten.native_dropout):
    rule(_op, replicated)
