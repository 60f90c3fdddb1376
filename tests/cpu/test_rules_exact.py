"""Every rule is true: each of its strategies, run on shards, gives what the op gives on whole tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from autopar.errors import RuleError
from autopar.mesh import Mesh
from autopar.strategies import find_rule, registered, strategies
from tests.cpu.rule_mutations import in_place, mutants
from tests.cpu.rule_samples import KINDS
from tests.cpu.rule_simulation import Sample, WrongRule, check

# Ops that are replicated on purpose: random streams, results whose size depends on values, strides of a storage.
REPLICATED = """
    arange argsort bernoulli bincount eye index_fill logspace masked_scatter
    _pdist_forward _pdist_backward put repeat_interleave
    hann_window hamming_window blackman_window bartlett_window kaiser_window
    masked_scatter_backward multinomial native_dropout nonzero linspace rand rand_like randint randint_like
    randn randn_like randperm scalar_tensor trace tril_indices triu_indices
""".split()


@pytest.mark.parametrize("kind", KINDS)
def test_the_shards_of_every_strategy_make_up_the_result(kind: str) -> None:
    tried = sum(check(case) for case in KINDS[kind]())
    assert tried > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_also_on_meshes_of_three_axes_and_of_uneven_ones(kind: str) -> None:
    small = (case for case in KINDS[kind]() if len(strategies(case.node, case.metas, Mesh((2, 2)))) < 60)
    assert sum(check(case, [Mesh((2, 3)), Mesh((2, 2, 2))]) for case in small) > 100


def test_every_rule_has_a_sample_that_cuts_it() -> None:
    cut: dict[str, bool] = {}
    for case in (case for samples in KINDS.values() for case in samples()):
        rule = find_rule(case.node)
        assert rule is not None, f"{case.node.op} has a sample and no rule"
        found = any(s.work < 1 for s in strategies(case.node, case.metas, Mesh((2,))))
        cut[rule.op] = cut.get(rule.op, False) or found
    assert set(registered()) - set(cut) == {"placeholder"} | OF_ROUTED_ROWS
    whole = {op for op, found in cut.items() if not found}
    assert {op for op in whole if op.split(".")[1] not in REPLICATED} == WITHOUT_CUTS


OF_ROUTED_ROWS = {
    f"autopar.{op}"
    for op in ("route", "send", "collect", "routed_mm", "routed_mm_weight", "of_expert", "sum_of_expert")
}
"""Ops on rows that are no slices of a whole: test_routing.py checks every strategy of these."""

# Full reductions in which every element counts: no dim is left to cut.
WITHOUT_CUTS = {
    *(f"aten.{op}.default" for op in ("mean", "median")),
}

# Kernels that read out of bounds where shapes or indices do not fit: no mutation that would let them.
UNCHECKED = {"indexing", "losses", "resampling"}

# Mutations that are true, and strategies that rules leave out on purpose.
TRUE = {
    r"aten\.(isfinite|nan_to_num|nansum): linear": "true without infinities and NaN",
    r"aten\.nextafter: linear": "true to within the tolerance",
    r"aten\.(zeros|ones|empty)_like: linear": "values do not count",
    r"aten\.copy: linear in operands \(0, 1\)": "what is overwritten does not count",
    r"aten\.xlogy: linear in operands \(0,\)": "rare",
    r"aten\.special_xlog1py: linear in operands \(0,\)": "rare",
    r"aten\.(bitwise_left_shift|__lshift__|_pdist_backward): linear": "rare",
    r"aten\.cat: linear in operands \(1, 2\)": "the first operand is empty",
    r"aten\.\w+_pad\dd_backward: linear in operands \(0, 1\)": "the second operand gives the shape alone",
    r"aten\.as_strided(_scatter)?: linear": "rare",
    r"aten\.polar: linear in operands \(0,\)": "rare",
    r"aten\.native_batch_norm_backward: linear in operands \(0, [34]\)": "running statistics do not count in training",
    r"aten\.native_layer_norm_backward: linear in operands \(0, 5\)": "the bias does not count",
    r"aten\._fused_rms_norm_backward: linear in operands \(0, 2\)": "the reference finds rstd by itself",
    r"aten\.convolution_backward: linear in operands": "each gradient is a product of two of the three operands",
    r"aten\.nll_loss(2d)?_forward: .*": "without a reduction the total weight is zero",
    r".*attention.*: s is no longer whole": "under a causal mask the work would be uneven",
    r".*attention.*_backward: [et] is no longer whole": "the forward has no such cut",
    r"aten\._scaled_dot_product_(flash|eff|cudnn|fused)\w+: linear in operands \(0, [4-9]\)": "references ignore them",
    r"aten\._scaled_dot_product_(flash|eff|cudnn|fused)\w+: result [2-8] ": "counters, which are zero",
    r"transformers\.grouped_mm_fallback_backward: linear in operands \(0, 1\)": "each gradient has one of the two",
    r"aten\._scaled_mm: linear in operands \([23],\)": "scales are of maxima, which are no sums",
    r"autopar\.linalg_solve: result 3 is a sum": "without errors it is zero",
    r"autopar\.nll: ": "the loss of an element is never negative, and linear in x and lse together",
    r"autopar\.batch_norm\w*: linear": "linear in the scale, and in the shift",
}


def changed_spaces(case: Sample) -> list[set[object]]:
    return [{(s.inputs, s.outputs) for s in strategies(case.node, case.metas, mesh)} for mesh in MUTATION_MESHES]


MUTATION_MESHES = (Mesh((2,)), Mesh((3,)))


def survivors(case: Sample, kind: str) -> Iterator[str]:
    """Mutations that give more strategies, all of which pass the check."""
    known = changed_spaces(case)
    for what, rule in mutants(case):
        if kind in UNCHECKED and not re.search(r"is not a sum|a maximum|linear in operands \(0,\)", what):
            continue
        with in_place(rule):
            try:
                if all(new <= old for new, old in zip(changed_spaces(case), known, strict=True)):
                    continue
                check(case, MUTATION_MESHES)
            except (RuleError, WrongRule):
                continue
        yield f"{rule.op}: {what}"


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "attention")) for k in KINDS if k != "creation"]
)
def test_a_false_neighbour_of_a_rule_is_caught(kind: str) -> None:
    cases = [case for case in KINDS[kind]() if all(t.numel() for t in case.operands)]
    alive = {what for case in cases for what in survivors(case, kind)}
    assert {what for what in alive if not any(re.match(known, what) for known in TRUE)} == set()
