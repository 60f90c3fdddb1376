"""Call custom ops that mutate their arguments from programs without mutation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_copies(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` on copies of the arguments that it mutates.

    Returns:
        The op's results followed by the mutated copies, as a tuple if there are several.
    """
    given, changed = [*args], []
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = given[at] if at < len(given) else kwargs.get(argument.name)
        copy = value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else None
        if at < len(given):
            given[at] = copy
        else:
            kwargs[argument.name] = copy
        changed.append(copy)
    made = op(*given, **kwargs)
    results = (*(made if isinstance(made, tuple) else () if made is None else (made,)), *changed)
    return results[0] if len(results) == 1 else results
