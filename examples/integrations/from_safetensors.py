"""Load weights of Hugging Face shard by shard, so that no rank ever holds the whole model.

    torchrun --nproc-per-node 2 examples/integrations/from_safetensors.py --weights path/of/a/model

The example builds the model on the meta device, plans it, and allocates only this rank's shards. Each rank then reads
only the bytes of its own shards from the files. Without --weights it first writes a small Llama to read.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autopar

TOKENS = 16


def write_small_model(folder: str) -> None:
    """Write a small Llama in files of at most 40 kB, since large models come in many files."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="40kB")


def main(folder: str) -> tuple[float, float]:
    """Return the loss of the parallel model and of the whole model that from_pretrained reads."""
    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(4 * TOKENS).reshape(4, TOKENS) % config.vocab_size
    cut = {"*.weight": "shard"}
    mesh = (dist.get_world_size(),)
    model = autopar.autoparallelize(
        model, {"input_ids": ids, "labels": ids}, mesh=mesh, constraints=cut, initialize=False
    )
    autopar.load_safetensors(model, folder)
    loss = float(model(input_ids=ids, labels=ids).loss.detach())
    whole = AutoModelForCausalLM.from_pretrained(folder)
    expected = float(whole(input_ids=ids, labels=ids).loss.detach())
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f}, of the whole model {expected:.6f}")
    return loss, expected


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a folder with config.json and safetensors")
    given = parser.parse_args().weights
    autopar.launch_from_torch()
    box = [given or tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    if given is None and dist.get_rank() == 0:
        write_small_model(box[0])
    dist.barrier()
    main(box[0])
    dist.destroy_process_group()
