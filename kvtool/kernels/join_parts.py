"""Second launch of attention over slots: joins the parts, and counts the weights meanwhile."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "parts"])
def join_parts_kernel(
    logits,
    part_mean,
    part_top,
    part_total,
    part_seen,
    sinks,
    valid,
    out,
    attention_sum,
    square_sum,
    count,
    above_average,
    sinks_batch,
    sums_batch,
    sums_head,
    sums_heads,
    group,
    slots,
    parts,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ATTENTION_SUM: tl.constexpr,
    SQUARE_SUM: tl.constexpr,
    COUNT: tl.constexpr,
    ABOVE_AVERAGE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Compute the weights of a tile of slots of one KV head, and with the first tile the output."""
    own = tl.program_id(0) % sums_heads
    batch = (tl.program_id(0) // sums_heads).to(tl.int64)
    places = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there = places < slots
    part = tl.arange(0, PARTS_WIDTH)
    real = part < parts
    columns = tl.arange(0, VALUE_WIDTH)
    counts = 1.0
    if RAGGED:
        counts = tl.load(valid + batch).to(tl.float32)
    mean = tl.zeros((KEYS,), tl.float32)
    stored = there
    seen = 0.0
    for member in range(group):
        head = own * group + member
        line = batch * sums_heads * group + head
        tops = tl.load(part_top + line * parts + part, mask=real, other=float("-inf"))
        totals = tl.load(part_total + line * parts + part, mask=real, other=0.0)
        seen = tl.sum(tl.load(part_seen + line * parts + part, mask=real, other=0.0), 0)
        top = tl.max(tops, 0)
        if SINKS:
            sink = tl.load(sinks + batch * sinks_batch + head).to(tl.float32)
            top = tl.maximum(top, sink)
        shares = tl.exp(tops - top)
        total = tl.sum(totals * shares, 0)
        if SINKS:
            total += tl.exp(sink - top)
        found = tl.load(logits + line * slots + places, mask=there, other=float("-inf"))
        stored = there & (found > float("-inf"))
        weights = tl.exp(found - top) / total * counts
        mean += weights
        if WEIGHTS:
            tl.store(logits + line * slots + places, weights, mask=there)
        if tl.program_id(1) == 0:
            values = tl.load(
                part_mean + (line * parts + part)[:, None] * VALUE_DIM + columns[None, :],
                mask=real[:, None] & (columns < VALUE_DIM)[None, :],
                other=0.0,
            )
            joined = tl.sum(values * shares[:, None], 0) / total
            tl.store(
                out + line * VALUE_DIM + columns,
                joined.to(out.dtype.element_ty),
                mask=columns < VALUE_DIM,
            )
    mean = mean / group

    line = batch * sums_batch + own.to(tl.int64) * sums_head + places
    if ATTENTION_SUM:
        old = tl.load(attention_sum + line, mask=there, other=0.0)
        tl.store(attention_sum + line, old + mean, mask=there)
    if SQUARE_SUM:
        old = tl.load(square_sum + line, mask=there, other=0.0)
        tl.store(square_sum + line, old + mean * mean, mask=there)
    if COUNT:
        old = tl.load(count + line, mask=there, other=0.0)
        tl.store(count + line, old + stored.to(tl.float32) * counts, mask=there)
    if ABOVE_AVERAGE:
        old = tl.load(above_average + line, mask=there, other=0.0)
        above = (mean * seen >= LEAST).to(tl.float32)
        tl.store(above_average + line, old + above, mask=there)
