"""What holds for every op: torch's own checks, fakes that equal the real results, backward ops in the joint graph."""

import importlib
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

import autopar.ops
from autopar._torch import FakeTensorMode, joint_graph
from autopar.errors import AutoparError
from tests.cpu import op_cases_cut

OPS = torch.ops.autopar
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SEED = torch.tensor(7)


def _channels_last(*shape, dtype):
    """Contiguous in another order of dims, as the results must not be."""
    return torch.randn(shape[0], *shape[2:], shape[1], dtype=dtype).movedim(-1, 1)


def _attention(dtype, p=0.0, mask=None, s=5, d_v=8, is_causal=False):
    q = torch.randn(2, s, 4, 8, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(2, 2, 7, 8, dtype=dtype), torch.randn(2, 7, 2, d_v, dtype=dtype).transpose(1, 2)
    options = dict(is_causal=is_causal, scale=0.3, dropout_p=p, site=1, global_shape=[4, 4, s, 7], offset=[2, 0, 0, 0])
    return (q, k, v, mask, SEED if p else None), options


def _cases(dtype):
    """Name of an op, positional arguments, keyword arguments; differentiable operands first."""
    x = torch.randn(3, 5, 10, dtype=dtype)
    target = torch.tensor([1, -100, 9, 0, 4] * 3).view(3, 5)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    mean, rstd = torch.randn(4, dtype=statistics), torch.rand(4, dtype=statistics) + 0.5
    image, weight, bias = _channels_last(2, 4, 3, 3, dtype=dtype), torch.randn(4), torch.randn(4)
    index = torch.tensor([[1, 2, 9], [0, 4, 2]])
    attention, options = _attention(dtype)
    out, lse = OPS.attention(*attention, **options)
    shard = dict(global_shape=[5, 5, 20], offset=[1, 0, 5])
    shares = torch.rand(3, 5, dtype=statistics), torch.rand(10, dtype=statistics)
    return [
        ("contract", (torch.randn(2, 3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype), "bsk,nk->bsn"), {}),
        ("contract", (torch.randn(2, 3, 4, dtype=dtype), torch.randn(2, 3, 5, dtype=dtype), "bsk,bsn->nk"), {}),
        ("contract", (torch.randn(2, 3, 4, dtype=dtype), torch.randn(2, 5, 4, dtype=dtype), "bsk,btk->tbs"), {}),
        ("contract", (torch.randn(2, 3, dtype=dtype).t(), torch.randn(2, dtype=dtype), "ab,b->ba"), {}),
        ("attention", *_attention(dtype)),
        ("attention", *_attention(dtype, p=0.4)),
        ("attention", *_attention(dtype, mask=torch.rand(2, 1, 5, 7) < 0.8, is_causal=True)),
        ("attention", *_attention(dtype, mask=torch.randn(7), d_v=6)),
        ("attention", *_attention(dtype, s=0)),
        (
            "attention_backward",
            (torch.randn_like(out), *attention[:4], out, lse, attention[4]),
            options,
        ),
        ("dropout", (x.transpose(0, 1), SEED), dict(p=0.3, site=2, global_shape=[5, 3, 10], offset=[0, 0, 0])),
        ("dropout", (x, SEED), dict(p=0.0, site=2, **shard)),
        ("uniform", (SEED,), dict(site=2, shape=[3, 5, 10], dtype=dtype, **shard)),
        ("lookup", (torch.randn(10, 4, dtype=dtype), index), dict(offset=0, padding_idx=2)),
        ("lookup", (torch.randn(4, 10, dtype=dtype).t()[:3], index.t()), dict(offset=2)),
        ("lookup_backward", (torch.randn(2, 3, 4, dtype=dtype), index), dict(rows=5, offset=1, padding_idx=4)),
        ("sumexp", (x, x.amax(-1)), {}),
        ("sumexp", (x.transpose(0, 1), x.amax(-1).t()), {}),
        ("nll", (x, x.logsumexp(-1).to(statistics), target), dict(ignore_index=-100, offset=0)),
        ("nll", (x.transpose(0, 1), x.logsumexp(-1).to(statistics).t(), target.t()), dict(ignore_index=4, offset=3)),
        ("nll", (x, x.logsumexp(-1).to(statistics), target), dict(ignore_index=4, offset=3, own=0.9, each=0.01)),
        ("nll", (x, x.logsumexp(-1).to(statistics), target, *shares), dict(ignore_index=4, offset=3)),
        (
            "nll_backward",
            (torch.randn(3, 5, dtype=statistics), x, x.logsumexp(-1).to(statistics), target, *shares),
            dict(ignore_index=-100, offset=0),
        ),
        (
            "nll_backward",
            (torch.randn(3, 5, dtype=statistics), x, x.logsumexp(-1).to(statistics), target),
            dict(ignore_index=-100, offset=0, own=0.9, each=0.01),
        ),
        ("softmax_statistics", (x.transpose(0, 1),), {}),
        ("rescaled", (mean.t(), torch.randn(4, dtype=dtype), torch.randn(4, dtype=dtype)), {}),
        *_norm_cases(dtype, statistics),
        ("batch_moments", (image,), {}),
        ("batch_var_mean", (image,), {}),
        ("batch_norm", (image, weight, bias, mean, rstd), dict(count=18)),
        ("batch_norm", (image, None, None, mean, rstd), dict(count=18)),
        ("batch_norm_backward_reduce", (image, torch.randn_like(image), mean, rstd), {}),
        ("batch_norm_backward_input", (image, image, weight, mean, rstd, mean, rstd), dict(count=18)),
        (
            "ctc",
            (torch.randn(9, 2, 5, dtype=dtype).log_softmax(-1), LABELS, torch.tensor([9, 8]), torch.tensor([3, 2])),
            dict(blank=0, zero_infinity=True),
        ),
        *_linear_nll_cases(dtype, statistics),
        *_matrix_cases(),
        ("checked_length", (x.transpose(0, 1), torch.tensor(5)), dict(steps=5, exact=True)),
        ("checked_length", (x, torch.tensor(4)), dict(steps=5, exact=False)),
        *_halo_cases(dtype),
        *op_cases_cut.cases(dtype),
    ]


def _linear_nll_cases(dtype, statistics):
    """Rows of any strides over 9 classes, of which the last are another rank's."""
    x, weight, bias = torch.randn(3, 5, 4, dtype=dtype), torch.randn(9, 4, dtype=dtype), torch.randn(9, dtype=dtype)
    target = torch.tensor([[1, -100, 8, 0, 4]] * 3)
    lse = (x @ weight.t()).logsumexp(-1).to(statistics)
    grad, turned = torch.randn(3, 5, dtype=statistics), (x.transpose(0, 1), weight.t().contiguous().t(), None)
    shares = torch.rand(3, 5, dtype=statistics), torch.rand(9, dtype=statistics)
    some, every = dict(ignore_index=-100), dict(ignore_index=-100, offset=2, mask=[True] * 3)
    return [
        ("linear_nll", (x, weight, bias, target), some),
        ("linear_nll", (*turned, target.t()), some),
        ("linear_nll", (x, weight, bias, target), dict(own=0.9, each=0.01, **some)),
        ("linear_nll", (x, weight, bias, target, *shares), some),
        ("linear_nll_part", (x, weight, bias, target), dict(offset=3, **some)),
        ("linear_nll_part", (x, weight, None, target, *shares), dict(offset=3, **some)),
        ("linear_nll_backward", (grad, x, weight, bias, lse, target, *shares), every),
        ("linear_nll_backward", (grad, x, weight, bias, lse, target), dict(own=0.9, each=0.01, **every)),
        ("linear_nll_of_parts", (torch.randn(2, 2, 3, 5, dtype=statistics), target), some),
        ("linear_nll_backward", (grad, x, weight, bias, lse, target), every),
        ("linear_nll_backward", (grad.t(), *turned, lse.t(), target.t()), {**every, "mask": [True, False, False]}),
    ]


def _matrix_cases():
    """In float64, as half precision has no factors."""
    a, b = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    return [
        *((name, (a,), dict(contiguous=c)) for name in ("linalg_det", "linalg_slogdet") for c in (True, False)),
        *(("linalg_solve", (a, b), dict(left=True, contiguous=c)) for c in (True, False)),
    ]


def _norm_cases(dtype, statistics):
    """A norm behind a residual, of rows of any strides, with every result."""
    x, residual = torch.randn(3, 5, 10, dtype=dtype).transpose(0, 1), torch.randn(5, 3, 10, dtype=dtype)
    weight, bias = torch.randn(10, dtype=dtype), torch.randn(10, dtype=dtype)
    rows = torch.rand(5, 3, 1, dtype=statistics)
    results = ["total", "out", "mean", "rstd", "wide", "hat"]
    gradients = ["input_gradient", "weight_gradient", "bias_gradient"]
    return [
        ("add_norm", (x, residual, weight, bias), dict(eps=1e-5, centred=True, results=results)),
        ("add_norm", (x, None, None, None), dict(eps=1e-5, centred=False, results=["out", "rstd"])),
        ("norm_backward", (x, residual, rows, rows, weight, residual), dict(results=gradients)),
        ("norm_backward", (x, residual, None, rows, None, None), dict(results=gradients[:1])),
    ]


def _halo_cases(dtype):
    """Rows 2 and 3 of an image of 6 rows, with what came of the neighbours."""
    kernel, small = torch.randn(3, 4, 3, 3, dtype=dtype), torch.randn(4, 3, 3, 2, dtype=dtype)
    grad, rows = torch.randn(2, 3, 4, 5, dtype=dtype), torch.randn(2, 4, 4, 5, dtype=dtype)
    convolved = dict(stride=[1, 1], padding=[0, 1], dilation=[1, 1], groups=1, dims=[2], first=[2], size=[2])
    made = dict(made_first=[1], made_size=[2])
    back = dict(stride=[2, 1], padding=[0, 1], dilation=[1, 1], output_padding=[0, 0], groups=1, dims=[2])
    pool = dict(kernel=[2, 2], stride=[2, 2], padding=[0, 0])
    cubes, counted = dict(kernel=[2] * 3, stride=[2] * 3, padding=[0] * 3), dict(pads=[1], starts=[0], whole=[6])
    pooled, image = torch.randn(2, 4, 2, 3, dtype=dtype), torch.randn(2, 4, 4, 6, dtype=dtype)
    wide = torch.randn(2, 3, 9, 4, dtype=dtype)
    volume = torch.randn(2, 4, 4, 4, dtype=dtype)
    index = torch.randint(0, 36, pooled.shape)
    resized = dict(n=[4, 6], out=[6, 9], scales=[0.0, 1.5])
    cube = dict(kind="linear", align=False, n=[4] * 3, out=[3] * 3, scales=[0.0] * 3)
    return [
        ("interpolate", (volume.unsqueeze(0),), cube),
        ("interpolate_backward", (image,), dict(kind="cubic", align=True, n=[5, 5], out=[4, 6], scales=[0.0] * 2)),
        *(
            (name, (image,), dict(kind=kind, align=align, **resized, **rows))
            for kind, align in (("nearest", False), ("nearest_exact", False), ("linear", True), ("cubic", False))
            for name, rows in (
                ("interpolate", {}),
                ("interpolate_part", dict(start=[0, 0], first=[2, 0], size=[3, 9])),
                ("interpolate_part_backward", dict(start=[1, 0], first=[2, 0], size=[2, 6])),
            )
        ),
        ("convolution_part_backward", (grad, rows, kernel), dict(bias_sizes=[3], mask=[True] * 3, **convolved, **made)),
        (
            "convolution_part_backward",
            (grad, rows, kernel),
            dict(bias_sizes=None, mask=[True, False, False], **convolved, **made),
        ),
        ("convolution_transposed_part", (rows, small, torch.randn(3, dtype=dtype)), dict(first=[1], size=[6], **back)),
        (
            "convolution_transposed_part_backward",
            (wide, torch.randn(2, 4, 3, 5, dtype=dtype), small),
            dict(bias_sizes=[3], mask=[True] * 3, first=[1], size=[7], **back, **made),
        ),
        ("max_pool_part", (image,), dict(dilation=[1, 1], ceil=False, starts=[1, 0], whole=[6, 6], **pool)),
        (
            "max_pool_part",
            (volume,),
            dict(
                kernel=[2] * 3,
                stride=[1] * 3,
                padding=[0] * 3,
                dilation=[1] * 3,
                ceil=True,
                starts=[1, 0, 2],
                whole=[6] * 3,
            ),
        ),
        ("max_pool_part_backward", (pooled, image, index), dict(starts=[1, 0], whole=[6, 6])),
        ("avg_pool_part", (image,), dict(ceil=False, include=False, dims=[2], **counted, **pool)),
        ("avg_pool_part", (volume.double(),), dict(ceil=True, include=True, dims=[1], **counted, **cubes)),
        *(
            (
                "avg_pool_part_backward",
                (pooled, image),
                dict(ceil=False, divisor=None, dims=[2], first=[0], **o, **pool),
            )
            for o in (dict(include=True, pads=[], starts=[], whole=[]), dict(include=False, **counted))
        ),
    ]


LABELS = torch.tensor([[1, 2, 4], [3, 3, 0]])
GRADIENT = {
    "contract": (0, 1),
    "attention": (0, 1, 2),
    "dropout": (0,),
    "lookup": (0,),
    "nll": (0,),
    "batch_norm": (0, 1, 2),
    "ctc": (0,),
    "interpolate": (0,),
    "experts_mm": (0, 1),
    "linear_nll": (0, 1, 2),
}
NAMES = [name for name, _, _ in _cases(torch.float64)]
IDS = [f"{name}-{number}" for number, name in enumerate(NAMES)]


def _requiring_gradient(name, args):
    differentiable = GRADIENT.get(name, ())
    return tuple(
        a.detach().requires_grad_() if position in differentiable and a is not None else a
        for position, a in enumerate(args)
    )


def _strides(result):
    results = result if isinstance(result, tuple | list) else [result]
    return [(tuple(r.shape), r.stride(), r.dtype) for r in results]


def test_registering_twice_is_harmless():
    importlib.reload(autopar.ops)
    assert OPS.dropout(torch.ones(1), SEED, p=0.0, site=0, global_shape=[1], offset=[0]) == 1


def test_importing_the_ops_leaves_the_global_generator_alone():
    code = "import torch; a = torch.get_rng_state(); import autopar.ops; assert (torch.get_rng_state() == a).all()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OF_COMPILED_PROGRAMS = {"offload", "offloaded", "fetch", "fetched"}
"""Transfers, registered when a program is compiled: what they give is not a function of their operands alone."""


def test_every_op_has_a_case_here():
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("autopar::")
    }
    assert registered - OF_COMPILED_PROGRAMS == set(NAMES)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, id=IDS[n], marks=pytest.mark.slow if name in NAMES[:n] else ()) for n, name in enumerate(NAMES)],
)
def test_torchs_checks_pass(number):
    """Schema, autograd registration, fake results, and the whole path through AOTAutograd with dynamic shapes."""
    name, args, options = _cases(torch.float64)[number]
    outcome = torch.library.opcheck(getattr(OPS, name).default, _requiring_gradient(name, args), options)
    assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(NAMES)), ids=IDS)
def test_fake_results_have_the_shapes_strides_and_dtypes_of_real_ones(number, dtype):
    name, args, options = _cases(dtype)[number]
    real = getattr(OPS, name)(*args, **options)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
        fake = getattr(OPS, name)(*fakes, **options)
    assert _strides(fake) == _strides(real)
    made = real if isinstance(real, tuple | list) else [real]
    if name.startswith("attention"):
        made = [x.transpose(1, 2) if x.dim() == 4 else x for x in made]
    assert all(torch.empty(shape).stride() == stride for shape, stride, _ in _strides(made))


@pytest.mark.parametrize("number", range(len(NAMES)), ids=IDS)
def test_operands_are_left_as_they_were(number):
    name, given, options = _cases(torch.float64)[number]
    args = tree_leaves(given)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    results = getattr(OPS, name)(*given, **options)
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    storages = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)} - {0}
    results = tree_leaves(results)
    assert not any(r.untyped_storage().data_ptr() in storages for r in results)


@pytest.mark.parametrize(
    ("name", "backward_ops"),
    [
        ("contract", ["contract", "contract"]),
        ("attention", ["attention_backward"]),
        ("dropout", ["dropout"]),
        ("lookup", ["lookup_backward"]),
        ("nll", ["nll_backward"]),
        ("batch_norm", ["batch_norm_backward_reduce", "batch_norm_backward_input"]),
        ("experts_mm", ["experts_mm", "experts_mm_weight"]),
        ("linear_nll", ["linear_nll_backward"]),
    ],
)
def test_a_joint_graph_shows_the_ops_of_forward_and_backward(name, backward_ops):
    _, args, options = next(case for case in _cases(torch.float64) if case[0] == name)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    positions = [p for p, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def joint(*tensors):
        filled = list(args)
        for position, tensor in zip(positions, tensors, strict=True):
            filled[position] = tensor
        filled = _requiring_gradient(name, filled)
        result = getattr(OPS, name)(*filled, **options)
        result = result[0] if isinstance(result, tuple) else result
        return torch.autograd.grad(result, [filled[p] for p in GRADIENT[name]], torch.ones_like(result))

    graph = make_fx(joint, tracing_mode="fake")(*tensors).graph
    found = [str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("autopar.")]
    assert found == [name, *backward_ops]


@pytest.mark.parametrize("name", ["sumexp", "batch_moments", "batch_var_mean"])
def test_statistics_are_constants_to_autograd(name):
    _, (x, *rest), _ = next(case for case in _cases(torch.float64) if case[0] == name)
    found = getattr(OPS, name)(x.requires_grad_(), *rest)
    assert not any(t.requires_grad for t in (found if isinstance(found, tuple) else (found,)))


@pytest.mark.parametrize("number", [n for n, name in enumerate(NAMES) if "backward" in name])
def test_second_derivatives_are_refused(number):
    name, (grad, *args), options = _cases(torch.float64)[number]
    result = getattr(OPS, name)(grad.requires_grad_(), *args, **options)
    with pytest.raises(AutoparError, match="only have first derivatives"):
        (result[0] if isinstance(result, tuple | list) else result).sum().backward()


class _Model(torch.nn.Module):
    """A linear layer, dropout, attention and a loss in the ops, as a rewritten capture has them."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(11, 16))
        self.qkv = torch.nn.Parameter(torch.randn(48, 16))

    def forward(self, index, seed):
        x = OPS.lookup(self.table, index, offset=0)
        x = OPS.dropout(x, seed, p=0.2, site=0, global_shape=list(x.shape), offset=[0, 0, 0])
        b, s, _ = x.shape
        q, k, v = OPS.contract(x, self.qkv, "bsk,nk->bsn").view(b, s, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y, _ = OPS.attention(
            q,
            k,
            v,
            None,
            seed,
            is_causal=True,
            scale=0.3,
            dropout_p=0.1,
            site=1,
            global_shape=[b, 2, s, s],
            offset=[0, 0, 0, 0],
        )
        logits = OPS.contract(y.transpose(1, 2).reshape(b, s, 16), self.table, "bsk,nk->bsn")
        m = logits.detach().amax(-1)
        return OPS.nll(logits, m + OPS.sumexp(logits, m).log(), index, ignore_index=-100, offset=0).mean()


def test_an_exported_models_joint_graph_computes_the_eager_gradients():
    model, args = _Model(), (torch.randint(0, 11, (2, 6)), SEED)
    loss = model(*args)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    exported = torch.export.export(model, args, strict=False).module()
    graph, inputs, outputs = joint_graph(exported, args, {})
    parameters = dict(exported.named_parameters())
    primals = [parameters[i.target] if i.kind == "parameter" else args[i.target] for i in inputs if i.kind != "tangent"]
    values = [value for part in graph(primals, [torch.ones(())]) for value in part]
    results = dict(zip([o and (o.kind, o.target) for o in outputs], values, strict=True))
    torch.testing.assert_close(results["output", 0], loss)
    for (name, _), grad in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(results["gradient", name], grad)
