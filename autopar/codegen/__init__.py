"""Emit the local program as readable Python."""

from autopar.codegen.digest import digest
from autopar.codegen.emit import emit, results_of
from autopar.codegen.header import header
from autopar.codegen.inductor import compiled
from autopar.codegen.language import check_text
from autopar.codegen.load import checked, load, read_edited, refuse_own_ops

__all__ = [
    "check_text",
    "checked",
    "compiled",
    "digest",
    "emit",
    "header",
    "load",
    "read_edited",
    "refuse_own_ops",
    "results_of",
]
