"""TensorBoard: rank 0 logs losses, measured and predicted step times, and the plan.

torchrun --nproc-per-node 2 examples/integrations/tensorboard_log.py --folder runs
tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrun_script import batch, build_model

import autopar


def main(folder: str = "runs", steps: int = 6) -> None:
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(0)
    model = autopar.autoparallelize(build_model(), torch.empty(64, 32), cluster="cpu-2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = dist.get_rank() == 0
    writer = SummaryWriter(folder) if first else None
    check = model.compare_with_prediction(1)
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if writer is not None:
            writer.add_scalar("loss", float(loss.detach()), step)
            writer.add_scalars("step, s", {"predicted": model.plan.step_time, "measured": check.measured["step"]}, step)
    if writer is not None:
        writer.add_text("plan", "    " + str(model.plan).replace("\n", "\n    "))  # a code block in Markdown
        writer.add_figure("memory", model.plan.memory_figure())
        writer.add_figure("timeline", model.plan.timeline_figure())
        writer.close()
        model.plan.report(Path(folder) / "plan.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs")
    main(parser.parse_args().folder)
    dist.destroy_process_group()
