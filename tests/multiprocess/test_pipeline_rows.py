"""Outputs of micro-batches are put in the order of the batch, and gradients of outputs are dealt to micro-batches."""

from __future__ import annotations

import itertools
import math

import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.pipeline.rows import Rows
from autopar.spmd.ranks import ProcessRank
from tests.multiprocess.pool import RankPool


def _joined_and_dealt() -> list[str]:
    """The cases in which a rank has other rows than its shard of the batch, or of a micro-batch."""
    rank, wrong = ProcessRank(init_device_mesh("cpu", (2, 2))), []
    sizes = itertools.product(((), (0,), (1,), (0, 1)), (1, 2, 3, 4, 8), (1, 4), (torch.float32, torch.bool))
    for axes, m, batches, dtype in sizes:
        rows, shards = Rows(rank, axes, m, batches), math.prod(2 for _ in axes)
        here = int("".join(str(rank.coordinate[a]) for a in axes) or "0", 2)
        batch = (torch.arange(m * 8 * 3) * 7 % 11 % 4).reshape(m * 8, 3).to(dtype)
        whole = batch.reshape(batches, m, -1, 3).transpose(0, 1).flatten(1, 2)
        mine = [micro_batch.chunk(shards)[here] for micro_batch in whole]
        shard = batch.chunk(shards)[here]
        if not torch.equal(rows.joined(list(mine)), shard):
            wrong.append(f"joined {axes} {m} {batches} {dtype}")
        if not all(itertools.starmap(torch.equal, zip(rows.dealt(shard), mine, strict=True))):
            wrong.append(f"dealt {axes} {m} {batches} {dtype}")
    return wrong


def test_rows_are_joined_to_shards_of_the_batch_and_dealt_again(four: RankPool) -> None:
    assert four.run(_joined_and_dealt) == [[]] * 4
