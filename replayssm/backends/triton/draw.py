"""Drawing tokens in one kernel: a program goes over one row of logits as often as what the row asks makes it.

The order of work is that of :mod:`replayssm.engine.sampler`, which says what comes out. Nothing is sorted: what top_k
and top_p keep is found by halving the range in which the lowest kept score lies, with exact sums of what lies above.
Chunks of the vocabulary whose largest score is below aren't read again.

B rows of a batch, T places of each, V vocabulary size, R rows of tables, E edits of a row, C rows with masks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLED, FILTERED, PENALISED, EDITED, CONSTRAINED = (tl.constexpr(1 << bit) for bit in range(5))
BLOCK, WARPS = 2048, 16
MAX_ROUNDS = tl.constexpr(200)  # of a search
HALVINGS = tl.constexpr(40)  # of scores; then of their bits
UNIT = tl.constexpr(2.0**40)  # as in replayssm.engine.distribution
LARGEST = tl.constexpr(1 - 2**-24)  # as in replayssm.engine.randomness
NUMBERS = ["stride_row", "stride_place", "stride_mask", "stride_mask_place", "batch", "width", "vocab", "chunks"]
NUMBERS += ["num_edits", "count"]
NO_KEY = tl.constexpr(-(2**31) - 1)


class Tables(NamedTuple):
    """What is asked. A tensor that no row needs may be any other of its dtype.

    Attributes:
        rows: int32 ``[4, B]``: a row's line in the tables, its kind (bits of the names above), its line among the
            counts and among the masks.
        numbers: fp32 ``[R, 6]``: temperature, top_p, log of min_p, presence, frequency and repetition penalty.
        integers: int32 ``[R, 3]``: two numbers of the random stream, top_k.
        hashes: int32 ``[V]``, of the tokens.
        seen: int32 ``[., V]``: twice how often the output has a token, and 1 if the prompt has it.
        edit_tokens, edit_values, edit_ends: int64, fp32 and int32 ``[R, E]``.
        masks: int32 ``[C, T, ⌈V/32⌉]``.
    """

    rows: Tensor
    numbers: Tensor
    integers: Tensor
    hashes: Tensor
    seen: Tensor
    edit_tokens: Tensor
    edit_values: Tensor
    edit_ends: Tensor
    masks: Tensor


def draw(logits: Tensor, tables: Tables, positions: Tensor, *, count: bool) -> tuple[Tensor, Tensor]:
    """One token for each row and place.

    Args:
        logits: fp32, bf16 or fp16 ``[B, T, V]``, contiguous in V.
        tables: what the rows ask.
        positions: int ``[B]``, the place in the sequence of each row's first token.
        count: add the tokens to those that were seen, where a row has penalties; T is 1 then.

    Returns:
        Tokens int64 ``[B, T]``, and their scores fp32 ``[B, T]``, NaN where a score is NaN that may be drawn.
    """
    batch, width, vocab_size = logits.shape
    tokens = torch.empty(batch, width, dtype=torch.int64, device=logits.device)
    scores = torch.empty(batch, width, device=logits.device)
    chunks = triton.cdiv(vocab_size, BLOCK)
    _draw_kernel[batch * width,](
        logits,
        *logits.stride()[:2],
        tokens,
        scores,
        positions,
        *tables,
        *tables.masks.stride()[:2],
        torch.empty(batch * width, chunks, device=logits.device),
        batch,
        width,
        vocab_size,
        chunks,
        tables.edit_tokens.shape[1],
        int(count),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return tokens, scores


@triton.jit(do_not_specialize=NUMBERS)  # else it is compiled anew for batches of one, of sixteen, …
def _draw_kernel(
    logits, stride_row, stride_place, tokens, scores, positions, rows, numbers, integers, hashes, seen, edit_tokens,
    edit_values, edit_ends, masks, stride_mask, stride_mask_place, maxima, batch, width, vocab, chunks, num_edits,
    count, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, place = program // width, program % width
    line = tl.load(rows + row).to(tl.int64)
    kind = tl.load(rows + batch + row)
    seen += tl.load(rows + 2 * batch + row).to(tl.int64) * vocab
    masks += tl.load(rows + 3 * batch + row).to(tl.int64) * stride_mask + place * stride_mask_place
    logits += row.to(tl.int64) * stride_row + place * stride_place
    maxima += program.to(tl.int64) * chunks
    position = tl.load(positions + row).to(tl.int32) + place
    numbers += line * 6
    edit_tokens += line * num_edits
    edit_values += line * num_edits
    edit_ends += line * num_edits

    row_of = (
        logits, vocab, kind, numbers, seen, masks, edit_tokens, edit_values, edit_ends, num_edits, position, maxima,
    )  # fmt: skip

    lowest = float("-inf")
    if kind & FILTERED:
        lowest = _lowest(row_of, integers + line * 3 + 2, chunks, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.arange(0, BLOCK)
    first = tl.load(integers + line * 3).to(tl.uint32, bitcast=True)
    second = tl.load(integers + line * 3 + 1).to(tl.uint32, bitcast=True)
    key = _mix(first + position.to(tl.uint32) * 0x9E3779B9)
    for chunk in range(chunks):
        x = _scores(row_of, chunk * BLOCK, BLOCK)
        offsets = chunk * BLOCK + tl.arange(0, BLOCK)
        if kind & SAMPLED:
            hashed = tl.load(hashes + offsets, mask=offsets < vocab, other=0).to(tl.uint32, bitcast=True)
            x = tl.where(x < lowest, float("-inf"), x + _gumbel((hashed ^ key) * (second | 1)))
        better = (x > best) | _is_nan(x)  # which no other is better than
        best = tl.where(better, x, best)
        at = tl.where(better, offsets, at)
    broken = tl.max(_is_nan(best).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(_is_nan(best), float("-inf"), best), 0)
    token = tl.minimum(tl.min(tl.where(best == largest, at, vocab), 0), vocab - 1)
    tl.store(tokens + program, token.to(tl.int64))
    tl.store(scores + program, tl.where(broken, float("nan"), largest))
    if (count != 0) & ((kind & PENALISED) != 0):
        tl.store(seen + token, tl.load(seen + token) + 2)


@triton.jit
def _scores(row_of, start, BLOCK: tl.constexpr):
    """Logits of a chunk as they are drawn from, minus infinity behind the vocabulary's end."""
    logits, vocab, kind, numbers, seen, masks, edit_tokens, edit_values, edit_ends, num_edits, position, _ = row_of
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < vocab
    x = tl.load(logits + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    if kind & PENALISED:
        presence, frequency, repetition = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
        times = tl.load(seen + offsets, mask=inside, other=0)
        x = tl.where(times > 0, tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition), x)
        x = x - (times >> 1).to(tl.float32) * frequency
        x = x - tl.where(times >= 2, presence, 0.0)
    if kind & EDITED:
        for edit in range(num_edits):
            token = tl.load(edit_tokens + edit)
            if (token >= start) & (token < start + BLOCK):
                value = tl.where(tl.load(edit_ends + edit) <= position, 0.0, tl.load(edit_values + edit))
                x = tl.where(offsets == token, x + value, x)
    if kind & CONSTRAINED:
        bits = tl.load(masks + offsets // 32, mask=inside, other=0) >> (offsets % 32)
        x = tl.where((bits & 1) == 0, float("-inf"), x)
    if kind & SAMPLED:
        x = tl.div_rn(x, tl.load(numbers) + tl.zeros_like(x))
    return x


@triton.jit
def _lowest(row_of, top_k_ptr, chunks, BLOCK: tl.constexpr):
    """The lowest score that may be drawn; see :func:`replayssm.engine.distribution.threshold`."""
    numbers, maxima = row_of[3], row_of[11]
    top = float("-inf")
    nans = tl.zeros([BLOCK], tl.int32)
    for chunk in range(chunks):
        x = _scores(row_of, chunk * BLOCK, BLOCK)
        nans |= _is_nan(x).to(tl.int32)
        largest = tl.max(x, 0)
        tl.store(maxima + chunk, largest)
        top = tl.maximum(top, largest)
    tl.debug_barrier()  # all see the chunks' maxima
    top_k, top_p = tl.load(top_k_ptr), tl.load(numbers + 1)
    if (tl.max(nans, 0) > 0) | (tl.abs(top) == float("inf")):  # a search would find nothing, and take long
        top_k, top_p = top_k * 0, top_p * 0 + 1
    lowest = top + tl.load(numbers + 2)
    kept = top_k.to(tl.int64)
    kth = NO_KEY + tl.zeros([], tl.int64)
    if top_k > 0:
        kth = _find(row_of, kept, chunks, top, False, BLOCK)
        lowest = tl.maximum(lowest, _value(kth))
    if top_p < 1:
        above, mass, _lowest_key = _above(row_of, kth, chunks, top, True, BLOCK)
        if top_k > 0:  # of equal ones at the border, as many as make k
            mass += (kept - above) * _weights(_value(kth), top)
        wanted = tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        lowest = tl.maximum(lowest, _value(_find(row_of, wanted, chunks, top, True, BLOCK)))
    return lowest


@triton.jit
def _find(row_of, wanted, chunks, top, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the lowest score above which less than `wanted` lies: scores, or their weights."""
    # Above `low` lies as much as is wanted, above `high` less.
    low = NO_KEY + tl.zeros([], tl.int64)
    high = _key(top)
    following = low  # the lowest key above `low` that a score has
    step = top * 0 + 1.0
    rounds = 0
    while (high - low > 1) & (following < high) & (rounds < MAX_ROUNDS):
        # It is near the top, mostly: steps from there double until they reach over it. Then the range is halved, and
        # as many scores may be equal, every other time the lowest one in it is tried.
        middle = top - step
        if low != NO_KEY:
            middle = 0.5 * (_value(low) + _value(high))
        pivot = _key(middle)
        if (rounds >= HALVINGS) | (pivot <= low) | (pivot >= high):
            pivot = (low + high) >> 1
        if (low != NO_KEY) & (rounds % 2 == 1):
            pivot = following
        count, mass, smallest = _above(row_of, pivot, chunks, top, WEIGHTED, BLOCK)
        amount = count
        if WEIGHTED:
            amount = mass
        if amount < wanted:
            high = pivot
        else:
            low = pivot
            following = smallest
        step *= 2
        rounds += 1
    return high


@triton.jit
def _above(row_of, pivot, chunks, top, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """How many scores have a key above the pivot, their weights, and the smallest of their keys."""
    vocab, maxima = row_of[1], row_of[11]
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    smallest = tl.full([BLOCK], 2**31 - 1, tl.int64)
    for chunk in range(chunks):
        if _key(tl.load(maxima + chunk)) > pivot:
            x = _scores(row_of, chunk * BLOCK, BLOCK)
            keys = _key(x)
            above = (keys > pivot) & (chunk * BLOCK + tl.arange(0, BLOCK) < vocab)
            count += above.to(tl.int32)
            smallest = tl.where(above, tl.minimum(smallest, keys), smallest)
            if WEIGHTED:
                mass += tl.where(above, _weights(x, top), 0)
    return tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0), tl.min(smallest, 0)


@triton.jit
def _is_nan(x):
    return x != x  # noqa: PLR0124


@triton.jit
def _key(x):
    """float32 as whole numbers of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The score of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, top):
    """exp(x) in units of which the likeliest token has 2**40."""
    return (tl.exp(x - top) * UNIT).to(tl.int64)


@triton.jit
def _gumbel(bits):
    """As :func:`replayssm.engine.randomness.gumbel`; the logarithm near 1 in float64, where it has all its digits."""
    uniform = (_mix(bits) & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32)
    uniform = tl.minimum((uniform + 0.5) * (2.0**-31), LARGEST)
    return -tl.log((-tl.log(1.0 - uniform.to(tl.float64))).to(tl.float32))


@triton.jit
def _mix(x):
    """MurmurHash3's finaliser."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)
