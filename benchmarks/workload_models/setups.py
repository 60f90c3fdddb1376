"""Reads benchmarks/workloads.toml, without torch, and builds a set-up of it on the meta device."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.mesh.tables import parse_toml

TABLE = Path(__file__).parents[1] / "workloads.toml"

Budget = float | str


@dataclass(frozen=True)
class Workload:
    """One table of benchmarks/workloads.toml, whose head explains the keys."""

    name: str
    source: str
    mesh: tuple[int, ...]
    cluster: str
    preset: str = ""
    transformers: str = ""
    model: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    tokens: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    mixed_precision: Any = None
    accumulation_steps: int = 1
    budgets: tuple[Budget, ...] = ("device",)

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each input tensor."""
        ids = dict.fromkeys(("input_ids", "labels"), f"int64 {self.tokens}") if self.tokens else {}
        texts = {name: text for name, text in {**ids, **self.inputs}.items() if isinstance(text, str)}
        return {name: _shape(text) for name, text in texts.items()}

    def options(self) -> dict[str, Any]:
        """The arguments of ``autopar.plan`` beside the model, its inputs and the budget."""
        return dict(
            mesh=self.mesh,
            cluster=self.cluster,
            optimizer=self.optimizer,
            mixed_precision=self.mixed_precision,
            accumulation_steps=self.accumulation_steps,
        )

    def build(self) -> tuple[Any, dict[str, Any]]:
        """The model in training mode and its inputs, on the meta device."""
        import torch

        with torch.device("meta"):
            shapes = self.shapes.items()
            inputs = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shapes}
            flags = {name: value for name, value in self.inputs.items() if not isinstance(value, str)}
            if self.preset:
                return self._preset(), inputs
            made = self._of_transformers() if self.transformers else self._of_path()
            return made.to(getattr(torch, self.dtype)).train(), inputs | flags

    def _preset(self) -> Any:
        from autopar.cli.models import load_model

        batch, length = map(int, self.tokens.split("x"))
        asked = argparse.Namespace(model=self.preset, batch=(batch, length), sequence=None, layers=None)
        return load_model(asked, meta=True)[0]

    def _of_transformers(self) -> Any:
        import transformers

        transformers.logging.set_verbosity_error()  # what it warns of is not about planning
        kind = getattr(transformers, self.transformers)
        return kind(kind.config_class(use_cache=False, **self.fields))

    def _of_path(self) -> Any:
        module, _, name = self.model.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    found = re.fullmatch(r"(\w+) (\d+(?:x\d+)*)", text)
    if found is None:
        raise ValueError(f'an input is written "float32 8x3x224x224", not {text!r}')
    return found[1], tuple(map(int, found[2].split("x")))


def read(path: Path = TABLE) -> dict[str, Workload]:
    """The workloads by name, in the order of the file."""
    tables = parse_toml(path.read_text(encoding="utf-8"), str(path))
    return {name: _workload(name, values) for name, values in tables.items()}


def _workload(name: str, values: Mapping[str, Any]) -> Workload:
    listed = {key: tuple(values[key]) for key in ("mesh", "budgets") if key in values}
    return Workload(name, **{**values, **listed})
