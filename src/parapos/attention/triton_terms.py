"""Score terms on the device: positions, coefficients, D, and a term's part in scores and gradients.

Positions are tuples of P coordinates, and of P remainders after them where float64 was split. Coefficients are tuples
too: M's lower triangle with both halves added, or one number per query, then g; or the slope. All carry one dimension
of size 1, so that queries and keys meet as rows and columns of a tile, whichever way the tile lies. FORM, LINEAR and
DISTANCE tell whether there are M, g and slopes, FULL whether M is a matrix, UNPLACED whether a token may be nowhere.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005

import triton
import triton.language as tl


@triton.jit
def positions(r, low, first, rows, valid, P: tl.constexpr, AXIS: tl.constexpr):
    """Where these tokens are, 0 if nowhere, and whether they are anywhere; both with a new dimension AXIS.

    first: where the sample's positions begin.
    """
    out = ()
    at = first + rows * P
    x = tl.load(r + at, mask=valid, other=0.0)
    placed = x == x
    for u in tl.static_range(P):
        x = tl.load(r + at + u, mask=valid, other=0.0)
        out = out + (tl.expand_dims(tl.where(placed, x, 0.0), AXIS),)
    if low is not None:
        for u in tl.static_range(P):
            out = out + (tl.expand_dims(tl.load(low + at + u, mask=valid, other=0.0), AXIS),)
    return out, tl.expand_dims(placed, AXIS)


@triton.jit
def _coefficient(pointers, valid, factor, placed, AXIS: tl.constexpr):
    x = tl.load(pointers, mask=valid, other=0.0).to(tl.float32)
    return tl.where(placed, tl.expand_dims(x, AXIS) * factor, 0.0)


@triton.jit
def coefficients(
    M, M_at, g, g_at, slopes, b, h, rows, valid, placed, scale2, P: tl.constexpr, FULL: tl.constexpr, AXIS: tl.constexpr
):
    """What multiplies functions of D in these queries' scores."""
    out = ()
    rows = rows.to(tl.int64)
    if M is not None:
        at = M + b * M_at[0] + h * M_at[1] + rows * M_at[2]
        if FULL:
            for u in tl.static_range(P):
                for w in tl.static_range(u):
                    above = _coefficient(at + w * M_at[3] + u * M_at[4], valid, scale2, placed, AXIS)
                    below = _coefficient(at + u * M_at[3] + w * M_at[4], valid, scale2, placed, AXIS)
                    out = out + (above + below,)
                out = out + (_coefficient(at + u * M_at[3] + u * M_at[4], valid, scale2, placed, AXIS),)
        else:
            out = out + (_coefficient(at, valid, scale2, placed, AXIS),)
    if g is not None:
        at = g + b * g_at[0] + h * g_at[1] + rows * g_at[2]
        for u in tl.static_range(P):
            out = out + (_coefficient(at + u * g_at[3], valid, scale2, placed, AXIS),)
    if slopes is not None:
        slope = tl.load(slopes + h).to(tl.float32) * -1.4426950408889634
        out = out + (tl.where(placed, slope, 0.0),)
    return out


@triton.jit
def _difference(s, key, query, BY_HAND: tl.constexpr):
    if BY_HAND:
        return key - query
    return tl.inline_asm_elementwise("sub.f32 $0, $1, $2;", "=f,f,f,f", [key, query, s], tl.float32, True, 1)


@triton.jit
def differences(s, keys, queries, P: tl.constexpr, SPLIT: tl.constexpr, BY_HAND: tl.constexpr):
    """D, laid out over the threads as s is; left alone, the compiler moves tiles of terms through shared memory."""
    out = ()
    for u in tl.static_range(P):
        x = _difference(s, keys[u], queries[u], BY_HAND)
        if SPLIT:
            x += _difference(s, keys[P + u], queries[P + u], BY_HAND)
        out = out + (x,)
    return out


@triton.jit
def _square(d, P: tl.constexpr):
    out = d[0] * d[0]
    for u in tl.static_range(1, P):
        out += d[u] * d[u]
    return out


@triton.jit
def add_terms(
    s, d, c, placed, FORM: tl.constexpr, LINEAR: tl.constexpr, DISTANCE: tl.constexpr, FULL: tl.constexpr,
    P: tl.constexpr, UNPLACED: tl.constexpr,
):  # fmt: skip
    """s plus the term with coefficients c, where the key has a position. At P = 2, 7 operations for M and g."""
    before = s
    if FORM and FULL:
        for u in tl.static_range(P):
            row = c[u * (u + 1) // 2] * d[0]
            for w in tl.static_range(1, u + 1):
                row += c[u * (u + 1) // 2 + w] * d[w]
            if LINEAR:
                row += c[P * (P + 1) // 2 + u]
            s += row * d[u]
    elif FORM and LINEAR:
        for u in tl.static_range(P):
            s += (c[0] * d[u] + c[1 + u]) * d[u]
    elif FORM:
        s += c[0] * _square(d, P)
    elif LINEAR:
        for u in tl.static_range(P):
            s += c[u] * d[u]
    elif DISTANCE:
        s += c[0] * tl.sqrt(_square(d, P))
    if UNPLACED:
        s = tl.where(placed, s, before)
    return s


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.full((ROWS,), 0.0, tl.float32),)
    return out


@triton.jit
def add_gradients(
    sums, p, ds, d, placed, FORM: tl.constexpr, LINEAR: tl.constexpr, DISTANCE: tl.constexpr, FULL: tl.constexpr,
    P: tl.constexpr, UNPLACED: tl.constexpr,
):  # fmt: skip
    """The coefficients' gradients so far, plus what these keys bring. Flags say which are wanted."""
    out = ()
    if DISTANCE:
        # The sum of ds is 0 but for rounding. One slope's gradient adds up all that, so it is taken out: see the end.
        distance = tl.sqrt(_square(d, P))
        if UNPLACED:
            distance = tl.where(placed, distance, 0.0)
        out = (sums[0] + tl.sum(ds * distance, 1), sums[1] + tl.sum(p * distance, 1), sums[2] + tl.sum(ds, 1))
    if UNPLACED:
        ds = tl.where(placed, ds, 0.0)
    if FORM and FULL:
        for u in tl.static_range(P):
            row = ds * d[u]
            for w in tl.static_range(u + 1):
                out = out + (sums[u * (u + 1) // 2 + w] + tl.sum(row * d[w], 1),)
    elif FORM:
        out = out + (sums[0] + tl.sum(ds * _square(d, P), 1),)
    if LINEAR:
        for u in tl.static_range(P):
            out = out + (sums[((P * (P + 1) // 2 if FULL else 1) if FORM else 0) + u] + tl.sum(ds * d[u], 1),)
    return out
