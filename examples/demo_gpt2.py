"""Train a byte-level GPT-2 of 10.8 million parameters on two processes, and compare every loss with one process.

    python examples/demo_gpt2.py            # or: make demo

First one process trains with plain PyTorch. Then autopar plans the same program for two processes, and these train with
the same seeds, batches and optimizer. The text is the language reference that ships with Python. The demo needs no GPU
and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

PROCESSES = 2
BATCH, LENGTH = 8, 128  # 1,024 tokens a step
TOLERANCE = 1e-3  # of the loss, in float32 over all steps
Batch = dict[str, torch.Tensor]
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,  # one token per byte
        n_positions=LENGTH,
        n_embd=384,
        n_layer=6,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default; setting it avoids a warning of transformers
    return model


def batches(steps: int) -> Iterator[Batch]:
    """Yield windows at random positions of the text, the same ones on every process."""
    text = torch.frombuffer(bytearray("\n".join(topics[k] for k in sorted(topics)).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        ids = text[starts + torch.arange(LENGTH)]
        yield {"input_ids": ids, "labels": ids}


def train(model: nn.Module, steps: int, label: str, beside: list[float] | None = None) -> list[float]:
    """Train with an ordinary PyTorch loop; print every tenth loss next to the one in ``beside``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses: list[float] = []
    columns = TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # In a file or a log, only the finished bar of one process appears.
    with Progress(*columns, console=console, transient=console.is_terminal, disable=rank() != 0) as progress:
        for batch in progress.track(batches(steps), total=steps):
            out = model(**batch)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(out.loss.detach()))
            if beside and rank() == 0 and len(losses) % 10 == 0:
                print_losses(len(losses), losses[-1], beside[len(losses) - 1])
    return losses


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def print_losses(step: int, ours: float, plain: float) -> None:
    both = f"{PROCESSES} processes {ours:.6f}   one process {plain:.6f}"
    console.print(f"step {step:4d}   {both}   difference {abs(ours - plain):.1e}")


def run_plain(steps: int) -> dict[str, Any]:
    """Train with plain PyTorch in this process, with one thread as in the parallel run."""
    torch.set_num_threads(1)
    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"GPT-2, {parameters / 1e6:.1f} million parameters, {BATCH} x {LENGTH} bytes a step, {steps} steps")
    start_s = time.perf_counter()
    losses = train(model, steps, "one process")
    elapsed_s = time.perf_counter() - start_s
    console.print(f"one process, plain PyTorch: {elapsed_s:.1f} s")
    return {"losses": losses, "elapsed_s": elapsed_s}


def run_parallel(steps: int, plain_losses: list[float]) -> dict[str, Any]:
    """Plan, then train as if there were one device; each of the two processes runs this."""
    import autopar

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    example = next(batches(1))
    start_s = time.perf_counter()
    model = autopar.autoparallelize(build_model(), example, mesh=(PROCESSES,))
    if rank() == 0:
        console.print(f"planned and compiled in {time.perf_counter() - start_s:.1f} s")
        print(model.plan, flush=True)
    start_s = time.perf_counter()
    losses = train(model, steps, f"{PROCESSES} processes", beside=plain_losses)
    elapsed_s = time.perf_counter() - start_s
    torch.distributed.destroy_process_group()
    return {"losses": losses, "elapsed_s": elapsed_s}


def launch(steps: int, folder: Path) -> int:
    """Start this script in every process with torchrun, and return the exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    command = [*torchrun, __file__, f"--steps={steps}", f"--folder={folder}"]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, env=environment).returncode


def compare(ours: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Print both runs side by side, and return whether their losses agree."""
    table = Table()
    table.add_column("")
    for column in (f"{PROCESSES} processes", "one process"):
        table.add_column(column, justify="right")
    table.add_row("training time", *(f"{run['elapsed_s']:.1f} s" for run in (ours, plain)))
    table.add_row("first loss", *(f"{run['losses'][0]:.6f}" for run in (ours, plain)))
    table.add_row("last loss", *(f"{run['losses'][-1]:.6f}" for run in (ours, plain)))
    console.print(table)
    differences = [abs(a - b) for a, b in zip(ours["losses"], plain["losses"], strict=True)]
    agree = all(d <= TOLERANCE for d in differences)  # max() could skip a NaN
    verdict = "the losses agree" if agree else "THE LOSSES DIFFER"
    console.print(f"largest difference {max(differences):.1e}, allowed {TOLERANCE:.0e}: {verdict}")
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plain-only", action="store_true", help="train on one process only")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        return worker(options.steps, options.folder)
    plain = run_plain(options.steps)
    if options.plain_only:
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain.json").write_text(json.dumps(plain))
        failed = launch(options.steps, folder)
        if failed:
            return failed
        return 0 if compare(json.loads((folder / "ours.json").read_text()), plain) else 1


def worker(steps: int, folder: Path) -> int:
    ours = run_parallel(steps, json.loads((folder / "plain.json").read_text())["losses"])
    if rank() == 0:
        (folder / "ours.json").write_text(json.dumps(ours))
    return 0


if __name__ == "__main__":
    sys.exit(main())
