"""Readable Python of the local program."""

from autopar.codegen.emit import emit
from autopar.codegen.header import header
from autopar.codegen.load import load

__all__ = ["emit", "header", "load"]
