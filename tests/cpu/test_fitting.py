"""What is under way gives way to a memory budget."""

from __future__ import annotations

import torch

from autopar import passes, planner
from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.memory.exact import profile
from autopar.planner.pricing.prices import Prices
from autopar.planner.schedule.timeline import simulate_streams
from autopar.planner.search.fitting import fitted
from autopar.runtime.simulation import simulate_program
from tests.cpu.model_checks import assert_equals_one_device, cluster_where_sharding_pays, subject


def test_collectives_are_waited_for_sooner_where_memory_is_full() -> None:
    """What they send is gone then, as the simulation measures; the same is computed, in hardly more time."""
    of, mesh = subject("mlp", torch.float32), Mesh((2, 2))
    cluster = cluster_where_sharding_pays().sized(4)
    graph, less = of.capture.graph, 0
    for seed in range(3):
        options = Options(search=f"random:{seed}", optimizer=0.0)
        program = planner.plan_graph(graph, mesh, cluster, options, compare=False).program
        memory, prices = profile(program, graph, mesh, options), Prices(mesh, cluster)
        assert fitted(program, memory, graph, prices, options, memory.peak_bytes) == (program, memory)
        found, now = fitted(program, memory, graph, prices, options, memory.peak_bytes // 2)
        assert now.peak_bytes <= memory.peak_bytes
        assert [op for op in found.ops if op.kind != "wait"] == [op for op in program.ops if op.kind != "wait"]
        assert simulate_streams(found, 1.0).seconds < 1.01 * simulate_streams(program, 1.0).seconds
        less += now.peak_bytes < memory.peak_bytes
        lowered = passes.compose(passes.lower(found, graph, mesh), graph)
        outputs, rest = simulate_program(lowered, graph, mesh, of.named(), 0)
        assert rest.peak_memory <= now.peak_bytes
        assert_equals_one_device(of, rest.__class__(**{**vars(rest), "outputs": outputs}), torch.float32)
    assert less
