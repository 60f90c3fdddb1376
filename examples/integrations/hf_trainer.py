"""Hugging Face Trainer: train a parallel model with its usual arguments, evaluation, checkpoints and logging.

    torchrun --nproc-per-node 2 examples/integrations/hf_trainer.py

The Trainer gives every rank its own samples, so the plan uses batch="local".
"""

from __future__ import annotations

import argparse
import json
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autopar

TOKENS, LOCAL_BATCH = 16, 4


class Counting(Dataset):
    """Sequences of consecutive numbers, modulo 48."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(TOKENS) + i) % 48
        return {"input_ids": ids, "labels": ids}


def build_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=48,
        n_positions=TOKENS,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def metrics(found: EvalPrediction) -> dict[str, float]:
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "samples": float(len(right))}


def main(folder: str, steps: int = 6, resume: str | None = None) -> dict[str, list[float]]:
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=LOCAL_BATCH,
        per_device_eval_batch_size=LOCAL_BATCH,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    ids = torch.empty(LOCAL_BATCH, TOKENS, dtype=torch.long)
    model = autopar.autoparallelize(build_model(), {"input_ids": ids, "labels": ids}, batch="local", cluster="cpu-2")
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Counting(64), eval_dataset=Counting(11), compute_metrics=metrics
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(folder)  # call it on every rank; AutoModelForCausalLM.from_pretrained reads the folder
    history = trainer.state.log_history
    return {name: [e[name] for e in history if name in e] for name in ("loss", "eval_accuracy", "eval_samples")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--resume", default=None, help="a checkpoint's folder")
    options = parser.parse_args()
    folder = options.folder or f"{tempfile.gettempdir()}/autopar-trainer"  # the same on every rank
    print(json.dumps(main(folder, options.steps, options.resume)))
    dist.destroy_process_group()
