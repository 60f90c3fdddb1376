"""Laws of arranging collectives, on programs of any shape: what is computed stays, and nothing gets worse."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir import Output, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.overlap.arrange import TriedArrangements, arrange
from autopar.planner.overlap.arrangements import Arrangements
from autopar.planner.overlap.collectives import extract_collectives
from autopar.planner.overlap.shortening import shortened
from autopar.planner.pricing.prices import Prices
from autopar.planner.schedule.timeline import simulate_streams
from autopar.program import Arrangement, LocalTensor, Op, Program
from autopar.sharding import ShardingSpec, Step

MESH = Mesh((2, 2))
PRICES = Prices(MESH, Cluster.load("dgx-h100").sized(4))
WHOLE, CUT, SUMS = (ShardingSpec.parse(s) for s in ("R", "S0", "R P0 P1"))
FORMS = [
    (Step("all_gather", 0, 0), WHOLE),
    (Step("reduce_scatter", 0, 0), ShardingSpec.parse("S0 P1")),
    (Step("all_reduce", 0), ShardingSpec.parse("R P1")),
    (Step("all_reduce", 1), ShardingSpec.parse("R P0")),
    (Step("all_to_all", 1, 0, 0), CUT),
]
"""Steps and the specs of their results; what they are taken from does not matter here."""


def tensor(name, spec, length, dtype="float32"):
    meta = TensorMeta((length,), dtype)
    return LocalTensor(name, meta, spec, math.prod(spec.local_shape((length,), MESH)) * meta.itemsize)


def collective(name, source, form, phase):
    step, after = form
    written = tensor(name, after, source.meta.shape[0], source.meta.dtype)
    size = max(written.bytes, source.bytes)
    costs = PRICES.collectives
    return Op(
        name,
        "redistribute",
        name,
        (source.name,),
        (written,),
        phase,
        step=step,
        wire_bytes=size,
        seconds=costs.seconds(step.kind, size, step.axis),
        launch_s=costs.seconds(step.kind, 0, step.axis),
    )


@st.composite
def programs(draw):
    """Inputs, then computations and collectives of what is there, forward and backward, some in chains."""
    lengths = st.sampled_from([4, 1000, 2**20, 2**24])
    dtypes = st.sampled_from(["float32", "bfloat16"])
    ops = [
        Op(f"p{i}", "input", f"p{i}", (), (tensor(f"p{i}", CUT, draw(lengths), draw(dtypes)),), "forward")
        for i in range(draw(st.integers(1, 4)))
    ]
    turn, count = draw(st.integers(0, 14)), draw(st.integers(1, 24))
    for i in range(count):
        phase = "forward" if i < turn else "backward"
        there = [t for op in ops for t in op.writes]
        if draw(st.booleans()):
            source = draw(st.sampled_from(there))
            ops.append(collective(f"t{i}", source, draw(st.sampled_from(FORMS)), phase))
            continue
        reads = draw(st.lists(st.sampled_from(there), max_size=2, unique_by=lambda t: t.name))
        made = tensor(f"t{i}", draw(st.sampled_from([WHOLE, SUMS])), draw(lengths), draw(dtypes))
        seconds = draw(st.floats(0, 1e-3))
        ops.append(Op(made.name, "compute", made.name, tuple(t.name for t in reads), (made,), phase, seconds=seconds))
    made_last = [op for op in ops if op.kind != "input"][-3:]
    results = tuple((Output(Value(op.node), "output", op.name), op.writes[0].name) for op in made_last)
    return Program(tuple(ops), results)


def held(program: Program) -> MemoryProfile:
    """What is held while each tensor lives from its writer to its last reader."""
    size = [0] * (len(program.ops) + 1)
    for t in program.tensors.values():
        for at in range(program.writer[t.name], program.last_read.get(t.name, program.writer[t.name]) + 1):
            size[at] += t.bytes
    return MemoryProfile(tuple(size), size.index(max(size)), {})


def likes(program):
    """The nodes of each layer and of the next, by the number in their names."""
    parts = {op.node: re.fullmatch(r"(\w)(\d+)(.*)", op.node) for op in program.ops}
    return {name: f"{m[1]}{int(m[2]) + 1}{m[3]}" for name, m in parts.items() if m}


def arranged(program, budget=math.inf, deadline=math.inf):
    tried = TriedArrangements.of(program, likes(program), PRICES, deadline)
    return arrange(tried, held, budget, deadline)


def moved(program):
    """What each collective does to each tensor."""
    return Counter(
        (read, step, written)
        for op in program.collectives
        for read, step, written in zip(op.reads, op.bucket or (op.step,), op.writes, strict=True)
    )


def stays(program):
    return [op for op in program.ops if not op.is_collective and op.kind != "wait"]


def is_valid(program):
    there: set[str] = set()
    for op in program.ops:
        if not there.issuperset(op.reads):
            return False
        there |= {t.name for t in op.writes}
    return all(name in there for _, name in program.results)


ARRANGEMENTS = st.builds(
    Arrangement, st.sampled_from([0, 1000, 2**22, 2**40]), st.sampled_from([0, 1000, 2**22, 2**40]), st.integers(0, 3)
)


@given(programs(), ARRANGEMENTS)
def test_every_arrangement_runs_the_same_ops_on_the_same_tensors(program, arrangement) -> None:
    found = Program(Arrangements(extract_collectives(program), PRICES).ops(arrangement), program.results)
    assert is_valid(found)
    assert stays(found) == stays(program)
    assert moved(found) == moved(program)
    phases = [op.phase for op in found.ops if op.kind != "input"]
    assert phases == sorted(phases, reverse=True)


@given(programs(), ARRANGEMENTS)
def test_a_bucket_holds_what_one_launch_can_carry(program, arrangement) -> None:
    for op in Arrangements(extract_collectives(program), PRICES).ops(arrangement):
        if op.bucket:
            assert {(s.kind, s.axis, s.reduction) for s in op.bucket} == {(op.step.kind, op.step.axis, "sum")}
            assert len({t.meta.dtype for t in op.writes}) == 1
            assert op.wire_bytes == sum(o.wire_bytes for o in program.ops if o.name in {t.name for t in op.writes})
            assert op.launch_s <= op.seconds


@given(programs(), ARRANGEMENTS)
def test_merging_what_is_computed_keeps_the_time(program, arrangement) -> None:
    arrangements = Arrangements(extract_collectives(program), PRICES)
    whole = simulate_streams(Program(arrangements.ops(arrangement), ()), PRICES.overlap).seconds
    assert arrangements.seconds(arrangement) == pytest.approx(whole, rel=1e-9, abs=1e-15)


@given(programs(), st.floats(0, 2))
def test_nothing_is_slower_nor_over_the_budget(program, share) -> None:
    before, peak = simulate_streams(program, PRICES.overlap).seconds, held(program).peak_bytes
    found = arranged(program, share * peak)
    assert found.timeline.seconds <= before
    assert found.timeline.seconds == simulate_streams(found.program, PRICES.overlap).seconds
    assert found.memory.peak_bytes <= max(share, 1) * peak
    assert is_valid(found.program)
    assert moved(found.program) == moved(program)


@given(programs())
def test_the_same_program_is_arranged_the_same_way(program) -> None:
    assert arranged(program) == arranged(program)


@given(programs())
def test_without_time_left_the_program_is_no_worse(program) -> None:
    assert arranged(program, deadline=0.0).timeline.seconds <= simulate_streams(program, PRICES.overlap).seconds


def gradients(count, length, compute_s):
    """A backward whose every op makes a gradient that is reduced."""
    ops: list[Op] = []
    for i in range(count):
        made = tensor(f"g{i}", SUMS, length)
        ops.append(Op(made.name, "compute", made.name, (), (made,), "backward", seconds=compute_s))
        ops.append(collective(f"r{i}", made, FORMS[2], "backward"))
    return Program(tuple(ops), tuple((Output(Value(f"g{i}"), "gradient", str(i)), f"r{i}") for i in range(count)))


def test_small_gradients_are_reduced_together_and_large_ones_while_more_are_computed() -> None:
    small = arranged(gradients(8, 100, 1e-6)).program
    assert [len(op.writes) for op in small.collectives] == [8]
    large = arranged(gradients(8, 2**27, 5e-3)).program
    assert [len(op.writes) for op in large.collectives] == [1] * 8


def weights(count, length, compute_s):
    """A forward that gathers every weight just before it is read."""
    ops = [Op(f"p{i}", "input", f"p{i}", (), (tensor(f"p{i}", CUT, length),), "forward") for i in range(count)]
    inputs = list(ops)
    for i, op in enumerate(inputs):
        ops.append(collective(f"w{i}", op.writes[0], FORMS[0], "forward"))
        made = tensor(f"y{i}", WHOLE, 8)
        ops.append(Op(made.name, "compute", made.name, (f"w{i}",), (made,), "forward", seconds=compute_s))
    return Program(tuple(ops), ())


def test_large_weights_are_gathered_ahead_of_need_where_memory_allows() -> None:
    program = weights(6, 2**26, 4e-4)
    ahead = arranged(program)
    assert ahead.program.arrangement.prefetch > 0
    assert ahead.timeline.seconds < 0.7 * simulate_streams(program, PRICES.overlap).seconds


def test_where_memory_is_full_gathers_wait_and_elsewhere_they_do_not() -> None:
    program = weights(6, 2**26, 4e-4)  # what is held falls from the first reader on
    full = arranged(program, 0.0)
    assert full.memory.peak_bytes == held(program).peak_bytes
    slots = [op.name for op in full.program.ops if op.kind != "input"]
    assert slots[:3] == ["w0", "y0", "w1"]
    assert slots.index("w3") < slots.index("y2")
    ahead_s, before_s = arranged(program).timeline.seconds, simulate_streams(program, PRICES.overlap).seconds
    assert ahead_s < full.timeline.seconds < 0.75 * before_s


def test_small_weights_are_gathered_together() -> None:
    assert [len(op.writes) for op in arranged(weights(6, 64, 1e-6)).program.collectives] == [6]


def deep(layers, length, compute_s):
    """Layers that gather two weights in both phases, and reduce a gradient of each in the backward."""
    ops = [Op(f"p{i}", "input", f"p{i}", (), (tensor(f"p{i}", CUT, length),), "forward") for i in range(2 * layers)]
    parameters, results, x = list(ops), [], "p0"
    for phase in ("forward", "backward"):
        for i in range(2 * layers)[:: 1 if phase == "forward" else -1]:
            gathered = collective(f"w{i}{phase}", parameters[i].writes[0], FORMS[0], phase)
            made = tensor(f"y{i}{phase}", SUMS, length)
            for extra in range(9):
                seen = tensor(f"z{i}{phase}{extra}", WHOLE, 8)
                ops.append(Op(seen.name, "compute", seen.name, (x,), (seen,), phase, seconds=compute_s / 10))
            reads = (x, gathered.writes[0].name)
            ops += [gathered, Op(made.name, "compute", made.name, reads, (made,), phase, seconds=compute_s)]
            if phase == "backward":
                ops.append(collective(f"r{i}", made, FORMS[1], phase))
                results.append((Output(Value(f"r{i}"), "gradient", str(i)), f"r{i}"))
            x = made.name
    return Program(tuple(ops), tuple(results))


@pytest.mark.parametrize("compute_s", [1e-6, 3e-4, 3e-3])
@pytest.mark.parametrize("length", [1000, 2**22, 2**25])
def test_few_layers_tell_how_long_many_take(length, compute_s) -> None:
    program = deep(60, length, compute_s)
    arrangements = Arrangements(extract_collectives(program), PRICES)
    short = shortened(program, likes(program), arrangements.largest_share())
    assert short is not None
    assert 118 <= short.depths.whole <= 120  # half a layer repeats already
    few, more = (Arrangements(extract_collectives(p), PRICES, arrangements) for p in short.programs)
    assert all(len(p.ops) < 0.6 * len(program.ops) for p in short.programs)
    for a in (
        Arrangement(),
        Arrangement(0, 0, 1),
        Arrangement(*arrangements.sizes("late")[1:2], arrangements.sizes("early")[1], 2),
    ):
        assert short.depths.seconds(few.seconds(a), more.seconds(a)) == pytest.approx(arrangements.seconds(a), rel=2e-3)


def test_a_deep_program_is_arranged_as_well_as_if_every_way_was_tried_on_all_of_it() -> None:
    program = deep(60, 2**23, 3e-4)
    arrangements = Arrangements(extract_collectives(program), PRICES)
    exact = min(arrangements.search(arrangements.seconds, math.inf).values())
    assert arranged(program).timeline.seconds <= exact * 1.001


def test_a_few_bytes_of_another_kind_say_nothing_of_how_much_goes_in_a_launch() -> None:
    program = gradients(12, 2**22, 1e-4)
    alone = Arrangements(extract_collectives(program), PRICES)
    scalar = Op("p", "input", "p", (), (tensor("p", CUT, 2),), "forward")
    gathered = collective("w", scalar.writes[0], FORMS[0], "forward")
    reader = Op("y", "compute", "y", ("w",), (tensor("y", WHOLE, 2),), "forward", seconds=1e-6)
    beside = Arrangements(
        extract_collectives(Program((scalar, gathered, reader, *program.ops), program.results)), PRICES
    )
    assert {m.kind for m in beside.parts.collectives} == {m.kind for m in alone.parts.collectives} | {"early"}
    assert beside.largest_launch() == alone.largest_launch() > 0


def test_programs_without_layers_are_not_shortened() -> None:
    several = Program(tuple(op for i in range(40) for op in gradients(1, 100, 1e-6 * (i + 1)).ops), ())
    for program in (several, deep(3, 1000, 1e-6)):
        assert shortened(program, likes(program), 0.0) is None
    assert shortened(deep(60, 1000, 1e-6), {}, 0.0) is None


def test_a_step_of_a_gradient_is_launched_when_the_one_before_it_should_be_done() -> None:
    """Scatter along one axis, then reduce along the other: whoever launches the second at once stands still."""
    ops, results = [Op("p", "input", "p", (), (tensor("p", CUT, 4),), "forward")], []
    for i in range(6):
        made = tensor(f"g{i}", SUMS, 2**24)
        ops.append(Op(made.name, "compute", made.name, ("p",), (made,), "backward", seconds=1e-3))
        scattered = collective(f"s{i}", made, FORMS[1], "backward")
        reduced = collective(f"r{i}", scattered.writes[0], FORMS[3], "backward")
        ops += [scattered, reduced]
        results.append((Output(Value(reduced.node), "output", reduced.name), reduced.name))
    program = Program(tuple(ops), tuple(results))
    found = Program(Arrangements(extract_collectives(program), PRICES).ops(Arrangement()), program.results)
    launches, exposed = sum(op.launch_s for op in program.collectives), 2 * ops[-1].seconds
    assert simulate_streams(program, 1.0).seconds > 6e-3 + 6 * ops[-2].seconds
    assert simulate_streams(found, 1.0).seconds < 6e-3 + launches + exposed


@pytest.mark.parametrize("gathers", [False, True])
def test_where_communication_takes_longest_both_axes_send_at_once(gathers) -> None:
    """Scatter along one axis, reduce along the other and gather along the first, which gathers of weights delay."""
    ops = [Op(f"p{i}", "input", f"p{i}", (), (tensor(f"p{i}", CUT, 2**26),), "forward") for i in range(12)]
    made = tensor("f", WHOLE, 4)
    ops.append(Op("f", "compute", "f", ("p0",), (made,), "forward", seconds=1e-5))
    results = []
    for i in range(12):
        if gathers:
            ops.append(collective(f"w{i}", ops[i].writes[0], FORMS[0], "backward"))
        made = tensor(f"g{i}", SUMS, 2**26)
        ops.append(
            Op(made.name, "compute", made.name, (f"w{i}" if gathers else "f",), (made,), "backward", seconds=1e-5)
        )
        scattered = collective(f"s{i}", made, FORMS[1], "backward")
        reduced = collective(f"r{i}", scattered.writes[0], FORMS[3], "backward")
        gathered = collective(f"a{i}", reduced.writes[0], FORMS[0], "backward")
        ops += [scattered, reduced, gathered]
        results.append((Output(Value(gathered.node), "output", gathered.name), gathered.name))
    program = Program(tuple(ops), tuple(results))
    busiest = max(sum(op.seconds for op in program.collectives if op.step.axis == axis) for axis in (0, 1))
    ends = sum(op.seconds for op in ops[-3:])
    assert arranged(program).timeline.seconds < busiest + 0.5 * ends


def test_a_cast_of_an_input_goes_with_the_gather_of_its_result() -> None:
    """So the gather hides behind what is computed before, as that of the input itself would."""
    ops: list[Op] = []
    for i in range(4):
        given = tensor(f"p{i}", CUT, 2**24)
        ops.append(Op(given.name, "input", given.name, (), (given,), "forward"))
    for i in range(4):
        cast = tensor(f"c{i}", CUT, 2**24, "bfloat16")
        gathered = collective(f"g{i}", cast, FORMS[0], "forward")
        made = tensor(f"y{i}", WHOLE, 4)
        ops.append(Op(cast.name, "compute", cast.name, (f"p{i}",), (cast,), "forward", seconds=1e-6))
        ops += [gathered, Op(made.name, "compute", made.name, (gathered.name,), (made,), "forward", seconds=1e-2)]
    program = Program(tuple(ops), ((Output(Value("y3"), "output", "y"), "y3"),))
    parts = extract_collectives(program)
    assert [m.kind for m in parts.collectives] == ["early"] * 4
    found = arranged(program)
    assert is_valid(found.program)
    names = [op.name for op in found.program.ops]
    assert names.index("c2") == names.index("g2") - 1 < names.index("y1")
    assert found.timeline.seconds < found.before.seconds - 2 * ops[-2].seconds


def test_a_cast_that_is_computed_with_stays_where_it_is() -> None:
    given, cast = tensor("p", CUT, 2**20), tensor("c", CUT, 2**20, "bfloat16")
    ops = [
        Op("p", "input", "p", (), (given,), "forward"),
        Op("c", "compute", "c", ("p",), (cast,), "forward", seconds=1e-6),
        Op("y", "compute", "y", ("c",), (tensor("y", CUT, 4),), "forward", seconds=1e-6),
        collective("g", cast, FORMS[0], "forward"),
    ]
    assert [op.name for op in extract_collectives(Program(tuple(ops), ())).fixed] == ["p", "c", "y"]


def test_the_wait_for_an_offload_of_what_a_collective_made_stays() -> None:
    """Else the copy would hold the device's tensor to the end of the forward."""
    source = tensor("p0", CUT, 2**20)
    gathered = collective("g", source, FORMS[0], "forward")
    made, host = gathered.writes[0], LocalTensor("g|host", gathered.writes[0].meta, WHOLE, 2**22, host=True)
    offload = Op("g|offload", "offload", "g", (made.name,), (host,), "forward")
    wait = Op("g|offload|done", "wait", "g", (made.name, host.name), (), "forward")
    collected = Op("g|done", "wait", "g", (made.name,), (), "forward")
    ops = (Op("p0", "input", "p0", (), (source,), "forward"), gathered, collected, offload, wait)
    assert extract_collectives(Program(ops, ())).fixed == (ops[0], offload, wait)
