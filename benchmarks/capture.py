"""Measure how long capture takes, in total and in milliseconds of processor time for each node of the captured graph.

    python benchmarks/capture.py [--only lstm gated-delta-rules] [--repeat 3] [--json FILE]

The models have many small ops: recurrent layers that are unrolled step by step, and linear attention in chunks. The
first capture of a process also imports what torch needs and is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autopar.tracer import ColoTracer

transformers.logging.set_verbosity_error()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


def lstm() -> tuple[nn.Module, Any]:
    return Recurrent(), torch.randn(4, 20, 8)


def gated_delta_rules() -> tuple[nn.Module, Any]:
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )
    ids = torch.zeros(2, 64, dtype=torch.int64)
    return transformers.Qwen3NextForCausalLM(config), {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, Any]:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
    )
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lstm": lstm,
    "gated-delta-rules": gated_delta_rules,
    "llama-48": llama,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ColoTracer().capture(nn.Linear(2, 2), torch.randn(2, 2))
    found = {}
    for name in arguments.only:
        model, inputs = MODELS[name]()
        spent, nodes = [], 0
        for _ in range(arguments.repeat):
            started = time.process_time()
            nodes = len(ColoTracer().capture(model, inputs).graph.nodes)
            spent.append(time.process_time() - started)
        seconds = statistics.median(spent)
        found[name] = {"nodes": nodes, "seconds": round(seconds, 3), "ms_a_node": round(1e3 * seconds / nodes, 3)}
        print(f"{name:18} {nodes:6} nodes   {seconds:7.2f} s   {1e3 * seconds / nodes:6.2f} ms a node", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
