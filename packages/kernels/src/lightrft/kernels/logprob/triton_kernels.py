# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, TID253
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `linear_logprob`; imported only by lightrft.kernels.logprob.triton_launch.

`scale` is 1 / temperature. Row offsets are 64-bit: tokens * vocab may exceed 2^31.
"""

import triton
import triton.language as tl

# Counts that change from call to call, for which specialised code would be recompiled. Counts that
# bound a contiguous dimension are left out: unless the compiler knows that they are multiples of
# 16, their masks split every 16-byte access into single elements.
COUNTS = ("num_splits", "first_column", "row_start", "total_rows", "split_start", "total_splits")
MINUS_INFINITY = tl.constexpr(float("-inf"))
# Widens 16-bit operands before a product: otherwise the interpreter multiplies their bits.
UPCAST = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _scaled_logits(x, bias_pointer, columns, is_column, scale, softcap, HAS_BIAS, HAS_SOFTCAP):
    """Logits of products [.., columns]; `columns` broadcasts against x."""
    if HAS_BIAS:
        x += tl.load(bias_pointer + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        capped = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
        x = tl.where(x == float("-inf"), x, capped)
    return x * scale


@triton.jit
def _nothing(BLOCK_ROWS: tl.constexpr):
    """(maximum, sum, weighted sum) of no column at all."""
    zeros = tl.zeros((BLOCK_ROWS,), tl.float32)
    return tl.full((BLOCK_ROWS,), MINUS_INFINITY, tl.float32), zeros, zeros


@triton.jit
def _fold(z, is_column, maximum, exp_sum, weighted_sum, AXIS: tl.constexpr, NEEDS_ENTROPY):
    """Running (maximum, sum, weighted sum) after one more tile of logits z, all.

    Columns outside the vocabulary are -inf, not 0: a zero logit would add probability.
    """
    z = tl.where(is_column, z, MINUS_INFINITY)
    new_maximum = tl.maximum(maximum, tl.max(z, AXIS))
    # -inf minus -inf is not a number.
    reference = tl.where(new_maximum == MINUS_INFINITY, 0.0, new_maximum)
    shifted = z - tl.expand_dims(reference, AXIS)
    weights = tl.exp(shifted)
    drop = maximum - reference
    keep = tl.exp(drop)
    if NEEDS_ENTROPY:
        moved = tl.where(exp_sum > 0, drop, 0.0) * exp_sum
        terms = weights * tl.where(weights > 0, shifted, 0.0)
        weighted_sum = keep * (weighted_sum + moved) + tl.sum(terms, AXIS)
    exp_sum = keep * exp_sum + tl.sum(weights, AXIS)
    return new_maximum, exp_sum, weighted_sum


@triton.jit
def _store_partial(
    partials, plane, row_offsets, is_row, maximum, exp_sum, weighted_sum, NEEDS_ENTROPY
):
    tl.store(partials + row_offsets, maximum, mask=is_row)
    tl.store(partials + plane + row_offsets, exp_sum, mask=is_row)
    if NEEDS_ENTROPY:
        tl.store(partials + 2 * plane + row_offsets, weighted_sum, mask=is_row)


@triton.jit
def _tile_position(tile, num_rows, num_splits, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(row block, split): GROUP row blocks share a panel of the weight while it is in L2."""
    num_row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    tiles_per_group = GROUP * num_splits
    first = (tile // tiles_per_group) * GROUP
    group_rows = tl.minimum(num_row_blocks - first, GROUP)
    within = tile % tiles_per_group
    return first + within % group_rows, within // group_rows


@triton.jit
def _product_tile(
    hidden,
    weight,
    rows,
    columns,
    is_row,
    is_column,
    size,
    stride_h,
    stride_w,
    BLOCK_SIZE: tl.constexpr,
):
    """hidden[rows] @ weight[columns].T in float32; out-of-range rows and columns give 0."""
    product = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    inner = tl.arange(0, BLOCK_SIZE)
    left_pointers = hidden + rows.to(tl.int64)[:, None] * stride_h + inner[None, :]
    right_pointers = weight + columns.to(tl.int64)[None, :] * stride_w + inner[:, None]
    for first in range(0, size, BLOCK_SIZE):
        is_inner = inner < size - first
        left = tl.load(left_pointers, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        right = tl.load(right_pointers, mask=is_column[None, :] & is_inner[:, None], other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        product = tl.dot(left, right, product, input_precision="ieee")
        left_pointers += BLOCK_SIZE
        right_pointers += BLOCK_SIZE
    return product


@triton.jit(do_not_specialize=COUNTS)
def forward_partials(
    hidden,
    weight,
    bias,
    partials,
    num_rows,
    num_columns,
    size,
    num_splits,
    stride_h,
    stride_w,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NEEDS_ENTROPY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Statistics of one row block over one split of the vocabulary: partials [3, splits, rows].

    One program runs TILES_PER_SPLIT tiles and merges them in registers. Nothing depends on the
    number of rows, so a row's result does not either.
    """
    row_block, split = _tile_position(tl.program_id(0), num_rows, num_splits, BLOCK_ROWS, GROUP)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    maximum, exp_sum, weighted_sum = _nothing(BLOCK_ROWS)
    first = split * TILES_PER_SPLIT * BLOCK_COLUMNS
    last = tl.minimum(first + TILES_PER_SPLIT * BLOCK_COLUMNS, num_columns)
    for start in range(first, last, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        is_column = columns < num_columns
        x = _product_tile(
            hidden, weight, rows, columns, is_row, is_column, size, stride_h, stride_w, BLOCK_SIZE
        )
        z = _scaled_logits(
            x, bias, columns[None, :], is_column[None, :], scale, softcap, HAS_BIAS, HAS_SOFTCAP
        )
        maximum, exp_sum, weighted_sum = _fold(
            z, is_column[None, :], maximum, exp_sum, weighted_sum, 1, NEEDS_ENTROPY
        )
    offsets = tl.cast(split, tl.int64) * num_rows + rows
    plane = tl.cast(num_splits, tl.int64) * num_rows
    _store_partial(partials, plane, offsets, is_row, maximum, exp_sum, weighted_sum, NEEDS_ENTROPY)


@triton.jit(do_not_specialize=COUNTS)
def merge_partials(
    partials,
    maximum_out,
    exp_sum_out,
    weighted_sum_out,
    num_rows,
    num_splits,
    NEEDS_ENTROPY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merges partials [3, splits, rows]: BLOCK_SPLITS at a time, in the order of splits.

    A block of splits is loaded at once, so that many loads are in flight.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    plane = tl.cast(num_splits, tl.int64) * num_rows
    maximum, exp_sum, weighted_sum = _nothing(BLOCK_ROWS)
    for first in range(0, num_splits, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        mask = (splits < num_splits)[:, None] & is_row[None, :]
        pointers = partials + splits.to(tl.int64)[:, None] * num_rows + rows[None, :]
        part = tl.load(pointers, mask=mask, other=MINUS_INFINITY)
        part_sum = tl.load(pointers + plane, mask=mask, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part, 0))
        # -inf minus -inf is not a number.
        reference = tl.where(new_maximum == MINUS_INFINITY, 0.0, new_maximum)
        drop = part - reference[None, :]
        weights = tl.exp(drop)
        own_drop = maximum - reference
        keep = tl.exp(own_drop)
        if NEEDS_ENTROPY:
            part_weighted = tl.load(pointers + 2 * plane, mask=mask, other=0.0)
            moved = tl.where(part_sum > 0, drop, 0.0) * part_sum
            own_moved = tl.where(exp_sum > 0, own_drop, 0.0) * exp_sum
            weighted_sum = keep * (weighted_sum + own_moved)
            weighted_sum += tl.sum(weights * (part_weighted + moved), 0)
        exp_sum = keep * exp_sum + tl.sum(weights * part_sum, 0)
        maximum = new_maximum
    tl.store(maximum_out + rows, maximum, mask=is_row)
    tl.store(exp_sum_out + rows, exp_sum, mask=is_row)
    tl.store(weighted_sum_out + rows, weighted_sum, mask=is_row)


@triton.jit(do_not_specialize=COUNTS)
def target_products(
    hidden,
    weight,
    targets,
    out,
    num_rows,
    num_columns,
    size,
    stride_h,
    stride_w,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """out[row] = hidden[row] . weight[target] in float32, or 0 where the target is not here."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    target = tl.load(targets + rows, mask=is_row, other=-1)
    is_here = is_row & (target >= 0) & (target < num_columns)
    inner = tl.arange(0, BLOCK_SIZE)
    total = tl.zeros((BLOCK_ROWS, BLOCK_SIZE), tl.float32)
    left_rows = hidden + rows.to(tl.int64)[:, None] * stride_h
    right_rows = weight + target.to(tl.int64)[:, None] * stride_w
    for first in range(0, size, BLOCK_SIZE):
        offsets = first + inner
        mask = is_here[:, None] & (offsets < size)[None, :]
        left = tl.load(left_rows + offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        right = tl.load(right_rows + offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        total += left * right
    tl.store(out + rows, tl.sum(total, 1), mask=is_row)


@triton.jit(do_not_specialize=COUNTS)
def fold_products(
    products,
    bias,
    partials,
    num_rows,
    num_columns,
    stride,
    scale,
    softcap,
    row_start,
    total_rows,
    split_start,
    total_splits,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NEEDS_ENTROPY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    COLUMNS_PER_SPLIT: tl.constexpr,
):
    """Statistics of products [columns, rows], written to partials [3, total_splits, total_rows].

    Rows of logits run along the contiguous dimension, so that every access is a full line.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    is_row = rows < num_rows
    maximum, exp_sum, weighted_sum = _nothing(BLOCK_ROWS)
    first = split * COLUMNS_PER_SPLIT
    last = tl.minimum(first + COLUMNS_PER_SPLIT, num_columns)
    for start in range(first, last, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        is_column = (columns < num_columns)[:, None]
        pointers = products + columns.to(tl.int64)[:, None] * stride + rows[None, :]
        x = tl.load(pointers, mask=is_column & is_row[None, :], other=0.0).to(tl.float32)
        z = _scaled_logits(
            x, bias, columns[:, None], is_column, scale, softcap, HAS_BIAS, HAS_SOFTCAP
        )
        maximum, exp_sum, weighted_sum = _fold(
            z, is_column, maximum, exp_sum, weighted_sum, 0, NEEDS_ENTROPY
        )
    offsets = tl.cast(split_start + split, tl.int64) * total_rows + row_start + rows
    plane = tl.cast(total_splits, tl.int64) * total_rows
    _store_partial(partials, plane, offsets, is_row, maximum, exp_sum, weighted_sum, NEEDS_ENTROPY)


@triton.jit
def _gradient(
    z,
    values,
    rows,
    columns,
    is_row,
    first_column,
    scale,
    softcap,
    AXIS: tl.constexpr,
    HAS_SOFTCAP,
    HAS_GRAD_LOGPROB,
    HAS_GRAD_ENTROPY,
):
    """Gradient of the products of a tile of one chunk from its logits z; columns run along AXIS.

    Values of rows: targets, maximum, log_sum, entropy, grad_logprobs, grad_entropy.
    """
    targets, maximum, log_sum, entropy, grad_logprobs, grad_entropy = values
    target = tl.load(targets + rows, mask=is_row, other=-1) - first_column
    row_maximum = tl.load(maximum + rows, mask=is_row, other=0.0)
    row_log_sum = tl.load(log_sum + rows, mask=is_row, other=0.0)
    row_entropy = row_maximum
    upstream = row_maximum
    entropy_upstream = row_maximum
    if HAS_GRAD_LOGPROB:
        upstream = tl.load(grad_logprobs + rows, mask=is_row, other=0.0)
    if HAS_GRAD_ENTROPY:
        row_entropy = tl.load(entropy + rows, mask=is_row, other=0.0)
        entropy_upstream = tl.load(grad_entropy + rows, mask=is_row, other=0.0)
    is_target = tl.expand_dims(columns, 1 - AXIS) == tl.expand_dims(target, AXIS)
    row_maximum = tl.expand_dims(row_maximum, AXIS)
    row_log_sum = tl.expand_dims(row_log_sum, AXIS)
    row_entropy = tl.expand_dims(row_entropy, AXIS)
    upstream = tl.expand_dims(upstream, AXIS)
    entropy_upstream = tl.expand_dims(entropy_upstream, AXIS)
    # Recomputed products may be rounded differently; no probability is above 1.
    log_p = tl.minimum((z - row_maximum) - row_log_sum, 0.0)
    p = tl.exp(log_p)
    grad = tl.zeros_like(z)
    if HAS_GRAD_LOGPROB:
        # 1 - p in float32 and rounded once, to keep the digits of a near-certain target.
        rest = tl.where(log_p > -0.01, -log_p * (1.0 + log_p * (0.5 + log_p / 6.0)), 1.0 - p)
        grad = upstream * tl.where(is_target, rest, -p)
    if HAS_GRAD_ENTROPY:
        grad -= entropy_upstream * p * tl.where(p > 0, log_p + row_entropy, 0.0)
    if HAS_SOFTCAP:
        ratio = tl.maximum(z / (scale * softcap), -1.0)  # -inf has a gradient of 0
        grad *= 1.0 - ratio * ratio
    return grad * scale


@triton.jit(do_not_specialize=COUNTS)
def grad_products(
    hidden,
    weight,
    bias,
    targets,
    maximum,
    log_sum,
    entropy,
    grad_logprobs,
    grad_entropy,
    out,
    num_rows,
    num_columns,
    num_padded,
    size,
    first_column,
    stride_h,
    stride_w,
    stride_out,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_LOGPROB: tl.constexpr,
    HAS_GRAD_ENTROPY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Recomputes products of one chunk and stores their gradient: out [rows, columns].

    Rows of `out` are padded to num_padded elements, so that whole vectors are stored also where the
    chunk ends; what is stored behind its end means nothing.
    """
    num_column_blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    row_block, block = _tile_position(
        tl.program_id(0), num_rows, num_column_blocks, BLOCK_ROWS, GROUP
    )
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row = rows < num_rows
    is_column = columns < num_columns
    x = _product_tile(
        hidden, weight, rows, columns, is_row, is_column, size, stride_h, stride_w, BLOCK_SIZE
    )
    z = _scaled_logits(
        x, bias, columns[None, :], is_column[None, :], scale, softcap, HAS_BIAS, HAS_SOFTCAP
    )
    values = (targets, maximum, log_sum, entropy, grad_logprobs, grad_entropy)
    grad = _gradient(
        z,
        values,
        rows,
        columns,
        is_row,
        first_column,
        scale,
        softcap,
        1,
        HAS_SOFTCAP,
        HAS_GRAD_LOGPROB,
        HAS_GRAD_ENTROPY,
    )
    pointers = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    is_stored = is_row[:, None] & (columns < num_padded)[None, :]
    tl.store(pointers, grad.to(out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=COUNTS)
def grad_of_stored_products(
    products,
    bias,
    targets,
    maximum,
    log_sum,
    entropy,
    grad_logprobs,
    grad_entropy,
    out,
    num_rows,
    num_columns,
    first_column,
    stride,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_LOGPROB: tl.constexpr,
    HAS_GRAD_ENTROPY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Gradient of products [columns, rows], one element each; `out` may be `products`."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row = rows < num_rows
    is_column = (columns < num_columns)[:, None]
    offsets = columns.to(tl.int64)[:, None] * stride + rows[None, :]
    mask = is_column & is_row[None, :]
    x = tl.load(products + offsets, mask=mask, other=0.0).to(tl.float32)
    z = _scaled_logits(x, bias, columns[:, None], is_column, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    values = (targets, maximum, log_sum, entropy, grad_logprobs, grad_entropy)
    grad = _gradient(
        z,
        values,
        rows,
        columns,
        is_row,
        first_column,
        scale,
        softcap,
        0,
        HAS_SOFTCAP,
        HAS_GRAD_LOGPROB,
        HAS_GRAD_ENTROPY,
    )
    tl.store(out + offsets, grad.to(out.dtype.element_ty), mask=mask)
