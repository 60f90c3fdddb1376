"""Mends triton's interpreter where it is in use: that of 3.6 makes integers of loop bounds that are tensors by ``int``,
which numpy 2.4 refuses for arrays of one element."""

from __future__ import annotations

import triton

if triton.knobs.runtime.interpret:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patched(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched
