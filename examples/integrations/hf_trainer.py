"""Hugging Face Trainer around a parallel model: arguments, callbacks and logging as ever.

    torchrun --nproc-per-node 2 examples/integrations/hf_trainer.py

The Trainer gives every rank its own samples, so the plan is made with batch="local".
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autopar
from autopar.training import Booster

TOKENS, LOCAL_BATCH = 16, 4


class Counting(Dataset):
    """Sequences that count on from where they begin."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(TOKENS) + i) % 48
        return {"input_ids": ids, "labels": ids}


def build_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=48, n_positions=TOKENS, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def main(folder: str, steps: int = 6) -> list[float]:
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=LOCAL_BATCH, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True, seed=0,
        average_tokens_across_devices=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.empty(LOCAL_BATCH, TOKENS, dtype=torch.long)
    model = autopar.autoparallelize(build_model(), {"input_ids": ids, "labels": ids}, batch="local", cluster="cpu-2")
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.model_accepts_loss_kwargs = False  # the loss is a mean in the program; the Trainer shall not count tokens
    trainer.train()
    Booster().save_model(model, folder, shard=True)  # GPT2LMHeadModel.from_pretrained(folder) reads it
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    print(main(tempfile.mkdtemp(), parser.parse_args().steps))
    dist.destroy_process_group()
