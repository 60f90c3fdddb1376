"""Every Triton kernel on triton's interpreter: all dtypes, odd shapes, forward and backward, against references."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from autopar import kernels, spmd  # noqa: E402
from autopar.kernels import KERNELS  # noqa: E402
from autopar.kernels.tuning import Tuning  # noqa: E402
from autopar.mesh import Mesh  # noqa: E402
from autopar.spmd import local_ranks  # noqa: E402
from tests.kernel_checks import (  # noqa: E402
    FLOATS,
    INDICES,
    assert_near,
    check_cross_entropy,
    check_lookup,
    check_norm,
    check_packing,
)

ROOT = Path(__file__).parents[2]
WHOLE_NUMBERS = [torch.int64, torch.int32, torch.int16, torch.uint8]
ALIKE = (torch.float16, torch.int32, torch.int16)
"""Elements of as many bytes as another kind's, which copies take for the same."""


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported before TRITON_INTERPRET was set")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=[pytest.mark.slow] * (len(shape) == 4 and dtype in ALIKE))
        for shape in [(1,), (7,), (5, 3), (3, 1, 5), (2, 3, 4, 5)]
        for dtype in [*FLOATS, *WHOLE_NUMBERS]
    ],
    ids=str,
)
def test_packing_is_stacking_of_padded_chunks_and_unpacking_undoes_it(dtype, shape) -> None:
    x = torch.randint(0, 100, shape).to(dtype)
    for dim in range(len(shape)):
        for ways in (2, 3):
            check_packing(x, dim, ways)


def test_packing_transposes_and_converts_in_the_same_pass() -> None:
    x = torch.randn(6, 5, 4, 3).permute(2, 0, 3, 1)
    for dim in range(4):
        check_packing(x, dim, 2, torch.bfloat16)
        check_packing(x.to(torch.float16), dim, 4, torch.float32)
    check_packing(torch.randn(2, 2, 3, 2, 2, 3, 2)[:, :, ::2].transpose(1, 5), 5, 2)  # more dims than the kernel walks
    check_packing(torch.randn(40, 70).T, 0, 3)  # several tiles


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_cut_vocabulary_gives_its_rows_and_their_gradient(dtype, index) -> None:
    check_lookup(dtype, index, (3, 7), rows=11, d=33, offset=5, device="cpu")
    check_lookup(dtype, index, (1,), rows=1, d=1, offset=0, device="cpu")
    check_lookup(dtype, index, (2, 1, 9), rows=6, d=600, offset=3, device="cpu")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_cross_entropy_over_shards_is_that_of_the_whole(dtype, index) -> None:
    check_cross_entropy(dtype, index, rows=5, v=37, ways=2, device="cpu")
    check_cross_entropy(dtype, index, rows=1, v=1, ways=1, device="cpu")
    check_cross_entropy(dtype, index, rows=2, v=9001, ways=2, device="cpu")  # more than a block


def test_cross_entropy_of_large_logits_overflows_nowhere() -> None:
    check_cross_entropy(torch.float32, torch.int64, rows=6, v=50, ways=3, device="cpu", large=100.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_a_norm_behind_a_residual_forward_and_backward(dtype, centred) -> None:
    check_norm(dtype, (3, 5, 37), "cpu", centred=centred, scaled=True, shifted=centred)
    check_norm(dtype, (1, 1), "cpu", centred=centred, scaled=False, shifted=False)
    check_norm(dtype, (4, 16), "cpu", centred=centred, scaled=True, shifted=centred, wire=torch.float32)


def test_no_rows_and_no_columns() -> None:
    assert KERNELS["lookup"].launch(torch.ones(3, 4), torch.ones(0, dtype=torch.int64), offset=0).shape == (0, 4)
    assert KERNELS["pack"].launch(torch.ones(0, 4), 1, 2).shape == (2, 0, 2)
    m, s = KERNELS["statistics"].launch(torch.ones(0, 5))
    assert m.shape == s.shape == (0,)
    options = {"eps": 1e-5, "centred": True, "results": ["out", "mean"]}
    out, mean = KERNELS["add_norm"].launch(torch.ones(0, 4), None, None, None, **options)
    assert (out.shape, mean.shape) == ((0, 4), (0, 1))
    given = torch.ones(0, 4), torch.ones(0, 4), None, torch.ones(0, 1), None, None
    (found,) = KERNELS["norm_backward"].launch(*given, results=["weight_gradient"])
    assert torch.equal(found, torch.zeros(4))


@pytest.mark.parametrize("name", KERNELS)
def test_every_configuration_gives_the_same(name) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 40, generator=generator)
    index = torch.tensor([3, 0, 3, 9, 1])
    lse, target = torch.logsumexp(x, -1), torch.tensor([3, -100, 39, 0, 7])
    rstd, loss = torch.rand(5, 1, generator=generator), {"ignore_index": -100, "offset": 0}
    args, kwargs = {
        "pack": ((x, 1, 3), {}),
        "unpack": ((x.view(5, 8, 5), 0, 38), {}),
        "lookup": ((x, index), {"offset": 0}),
        "lookup_backward": ((x, index), {"rows": 8, "offset": 1}),
        "statistics": ((x,), {}),
        "sumexp": ((x, x.amax(-1)), {}),
        "nll": ((x, lse, target), loss),
        "nll_backward": ((lse, x, lse, target), loss),
        "add_norm": ((x, x, x[0], x[1]), {"eps": 1e-5, "centred": True, "results": ["total", "out"]}),
        "norm_backward": ((x, x, rstd, rstd, x[0], x), {"results": ["input_gradient", "weight_gradient"]}),
    }[name]
    results = []
    for config in KERNELS[name].configs:
        found = KERNELS[name].launch(*args, **kwargs, **config)
        results.append([found] if isinstance(found, torch.Tensor) else found)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_the_benchmark_compares_computes_the_same() -> None:
    spec = importlib.util.spec_from_file_location("kernels_benchmark", ROOT / "benchmarks" / "kernels.py")
    benchmark = sys.modules["kernels_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    *cases, last = benchmark.cases(16, 256, 64, "cpu")
    assert last.name.startswith("gradient of a layer norm")  # whose op takes other dtypes on a CPU
    for case in cases:
        ours, eager = case.ours(), case.eager(*case.args)
        assert case.nbytes > 0
        for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (ours, eager)), strict=False):
            assert_near(a, b, times=4)


def test_the_benchmark_says_what_it_lacks() -> None:
    done = subprocess.run([sys.executable, "benchmarks/kernels.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.cuda.is_available() or "needs a GPU" in done.stdout


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "every"])
def test_every_kernel_compiles_for_a_gpu(every, tmp_path) -> None:
    """Down to a cubin by the compiler, which needs no GPU: what the interpreter lets through, it may refuse."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernel_compilation", *([] if every else ["--quick"])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


# Where they run.


def test_on_a_cpu_nothing_is_launched_unless_forced() -> None:
    x = torch.ones(2, 3)
    assert not kernels.enabled(x)
    with kernels.forced():
        assert kernels.enabled(x)
        assert not kernels.enabled(x.double())
        assert not kernels.enabled(x.long())
        assert kernels.enabled(x.long(), integers=True)
    assert not kernels.enabled(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
def test_collectives_pack_the_same_by_kernels(dtype) -> None:
    ranks = local_ranks(Mesh((3,)))
    shards = [torch.randint(0, 2, (4, 7, 5)).to(dtype).transpose(0, 1) for _ in ranks]
    calls = [
        (spmd.all_gather, {"dim": 1, "axis": 0, "length": 11}),
        (spmd.all_to_all, {"gather_dim": 2, "scatter_dim": 0, "axis": 0, "length": 14}),
        (spmd.reduce_scatter, {"dim": 1, "axis": 0}),
    ]

    def results():
        found = []
        for function, kwargs in calls:
            cut = {"dim": (1, (4, 4, 3)), "gather_dim": (2, (5, 5, 4))}
            dim, lengths = next(v for k, v in cut.items() if k in kwargs) if "length" in kwargs else (1, (4, 4, 4))
            mine = [s.narrow(dim, 0, n) for s, n in zip(shards, lengths, strict=True)]
            pending = spmd.simulate(function, ranks, [((x,), kwargs) for x in mine])
            found += [spmd.wait(p) for p in pending]
        return found

    plain = results()
    with kernels.forced():
        fused = results()
    for a, b in zip(plain, fused, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# Source and tuning.


@pytest.mark.parametrize("name", KERNELS)
def test_source_runs_by_itself(name, tmp_path) -> None:
    """Without autopar: nothing but torch and triton is imported."""
    text = kernels.source(name)
    assert "autopar" not in text.split('"""', 2)[2]
    path = tmp_path / "kernel.py"
    path.write_text(text)
    compile(text, str(path), "exec")
    names = {n for n in KERNELS if f"def {n}(" in text}
    assert names == {name}


def test_a_kernel_copied_out_computes(tmp_path) -> None:
    text = kernels.source("lookup") + (
        "\nprint(lookup(torch.arange(12.0).view(3, 4), torch.tensor([5, 6, 9]), offset=5).tolist())\n"
    )
    path = tmp_path / "lookup.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [0.0] * 4]


def test_the_fastest_configuration_is_kept_on_disk(tmp_path) -> None:
    kernel, asked = KERNELS["lookup"], []

    def measure(config):
        asked.append(config)
        return 1.0 if config != kernel.configs[3] else 0.5

    assert Tuning("Some GPU", tmp_path).best(kernel, "2^4x8", measure) == kernel.configs[3]
    assert len(asked) == len(kernel.configs)
    again = Tuning("Some GPU", tmp_path)
    assert again.best(kernel, "2^4x8", measure) == kernel.configs[3]
    assert again.best(kernel, "2^4x8", None) == kernel.configs[3]
    assert again.best(kernel, "2^9x8", None) == kernel.configs[0]
    assert len(asked) == len(kernel.configs), "what is on disk is not measured again"
    Tuning("Other GPU", tmp_path).best(kernel, "2^4x8", measure)
    assert len(asked) == 2 * len(kernel.configs)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "0"}', '{"version": 1, "configs": 3}', "\0\0", "null"])
def test_a_file_that_is_damaged_or_old_counts_as_empty(text, tmp_path) -> None:
    tuning = Tuning("Some GPU", tmp_path)
    tuning.path.write_text(text)
    kernel = KERNELS["nll"]
    assert tuning.best(kernel, "2^4x8", lambda config: config["BLOCK"]) == {"BLOCK": 128}
    assert Tuning("Some GPU", tmp_path).best(kernel, "2^4x8", None) == {"BLOCK": 128}


def test_a_number_that_is_none_counts_as_empty(tmp_path) -> None:
    tuning, kernel = Tuning("Some GPU", tmp_path), KERNELS["nll"]
    tuning.best(kernel, "2^4x8", lambda config: config["BLOCK"])
    tuning.path.write_text(tuning.path.read_text().replace("128", "1e999"))
    assert Tuning("Some GPU", tmp_path).best(kernel, "2^4x8", lambda config: config["BLOCK"]) == {"BLOCK": 128}


def test_a_configuration_that_does_not_exist_any_more_is_measured_again(tmp_path) -> None:
    tuning, kernel = Tuning("Some GPU", tmp_path), KERNELS["nll"]
    tuning.best(kernel, "2^4x8", lambda config: config["BLOCK"])
    tuning.path.write_text(tuning.path.read_text().replace("128", "127"))
    assert Tuning("Some GPU", tmp_path).best(kernel, "2^4x8", lambda config: -config["BLOCK"]) == {"BLOCK": 512}


def test_processes_that_tune_at_once_agree(tmp_path) -> None:
    """Four ranks meet the same two kernels, each of them another configuration's friend: one measures for all."""
    script = """
import sys, time
from pathlib import Path
from autopar.kernels import KERNELS
from autopar.kernels.tuning import Tuning
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"here{rank}").touch()
while len(list(folder.glob("here*"))) < 4:
    time.sleep(0.01)
tuning = Tuning("Some GPU", folder)
for name in ("nll", "lookup"):
    def measure(config):
        time.sleep(0.01)
        with (folder / "measured").open("a") as file:
            file.write(f"{name}{rank} ")
        return KERNELS[name].configs.index(config) != rank % 3
    print(sorted(tuning.best(KERNELS[name], "2^4x8", measure).items()))
"""
    commands = [[sys.executable, "-c", script, str(tmp_path), str(rank)] for rank in range(4)]
    running = [subprocess.Popen(c, cwd=ROOT, stdout=subprocess.PIPE, text=True) for c in commands]
    results = {process.communicate(timeout=100)[0] for process in running}
    assert [p.returncode for p in running] == [0] * 4
    assert len(results) == 1, results
    measured = (tmp_path / "measured").read_text().split()
    assert len(measured) == len(KERNELS["nll"].configs) + len(KERNELS["lookup"].configs)
    assert len(set(measured)) == 2


def test_a_process_waits_for_its_device_before_it_is_its_turn_to_measure(tmp_path) -> None:
    """Else it would measure behind a collective that a process launches which waits for its own turn."""
    one, other, kernel = Tuning("Some GPU", tmp_path), Tuning("Some GPU", tmp_path), KERNELS["nll"]
    turn: list[object] = []

    def settle() -> None:  # what the device was given ends when the other process has had its turn
        turn.append(other.best(kernel, "2^9x8", lambda config: -config["BLOCK"]))

    assert one.best(kernel, "2^4x8", lambda config: config["BLOCK"], settle) == {"BLOCK": 128}
    assert turn == [{"BLOCK": 512}]
    assert Tuning("Some GPU", tmp_path).best(kernel, "2^9x8", None) == {"BLOCK": 512}
    one.best(kernel, "2^4x8", None, settle)
    one.best(kernel, "2^4x8", lambda config: 1.0, settle)
    assert len(turn) == 1, "what is known waits for nothing"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert Tuning("Some GPU", tmp_path / "file").best(KERNELS["nll"], "1", lambda config: 1.0) == {"BLOCK": 256}
