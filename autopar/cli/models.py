"""Load the model that a command line names, and make inputs for it."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import json
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.mesh.tables import parse_toml

HINT = "give module:function that returns (model, inputs), a Hugging Face config.json, or a type such as gpt2."
PRESETS = "presets.toml"


def add_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the arguments that name a model and the size of its inputs."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs=None if required else "?",
        help="module:function or file.py:function that returns (model, inputs); a Hugging Face config.json; a model "
        f"type with its default config: gpt2, llama, bert, vit, ...; or one of {', '.join(presets())}",
    )
    parser.add_argument(
        "--batch",
        type=_batch,
        default=(8, None),
        metavar="N[xTOKENS]",
        help="samples, and tokens per sample, for Hugging Face models (default 8x512)",
    )
    parser.add_argument("--sequence", type=_positive, metavar="N", help="tokens per sample, for Hugging Face models")
    parser.add_argument("--layers", type=_positive, metavar="N", help="number of layers, for Hugging Face models")


def _batch(text: str) -> tuple[int, int | None]:
    """Parse ``8`` or ``8x4096`` into samples and tokens per sample."""
    found = re.fullmatch(r"(\d+)(?:x0*([1-9]\d*))?", text)
    if found is None or int(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch size: write 8 or 8x4096")
    return int(found[1]), int(found[2]) if found[2] else None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


@functools.cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the configs of published models by name."""
    return parse_toml(files("autopar.cli").joinpath(PRESETS).read_text(), PRESETS)


def load_model(arguments: argparse.Namespace, *, meta: bool) -> tuple[nn.Module, Any]:
    """Load the model that the arguments name, and make inputs for it.

    Args:
        meta: build Hugging Face models on the meta device, so that nothing is allocated.

    Raises:
        AutoparError: if there is no such model.
    """
    name = arguments.model
    if name.endswith(".json") or Path(name).is_file():
        return _hugging_face(_read_config(Path(name)), arguments, meta)
    if ":" in name:
        return _from_function(name)
    return _hugging_face(presets().get(name, {"model_type": name}), arguments, meta)


def _from_function(name: str) -> tuple[nn.Module, Any]:
    module, _, attribute = name.partition(":")
    folder = Path.cwd()
    if module.endswith(".py"):
        folder, module = (folder / module).parent, Path(module).stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # as `python -m` or running the file would do
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise AutoparError("The model's function was not found.", found=f"{name}: {error}", hint=HINT) from None
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise AutoparError(
            "The model's function must return the model and its inputs.",
            found=f"{name}() returned {type(made).__name__}",
            hint="end it with: return model, {'input_ids': ids, 'labels': ids}",
        )
    return made


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AutoparError("The model's config cannot be read.", found=f"{path}: {error}", hint=HINT) from None
    if isinstance(config, dict) and config.get("format") == "autopar-plan":
        hint = "name the model that the plan was made for; only autopar diff and autopar emit read saved plans."
        raise AutoparError("This file is a saved plan, not a model.", found=str(path), hint=hint)
    if not isinstance(config, dict) or "model_type" not in config:
        hint = 'add a line such as "model_type": "gpt2".'
        raise AutoparError("The config has no model_type.", found=str(path), hint=hint)
    return config


SEQUENCE = 512
LAYER_COUNTS = ("n_layer", "num_hidden_layers", "num_layers")


def _hugging_face(values: Mapping[str, Any], arguments: argparse.Namespace, meta: bool) -> tuple[nn.Module, Any]:
    transformers = _transformers()
    kind = str(values["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, [*transformers.CONFIG_MAPPING, *presets()], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else HINT
        raise AutoparError("There is no such model.", found=kind, hint=hint)
    given = {k: v for k, v in values.items() if k not in ("model_type", "dtype", "torch_dtype")}
    try:
        config = transformers.AutoConfig.for_model(kind, **given)
    except Exception as error:  # noqa: BLE001  each config class raises its own errors
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise AutoparError(
            "transformers rejects the config.", found=said, hint="correct that entry of the config."
        ) from None
    if arguments.layers is not None:
        for key in LAYER_COUNTS:
            if hasattr(config, key):
                setattr(config, key, arguments.layers)
    config.use_cache = False
    with torch.device("meta" if meta else "cpu"):
        model = _head(transformers, config)(config).to(_dtype(values))
    return model.train(), _inputs(config, arguments, "meta" if meta else "cpu")


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the parameters that the config names, float32 by default."""
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise AutoparError(
            "The config's dtype is not a floating-point dtype.", found=name, hint='write, say, "dtype": "bfloat16".'
        )
    return found


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()  # its warnings are not about planning
    except ImportError:
        raise AutoparError(
            "Models by type or config need Hugging Face transformers.",
            found="transformers is not installed",
            hint="pip install transformers, or give module:function.",
        ) from None
    return transformers


def _head(transformers: Any, config: Any) -> Any:
    """Return the class that trains this config: the one it names, else that of the first task that supports it."""
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    if named and named[0] is not None:
        return named[0]
    from transformers.models.auto import modeling_auto

    for task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"):
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        if config.model_type in names and not (task == "CAUSAL_LM" and _is_encoder(config)):
            return getattr(transformers, names[config.model_type])
    raise AutoparError("No training head is known for this model.", found=config.model_type, hint=HINT)


def _is_encoder(config: Any) -> bool:
    """Whether transformers lists this encoder (BERT and its relatives) among the causal models."""
    return (
        getattr(config, "is_decoder", None) is False
        and not getattr(config, "is_encoder_decoder", False)
        and (
            config.model_type
            in {"bert", "roberta", "electra", "bert-generation", "xlm-roberta", "roformer", "camembert"}
        )
    )


def _inputs(config: Any, arguments: argparse.Namespace, device: str) -> dict[str, Tensor]:
    batch, tokens = arguments.batch
    sequence = tokens or arguments.sequence or SEQUENCE
    if hasattr(config, "image_size") or hasattr(config, "num_channels"):
        side = getattr(config, "image_size", 224)
        pixels = torch.rand((batch, getattr(config, "num_channels", 3), side, side), device=device)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long, device=device)}
    longest = getattr(config, "max_position_embeddings", None) or sequence
    if tokens is not None and tokens > longest:
        raise AutoparError(
            "The batch has more tokens per sample than the model has positions.",
            found=f"--batch {batch}x{tokens}, max_position_embeddings {longest}",
            hint=f"use --batch {batch}x{longest}, or a config.json with more positions.",
        )
    shape = (batch, min(sequence, longest))
    if device == "meta":
        ids = torch.empty(shape, dtype=torch.long, device=device)
    else:
        ids = torch.randint(3, config.vocab_size, shape)
    return {"input_ids": ids, "labels": ids}
