"""Pack and unpack around an exchange: transpose, pad or trim, and cast in one pass over memory.

An all-to-all sends a tensor cut along one dim and stacked along a new first one, in the dtype of the wire, and joins
what it receives along another dim. Both are one copy between two strided tensors. The kernel walks up to six dims, the
inner two as a tile, so that reads and writes are both coalesced even if the copy transposes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

OUTER = 4
"""Dims outside the tile that the kernel walks."""


@triton.jit
def copy_kernel(
    x,
    out,
    ni,
    nj,
    xi,
    xj,
    oi,
    oj,
    ci,
    cj,
    n0,
    n1,
    n2,
    n3,
    x0,
    x1,
    x2,
    x3,
    o0,
    o1,
    o2,
    o3,
    c0,
    c1,
    c2,
    c3,
    limit,
    CUT: tl.constexpr,
    PAD: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
):
    """Set out[...] = x[...]; with CUT, where the cut dim's index is below ``limit``, else 0 (with PAD) or nothing."""
    tiles_i = tl.cdiv(ni, I)
    tiles_j = tl.cdiv(nj, J)
    at = tl.program_id(0).to(tl.int64)
    j = (at % tiles_j) * J + tl.arange(0, J)[None, :]
    at //= tiles_j
    i = (at % tiles_i) * I + tl.arange(0, I)[:, None]
    at //= tiles_i
    k3 = at % n3
    at //= n3
    k2 = at % n2
    at //= n2
    k1 = at % n1
    k0 = at // n1
    inside = (i < ni) & (j < nj)
    here = inside
    if CUT:  # a mask that differs between neighbours keeps the compiler from vectorizing
        here = inside & (k0 * c0 + k1 * c1 + k2 * c2 + k3 * c3 + i * ci + j * cj < limit)
    value = tl.load(x + k0 * x0 + k1 * x1 + k2 * x2 + k3 * x3 + i * xi + j * xj, mask=here, other=0)
    place = out + k0 * o0 + k1 * o1 + k2 * o2 + k3 * o3 + i * oi + j * oj
    tl.store(place, value.to(out.dtype.element_ty), mask=inside if PAD else here)


def pack(x: torch.Tensor, dim: int, ways: int, dtype: torch.dtype | None = None, *, I: int = 32, J: int = 64):
    """[..., n, ...] -> [ways, ..., ceil(n / ways), ...]: cut ``x``, of any strides, along ``dim``, zero-padded."""
    n = x.shape[dim]
    part = -(-n // ways)
    out = x.new_empty((ways, *x.shape[:dim], part, *x.shape[dim + 1 :]), dtype=dtype or x.dtype)
    xs, os = list(x.stride()), list(out.stride())
    dims = [(ways, part * xs[dim], os[0], part)]
    for d, size in enumerate(x.shape):
        dims.append((part, xs[d], os[d + 1], 1) if d == dim else (size, xs[d], os[d + 1], 0))
    _copy(x, out, dims, n if n != ways * part else -1, pad=True, I=I, J=J)
    return out


def unpack(rows: torch.Tensor, dim: int, length: int, dtype: torch.dtype | None = None, *, I: int = 32, J: int = 64):
    """[ways, ..., part, ...] -> [..., length, ...]: join the parts, of any strides, along ``dim`` and trim."""
    ways, part = rows.shape[0], rows.shape[dim + 1]
    shape = list(rows.shape[1:])
    shape[dim] = length
    out = rows.new_empty(shape, dtype=dtype or rows.dtype)
    xs, os = list(rows.stride()), list(out.stride())
    dims = [(ways, xs[0], part * os[dim], part)]
    for d, size in enumerate(rows.shape[1:]):
        dims.append((part, xs[d + 1], os[d], 1) if d == dim else (size, xs[d + 1], os[d], 0))
    _copy(rows, out, dims, length if length != ways * part else -1, pad=False, I=I, J=J)
    return out


def _copy(x, out, dims, limit, *, pad, I, J):
    """Copy along ``dims``, each (size, stride of x, stride of out, contribution to the index along the cut dim)."""
    if out.numel() == 0:
        return
    outer, i, j = _tiles(_merged(dims, limit >= 0))
    if len(outer) > OUTER:  # more dims than the kernel walks: loop over the outermost in Python
        size, step_x, step_out, cut = outer[0]
        for k in range(size):
            rest = [*outer[1:], i, j]
            _copy(
                x.as_strided(x.shape, x.stride(), x.storage_offset() + k * step_x),
                out.as_strided(out.shape, out.stride(), out.storage_offset() + k * step_out),
                rest,
                max(limit - k * cut, 0) if limit >= 0 else -1,
                pad=pad,
                I=I,
                J=J,
            )
        return
    outer = [(1, 0, 0, 0)] * (OUTER - len(outer)) + outer
    programs = triton.cdiv(i[0], I) * triton.cdiv(j[0], J)
    for size, *_ in outer:
        programs *= size
    copy_kernel[(programs,)](
        x,
        out,
        i[0],
        j[0],
        i[1],
        j[1],
        i[2],
        j[2],
        i[3],
        j[3],
        *(d[0] for d in outer),
        *(d[1] for d in outer),
        *(d[2] for d in outer),
        *(d[3] for d in outer),
        limit,
        CUT=limit >= 0,
        PAD=pad,
        I=I,
        J=J,
    )


def _merged(dims, cut):
    """Merge dims that are contiguous with each other in both tensors."""
    kept = [d for d in dims if d[0] != 1] or [(1, 1, 1, 0)]
    merged = [kept[0]]
    for size, x, out, c in kept[1:]:
        outer = merged[-1]
        if outer[1] == x * size and outer[2] == out * size and (not cut or outer[3] == c * size):
            merged[-1] = (outer[0] * size, x, out, c)
        else:
            merged.append((size, x, out, c))
    return merged


def _tiles(dims):
    """Return the outer dims and the tile's two: J has the smallest stride of the result, I that of x among the rest."""
    j = min(range(len(dims)), key=lambda d: abs(dims[d][2]))
    rest = [d for d in range(len(dims)) if d != j]
    if not rest:
        return [], (1, 0, 0, 0), dims[j]
    i = min(rest, key=lambda d: (abs(dims[d][1]), -d))
    return [dims[d] for d in rest if d != i], dims[i], dims[j]
