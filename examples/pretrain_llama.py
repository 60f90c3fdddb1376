"""Pretrain a small Llama on text with accumulation, bf16, clipping and checkpoints, and recover from a killed rank.

    python examples/pretrain_llama.py                 # two processes; one is killed, and the run resumes
    torchrun --nproc-per-node 2 examples/pretrain_llama.py --folder run1 --kill-at 0

The text is from the American Declaration of Independence, with one token per byte. If you start it again on the same
folder, with any number of processes, it resumes from the last checkpoint. It needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = Path(__file__).parent / "data" / "declaration.txt"
LENGTH, BATCH = 64, 8
ACCUMULATION = 2  # batches per optimizer step
CLIP = 1.0


class Windows(Dataset):
    """All windows of the text that begin at a multiple of 16 bytes."""

    def __init__(self) -> None:
        self.text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.text) - LENGTH) // 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = self.text[16 * i : 16 * i + LENGTH]
        return {"input_ids": ids, "labels": ids}


def build_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(folder: Path, steps: int, save_every: int, kill_at: int) -> None:
    """Train until ``steps``, resuming from ``folder``; every process runs this."""
    import autopar
    from autopar.training import AutoParallelPlugin, Booster, Checkpointer, DistCoordinator, ResumableDataLoader

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    autopar.launch_from_torch(seed=1, timeout_s=120.0)
    coordinator = DistCoordinator()
    checkpointer = Checkpointer(folder)

    dataloader = ResumableDataLoader(DataLoader(Windows(), BATCH, shuffle=True, drop_last=True))
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    example = {name: torch.empty(BATCH, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    # With the plan of a checkpoint for as many processes, the resumed run is the same bit for bit.
    plugin = AutoParallelPlugin(example, plan=checkpointer.plan(), max_norm=CLIP)
    booster = Booster(plugin=plugin, mixed_precision="bf16")
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
    )
    resumed = checkpointer.load(model, optimizer, lr_scheduler, dataloader)
    done = resumed.step if resumed else 0
    coordinator.print_on_master(f"resumed at step {done}" if done else str(model.plan))

    micro = 0
    while done < steps:
        for batch in dataloader:
            outputs = model(**batch)
            loss = outputs.loss / ACCUMULATION
            booster.backward(loss, optimizer)
            micro += 1
            if micro % ACCUMULATION:
                continue
            optimizer.step()  # clips the gradients first
            lr_scheduler.step()
            optimizer.zero_grad()
            done += 1
            coordinator.print_on_master(f"step {done:3d}   loss {float(outputs.loss.detach()):.4f}")
            if done % save_every == 0 or done == steps:
                checkpointer.save(done, model, optimizer, lr_scheduler, dataloader)
            if done == kill_at and not resumed and coordinator.is_last_process():
                checkpointer.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            if done == steps:
                break
    checkpointer.wait()
    booster.save_model(model, folder / "model", shard=True)  # for LlamaForCausalLM.from_pretrained


def launch(arguments: list[str], folder: Path, processes: int) -> int:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*torchrun, "--max-restarts=1", __file__, *arguments, f"--folder={folder}"]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--kill-at", type=int, default=25, help="kill the last rank after this step; 0 kills none")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder for checkpoints (default: a temporary one)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        from autopar.training import guarded

        guarded(train)(options.folder, options.steps, options.save_every, options.kill_at)
        return 0
    if options.folder:
        return launch([a for a in sys.argv[1:] if "folder" not in a], options.folder, options.processes)
    with tempfile.TemporaryDirectory() as name:
        return launch(sys.argv[1:], Path(name), options.processes)


if __name__ == "__main__":
    sys.exit(main())
