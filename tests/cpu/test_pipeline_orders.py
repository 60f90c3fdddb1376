"""Orders of pipelines beside those of torch.distributed.pipelining, and its text of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.pipelines.actions import Action, Schedule
from autopar.pipelines.orders import interleaved, one_f_one_b, zero_bubble, zero_bubble_v

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 10, 16)]


def of_torch(name: str, p: int, m: int, chunks: int):
    """Torch's schedule; it asks its stages for their numbers alone."""
    stages = [
        SimpleNamespace(
            stage_index=chunk * p, num_stages=chunks * p, group_size=p, group_rank=0, is_last=False, submod=None
        )
        for chunk in range(chunks)
    ]
    return getattr(torch_schedules, name)(stages, m, loss_fn=lambda output, target: output)


def order_of(schedule) -> tuple[tuple[Action, ...], ...]:
    """Torch's order without waits, and with whole backwards on the first stage, whose inputs need no gradient."""
    result = []
    for rank in sorted(schedule.pipeline_order):
        actions = [Action.parse(str(action)) for action in schedule.pipeline_order[rank] if action is not None]
        split = [action for action in actions if action.stage == 0 and action.kind == "I"]
        assert all(actions[actions.index(each) + 1] == each._replace(kind="W") for each in split)
        whole = [each._replace(kind="B") if each in split else each for each in actions]
        result.append(tuple(each for each in whole if each.stage > 0 or each.kind != "W"))
    return tuple(result)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p == 0])
def test_the_interleaved_order_is_that_of_torch(p: int, m: int, chunks: int):
    assert interleaved(p, m, chunks).order == order_of(of_torch("ScheduleInterleaved1F1B", p, m, chunks))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % max(1, m // p) == 0])
def test_zb_h1_is_the_interleaved_zero_bubble_of_torch_with_one_chunk(p: int, m: int):
    assert zero_bubble(p, m).order == order_of(of_torch("ScheduleInterleavedZeroBubble", p, m, 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv_is_that_of_torch(p: int, m: int):
    made, other = zero_bubble_v(p, m), of_torch("ScheduleZBVZeroBubble", p, m, 2)
    assert made.order == order_of(other)
    assert made.rank_of == tuple(other.stage_index_to_group_rank[stage] for stage in range(2 * p))


@pytest.mark.parametrize(
    ("made", "name", "chunks"),
    [
        (one_f_one_b(4, 8), "ScheduleInterleaved1F1B", 1),
        (interleaved(4, 8, 2), "ScheduleInterleaved1F1B", 2),
        (zero_bubble(4, 8), "ScheduleInterleavedZeroBubble", 1),
        (zero_bubble_v(4, 8), "ScheduleZBVZeroBubble", 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_torch_reads_what_is_written_here(tmp_path: Path, made: Schedule, name: str, chunks: int):
    path = tmp_path / "order.csv"
    path.write_text(made.to_text())
    reader = of_torch(name, 4, 8, chunks)
    torch_schedules.PipelineScheduleMulti._load_csv(reader, str(path))
    read = [[str(action) for action in reader.pipeline_order[rank]] for rank in range(4)]
    assert read == [[str(action) for action in row] for row in made.order]
    assert reader.stage_index_to_group_rank == dict(enumerate(made.rank_of))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_what_torch_writes_is_read_here(tmp_path: Path, name: str, chunks: int):
    path = tmp_path / "order.csv"
    writer = of_torch(name, 4, 8, chunks)
    torch_schedules.PipelineScheduleMulti._dump_csv(writer, str(path))
    read = Schedule.from_text(path.read_text())
    assert read.rank_of == tuple(writer.stage_index_to_group_rank[stage] for stage in range(8))
    assert read.micro_batches == 8
    compute = [
        [str(part) for action in row if action is not None for part in action.sub_actions or [action]]
        for _, row in sorted(writer.pipeline_order.items())
    ]
    assert [[str(action) for action in row] for row in read.order] == compute
