"""Readable Python of the local program."""

from autopar.codegen.emit import emit, load

__all__ = ["emit", "load"]
