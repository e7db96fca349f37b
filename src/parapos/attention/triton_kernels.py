"""The device code of the Triton kernel: attention in tiles, with score terms computed from D = r_j - r_i on the way.

Three passes: `forward`; `backward_query`, which walks over keys for dq and the terms' gradients; `backward_key`, which
walks over queries for dk and dv. Both recompute the weights from the largest score and the sum of exponentials that
`forward` keeps of each query. Every sum has one owner and one order, so results repeat to the last bit. All is float32
but the factors of matrix products.
Scores are in units of log 2: factors named `..2` hold log2(e). n queries, N keys, P position dims; tuples named `.._at`
are strides, 0 where one entry serves all. r and low are the positions of queries, key_r and key_low those of keys.
`padding` hides keys from all queries of a head, `mask` from single queries. BY_HAND is for Triton's interpreter.
A program looks at all keys (or queries), or at the list of its block: `entries` from `starts` on, in blocks of LIST.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .triton_terms import add_gradients, add_terms, coefficients, differences, positions, zeros


@triton.jit
def _dot(a, b, BY_HAND: tl.constexpr):
    if BY_HAND:  # the interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _cast(x, dtype: tl.constexpr, BY_HAND: tl.constexpr):
    if BY_HAND and dtype == tl.bfloat16:  # the interpreter would cut off digits, where GPUs round to nearest even
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def _offsets(stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.arange(0, ROWS).to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _tile(pointers, valid, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of SIZE numbers, 0 beyond that and in rows that are not valid."""
    keep = valid[:, None]
    if SIZE < WIDTH:
        keep = keep & (tl.arange(0, WIDTH) < SIZE)[None, :]
    return tl.load(pointers, mask=keep, other=0.0)


@triton.jit
def _store(pointers, value, valid, SIZE: tl.constexpr, WIDTH: tl.constexpr, BY_HAND: tl.constexpr):
    """Writes such rows, and returns what the type written to could not hold."""
    keep = valid[:, None]
    if SIZE < WIDTH:
        keep = keep & (tl.arange(0, WIDTH) < SIZE)[None, :]
    rounded = _cast(value, pointers.dtype.element_ty, BY_HAND)
    tl.store(pointers, rounded, mask=keep)
    return value - rounded.to(tl.float32)


@triton.jit
def _base(pointer, at, b, h):
    return pointer + b * at[0] + h * at[1]


@triton.jit
def _list(starts, pair, first, n, N, LIST: tl.constexpr):
    """Where the list of the block that begins with row `first` of n begins, and how many columns of N it has."""
    begin, span = tl.full((), 0, tl.int64), N
    if starts is not None:
        at = starts + pair.to(tl.int64) * tl.cdiv(n, LIST) + first // LIST
        begin = tl.load(at)
        span = ((tl.load(at + 1) - begin) * LIST).to(tl.int32)
    return begin, span


@triton.jit
def _column(entries, begin, at, LIST: tl.constexpr):
    """Which column stands at a place of a list; without a list they stand in their order."""
    if entries is not None:
        at = tl.load(entries + begin + at // LIST) * LIST + at % LIST
    return at


@triton.jit
def _unpadded(padding, padding_at, b, h, columns, valid):
    """Which of these keys exist and are no padding."""
    if padding is not None:
        pointers = _base(padding, padding_at, b, h) + columns.to(tl.int64) * padding_at[3]
        valid = valid & (tl.load(pointers, mask=valid, other=0) != 0)
    return valid


@triton.jit
def _add_tables(s, bias, bias_at, mask, mask_at, b, h, rows, columns, inside, weight2):
    """s plus the bias, and -inf where the mask hides a key. One of rows and columns lies across the tile, one down."""
    rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    if bias is not None:
        pointers = _base(bias, bias_at, b, h) + rows * bias_at[2] + columns * bias_at[3]
        s += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * weight2
    if mask is not None:
        pointers = _base(mask, mask_at, b, h) + rows * mask_at[2] + columns * mask_at[3]
        s = tl.where(tl.load(pointers, mask=inside, other=0) != 0, s, float("-inf"))
    return s


@triton.jit
def forward(
    q, q_at, k, k_at, v, v_at, padding, padding_at, mask, mask_at, r, low, r_at, key_r, key_low, key_r_at,
    M, M_at, g, g_at, slopes, bias, bias_at, out, rest, out_at, norm, starts, entries,
    heads, n, N, scale2, weight2,
    P: tl.constexpr, FULL: tl.constexpr, UNPLACED: tl.constexpr, BY_HAND: tl.constexpr, SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_I queries; and for the backward passes what rounding took from them, and the log-sum-exp."""
    tiles = tl.cdiv(n, BLOCK_I)
    block, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    one = tl.full((), 1, tl.int64)
    first = block * BLOCK_I
    rows = first + tl.arange(0, BLOCK_I)
    real = rows < n
    q_n, k_n, v_n, out_n = one * q_at[2], one * k_at[2], one * v_at[2], one * out_at[2]
    keys_at, values_at = _offsets(k_n, BLOCK_J, WIDTH), _offsets(v_n, BLOCK_J, VALUE_WIDTH)
    queries = _tile(_base(q, q_at, b, h) + first * q_n + _offsets(q_n, BLOCK_I, WIDTH), real, SIZE, WIDTH)
    k, v = _base(k, k_at, b, h), _base(v, v_at, b, h)
    if r is not None:
        here, placed = positions(r, low, b * r_at, rows, real, P, 1)
        c = coefficients(M, M_at, g, g_at, slopes, b, h, rows, real, placed, scale2, P, FULL, 1)

    top = tl.full((BLOCK_I,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_I,), 0.0, tl.float32)
    sums = tl.full((BLOCK_I, VALUE_WIDTH), 0.0, tl.float32)
    begin, span = _list(starts, pair, first, n, N, LIST)
    for at in range(0, span, BLOCK_J):
        start = _column(entries, begin, at, LIST)
        columns = start + tl.arange(0, BLOCK_J)
        exists = columns < N
        valid = _unpadded(padding, padding_at, b, h, columns, exists)
        keys = _tile(k + start * k_n + keys_at, valid, SIZE, WIDTH)
        s = _dot(queries, tl.trans(keys), BY_HAND) * scale2
        if r is not None:
            there, seen = positions(key_r, key_low, b * key_r_at, columns, exists, P, 0)
            d = differences(s, there, here, P, low is not None, BY_HAND)
            s = add_terms(s, d, c, seen, M is not None, g is not None, slopes is not None, FULL, P, UNPLACED)
        inside = real[:, None] & exists[None, :]
        s = _add_tables(s, bias, bias_at, mask, mask_at, b, h, rows[:, None], columns[None, :], inside, weight2)
        s = tl.where(valid[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen no key yet
        p = tl.exp2(s - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(p, 1)
        values = _tile(v + start * v_n + values_at, valid, VALUE_SIZE, VALUE_WIDTH)
        sums = sums * shrink[:, None] + _dot(_cast(p, values.dtype, BY_HAND), values, BY_HAND)
        top = higher

    empty = total == 0.0
    sums = sums / tl.where(empty, 1.0, total)[:, None]
    offsets = b * out_at[0] + h * out_at[1] + first * out_n + _offsets(out_n, BLOCK_I, VALUE_WIDTH)
    left = _store(out + offsets, sums, real, VALUE_SIZE, VALUE_WIDTH, BY_HAND)
    if rest is not None:
        _store(rest + offsets, left, real, VALUE_SIZE, VALUE_WIDTH, BY_HAND)
    if norm is not None:  # an empty row keeps infinity, so that the backward passes find weights of 0
        line = ((b * heads + h) * n + rows) * 2
        tl.store(norm + line, tl.where(empty, float("inf"), top), mask=real)
        tl.store(norm + line + 1, 1.0 / tl.where(empty, 1.0, total), mask=real)


@triton.jit
def backward_query(
    q, q_at, k, k_at, v, v_at, padding, padding_at, mask, mask_at, r, low, r_at, key_r, key_low, key_r_at,
    M, M_at, g, g_at, slopes, bias, bias_at, out, rest, out_at, norm, dout, dout_at, delta, dq, dq_at, dM, dg, dslopes,
    starts, entries, heads, n, N, scale, scale2, weight2,
    P: tl.constexpr, FULL: tl.constexpr, UNPLACED: tl.constexpr, BY_HAND: tl.constexpr, SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_I queries and their coefficients; delta, which `backward_key` needs; a share of dslopes."""
    tiles = tl.cdiv(n, BLOCK_I)
    block, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    one = tl.full((), 1, tl.int64)
    first = block * BLOCK_I
    rows = first + tl.arange(0, BLOCK_I)
    real = rows < n
    q_n, k_n, v_n, dq_n = one * q_at[2], one * k_at[2], one * v_at[2], one * dq_at[2]
    out_n, dout_n = one * out_at[2], one * dout_at[2]
    keys_at, values_at = _offsets(k_n, BLOCK_J, WIDTH), _offsets(v_n, BLOCK_J, VALUE_WIDTH)
    queries = _tile(_base(q, q_at, b, h) + first * q_n + _offsets(q_n, BLOCK_I, WIDTH), real, SIZE, WIDTH)
    k, v = _base(k, k_at, b, h), _base(v, v_at, b, h)
    offsets = b * out_at[0] + h * out_at[1] + first * out_n + _offsets(out_n, BLOCK_I, VALUE_WIDTH)
    y = _tile(out + offsets, real, VALUE_SIZE, VALUE_WIDTH).to(tl.float32)
    if rest is not None:
        y += _tile(rest + offsets, real, VALUE_SIZE, VALUE_WIDTH).to(tl.float32)
    dy = _base(dout, dout_at, b, h) + first * dout_n + _offsets(dout_n, BLOCK_I, VALUE_WIDTH)
    dy = _tile(dy, real, VALUE_SIZE, VALUE_WIDTH)
    mean = tl.sum(y * dy.to(tl.float32), 1)
    line = (b * heads + h) * n + rows
    tl.store(delta + line, mean, mask=real)
    top = tl.load(norm + line * 2, mask=real, other=float("inf"))
    share = tl.load(norm + line * 2 + 1, mask=real, other=0.0)
    if r is not None:
        here, placed = positions(r, low, b * r_at, rows, real, P, 1)
        c = coefficients(M, M_at, g, g_at, slopes, b, h, rows, real, placed, scale2, P, FULL, 1)

    FORMS: tl.constexpr = (P * (P + 1) // 2 if FULL else 1) if dM is not None else 0
    LINEARS: tl.constexpr = P if dg is not None else 0
    SLOPES: tl.constexpr = 3 if dslopes is not None else 0
    moments = zeros(FORMS + LINEARS + SLOPES, BLOCK_I)
    sums = tl.full((BLOCK_I, WIDTH), 0.0, tl.float32)
    begin, span = _list(starts, pair, first, n, N, LIST)
    for at in range(0, span, BLOCK_J):
        start = _column(entries, begin, at, LIST)
        columns = start + tl.arange(0, BLOCK_J)
        exists = columns < N
        valid = _unpadded(padding, padding_at, b, h, columns, exists)
        keys = _tile(k + start * k_n + keys_at, valid, SIZE, WIDTH)
        values = _tile(v + start * v_n + values_at, valid, VALUE_SIZE, VALUE_WIDTH)
        s = _dot(queries, tl.trans(keys), BY_HAND) * scale2
        if r is not None:
            there, seen = positions(key_r, key_low, b * key_r_at, columns, exists, P, 0)
            d = differences(s, there, here, P, low is not None, BY_HAND)
            s = add_terms(s, d, c, seen, M is not None, g is not None, slopes is not None, FULL, P, UNPLACED)
        inside = real[:, None] & exists[None, :]
        s = _add_tables(s, bias, bias_at, mask, mask_at, b, h, rows[:, None], columns[None, :], inside, weight2)
        p = tl.exp2(tl.where(valid[None, :], s, float("-inf")) - top[:, None]) * share[:, None]
        ds = p * (_dot(dy, tl.trans(values), BY_HAND) - mean[:, None])
        if FORMS + LINEARS + SLOPES > 0:
            moments = add_gradients(moments, p, ds, d, seen, FORMS > 0, LINEARS > 0, SLOPES > 0, FULL, P, UNPLACED)
        sums += _dot(_cast(ds, keys.dtype, BY_HAND), keys, BY_HAND)

    pointers = _base(dq, dq_at, b, h) + first * dq_n + _offsets(dq_n, BLOCK_I, WIDTH)
    _store(pointers, sums * scale, real, SIZE, WIDTH, BY_HAND)
    if FORMS + LINEARS + SLOPES > 0:
        anywhere = tl.reshape(placed, (BLOCK_I,))
    if FORMS > 0 and FULL:
        for u in tl.static_range(P):
            for w in tl.static_range(u + 1):
                value = tl.where(anywhere, moments[u * (u + 1) // 2 + w] * scale, 0.0)
                tl.store(dM + line * (P * P) + u * P + w, value, mask=real)
                if w < u:
                    tl.store(dM + line * (P * P) + w * P + u, value, mask=real)
    elif FORMS > 0:
        tl.store(dM + line, tl.where(anywhere, moments[0] * scale, 0.0), mask=real)
    if LINEARS > 0:
        for u in tl.static_range(P):
            tl.store(dg + line * P + u, tl.where(anywhere, moments[FORMS + u] * scale, 0.0), mask=real)
    if SLOPES > 0:
        own = tl.where(anywhere & real, moments[2] * moments[1] - moments[0], 0.0)
        tl.store(dslopes + pair * tiles + block, tl.sum(own, 0))


@triton.jit
def backward_key(
    q, q_at, k, k_at, v, v_at, padding, padding_at, mask, mask_at, r, low, r_at, key_r, key_low, key_r_at,
    M, M_at, g, g_at, slopes, bias, bias_at, norm, dout, dout_at, delta, dk, dk_at, dv, dv_at,
    starts, entries, heads, n, N, scale, scale2, weight2,
    P: tl.constexpr, FULL: tl.constexpr, UNPLACED: tl.constexpr, BY_HAND: tl.constexpr, SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_J keys and values. Scores stand transposed: keys down, queries across."""
    tiles = tl.cdiv(N, BLOCK_J)
    block, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    one = tl.full((), 1, tl.int64)
    first = block * BLOCK_J
    columns = first + tl.arange(0, BLOCK_J)
    real = columns < N
    valid = _unpadded(padding, padding_at, b, h, columns, real)
    q_n, k_n, v_n, dout_n = one * q_at[2], one * k_at[2], one * v_at[2], one * dout_at[2]
    dk_n, dv_n = one * dk_at[2], one * dv_at[2]
    queries_at, dy_at = _offsets(q_n, BLOCK_I, WIDTH), _offsets(dout_n, BLOCK_I, VALUE_WIDTH)
    keys = _tile(_base(k, k_at, b, h) + first * k_n + _offsets(k_n, BLOCK_J, WIDTH), valid, SIZE, WIDTH)
    values = _base(v, v_at, b, h) + first * v_n + _offsets(v_n, BLOCK_J, VALUE_WIDTH)
    values = _tile(values, valid, VALUE_SIZE, VALUE_WIDTH)
    q, dout = _base(q, q_at, b, h), _base(dout, dout_at, b, h)
    line = (b * heads + h) * n
    if r is not None:
        there, seen = positions(key_r, key_low, b * key_r_at, columns, real, P, 1)

    key_sums = tl.full((BLOCK_J, WIDTH), 0.0, tl.float32)
    value_sums = tl.full((BLOCK_J, VALUE_WIDTH), 0.0, tl.float32)
    begin, span = _list(starts, pair, first, N, n, LIST)
    for at in range(0, span, BLOCK_I):
        start = _column(entries, begin, at, LIST)
        rows = start + tl.arange(0, BLOCK_I)
        inside = rows < n
        queries = _tile(q + start * q_n + queries_at, inside, SIZE, WIDTH)
        dy = _tile(dout + start * dout_n + dy_at, inside, VALUE_SIZE, VALUE_WIDTH)
        top = tl.load(norm + (line + rows) * 2, mask=inside, other=float("inf"))
        share = tl.load(norm + (line + rows) * 2 + 1, mask=inside, other=0.0)
        mean = tl.load(delta + line + rows, mask=inside, other=0.0)
        s = _dot(keys, tl.trans(queries), BY_HAND) * scale2
        if r is not None:
            here, placed = positions(r, low, b * r_at, rows, inside, P, 0)
            c = coefficients(M, M_at, g, g_at, slopes, b, h, rows, inside, placed, scale2, P, FULL, 0)
            d = differences(s, there, here, P, low is not None, BY_HAND)
            s = add_terms(s, d, c, seen, M is not None, g is not None, slopes is not None, FULL, P, UNPLACED)
        both = real[:, None] & inside[None, :]
        s = _add_tables(s, bias, bias_at, mask, mask_at, b, h, rows[None, :], columns[:, None], both, weight2)
        p = tl.exp2(tl.where(valid[:, None], s, float("-inf")) - top[None, :]) * share[None, :]
        value_sums += _dot(_cast(p, dy.dtype, BY_HAND), dy, BY_HAND)
        ds = p * (_dot(values, tl.trans(dy), BY_HAND) - mean[None, :])
        key_sums += _dot(_cast(ds, queries.dtype, BY_HAND), queries, BY_HAND)

    pointers = _base(dk, dk_at, b, h) + first * dk_n + _offsets(dk_n, BLOCK_J, WIDTH)
    _store(pointers, key_sums * scale, real, SIZE, WIDTH, BY_HAND)
    pointers = _base(dv, dv_at, b, h) + first * dv_n + _offsets(dv_n, BLOCK_J, VALUE_WIDTH)
    _store(pointers, value_sums, real, VALUE_SIZE, VALUE_WIDTH, BY_HAND)
