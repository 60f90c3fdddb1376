"""Digest of an emitted program."""

from __future__ import annotations

import hashlib
import re

_NUMBERS = r"(?:[-+.,\de\[\]()\sj]|True|False|float\('(?:nan|inf)'\))*"
_LETTERS = r'\s*(?:"[A-Za-z0-9+/=]*"\s*)*'
_SHAPE = r"(?:\.reshape\([\d, ()]*\))?,\n"
_CONSTANT = re.compile(
    r'^    "(?:[^"\\\n]|\\.)*": (?:'
    rf"torch\.tensor\({_NUMBERS}dtype=torch\.\w+,\s*\)"
    rf"|torch\.frombuffer\(bytearray\(zlib\.decompress\(base64\.b64decode\({_LETTERS}\)\)\), dtype=torch\.\w+\)"
    rf"){_SHAPE}",
    re.MULTILINE,
)
"""An entry of the table of constants: only numbers, nothing that could be executed."""

_UNPACKING = '"""\n\nimport base64\nimport zlib\n\n'


def digest(source: str) -> str:
    """Hash a program without the values of constants.

    When a program runs, these come from the model. If the model has no values, the text does not hold them.
    """
    plain = _CONSTANT.sub("", source).replace("CONSTANTS = {\n}\n", "CONSTANTS = {}\n")
    plain = plain.replace(_UNPACKING, '"""\n\n', 1)
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()
