"""Fix triton's interpreter if it is in use.

That of triton 3.6 calls ``int`` on loop bounds that are arrays of one element, which numpy 2.4 refuses."""

from __future__ import annotations

import triton

if triton.knobs.runtime.interpret:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patched(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched
