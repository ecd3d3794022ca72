"""How a verify window is cut into blocks of threads, and what one of them needs.

A tile is ``rows`` rows of one slot's states, a part of a head, or several heads that share a key head. The cut changes
no bit of the result, so it may depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from replayssm.backends.cuda.blocks import UNITS, Shape, rows_up_to

#: Of a multiprocessor of Hopper, and what each block takes beside its own.
REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65536, 228 * 1024, 1024
ROW_WORDS = 20  # of `rows` in window.cuh
#: Rows of states on a multiprocessor: below the first, tiles are smaller; from the second on, blocks stay.
FEW_ROWS, MANY_ROWS = 700, 2000
LENGTHS = (2, 4, 8, 16)  # of windows that there are kernels for; others run with the next one's, a token in decode's


@dataclass(frozen=True)
class Window:
    """A block of threads: its rows, the warps that share them, and the longest window that it takes."""

    tokens: int
    rows: int
    warps: int
    registers: int  # of a thread, at most
    per_multiprocessor: int = 0  # blocks, which then take one item after the other; 0: as many as there are items
    span: int = 1  # tiles of an item
    eager: bool = False  # fetch ring rows before it is known which are needed: one wait less, up to twice the bytes

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, shape: Shape, activations: torch.dtype) -> int:
        """The size of `WindowMemory` in window.cuh."""
        d_k, tokens, ring, x = shape.head_k_dim, self.tokens, shape.ring_rows, activations.itemsize
        heads, columns = max(1, self.span * self.rows // shape.head_v_dim), tokens * (2 if shape.delta else 1)
        records, parts = -(-ring // UNITS) * UNITS, d_k // 32 if shape.channel else 1
        small_state, parts_of_tile = shape.state_dtype.itemsize == 2, 8 * max(1, self.rows // shape.head_v_dim)
        tile = self.rows * shape.row_bytes + 16 * (parts_of_tile - 1)
        keys = (2 * tokens + (1 if shape.channel else ring)) * (d_k * x + 16)
        term = 2 if shape.state_dtype == torch.bfloat16 else 4
        if shape.channel or activations != shape.state_dtype or not small_state:
            terms = 3 if term == 2 else 1 if x == 2 and not shape.channel else 2
            keys += terms * columns * (d_k + (8 if small_state else 4)) * term
        else:
            keys += 8 * term
        keys += -(tile + keys) % 16
        words = (ring + columns) * (d_k + 16) + d_k + tokens * d_k if shape.channel else 4 * 4
        pairs = shape.update_dtype == torch.bfloat16
        words += heads * records * (3 * columns // 2 if pairs else 2 * (columns + 2 * (columns >= 8)))
        words += heads * (columns * (1 + tokens) + tokens) + parts * (ring + tokens) * columns
        words += heads * (8 if shape.channel else records + tokens * tokens)
        words += heads * (2 * tokens + 1) + 2 * tokens + ROW_WORDS + 1
        return -(-(8 * -(-(tile + keys + 4 * words) // 8) + 8) // 128) * 128

    def items(self, tiles: int, multiprocessors: int) -> tuple[int, int]:
        """How many of `span` tiles there are, behind which each tile is one, and how many blocks take them."""
        if not self.per_multiprocessor:
            whole = tiles // self.span
            return whole, whole + tiles % self.span
        blocks = self.per_multiprocessor * multiprocessors
        whole = tiles // self.span // blocks * blocks
        return whole, min(blocks, tiles)

    def fits(self, shape: Shape) -> bool:
        """Whether it divides the heads as window.cuh demands."""
        d_v, heads = shape.head_v_dim, max(1, self.rows // shape.head_v_dim)
        divides = d_v % self.rows == 0 or self.rows % d_v == 0
        per_warp = self.rows // self.warps
        whole = heads == 1 or (not shape.channel and d_v % per_warp == 0)
        spans = shape.group * d_v % (self.span * self.rows) == 0
        return divides and shape.group % heads == 0 and whole and spans and per_warp in (8, 16, 32)


def choose(
    shape: Shape, tokens: int, activations: torch.dtype, batch_rows: int, multiprocessors: int, shared_limit: int
) -> Window | None:
    """The block for a window of so many tokens and rows of states in all, or None if none fits a multiprocessor.

    A large batch takes tiles of 32 KiB, several of a key head in an item, in blocks that stay. A small one is cut
    finer, so that every multiprocessor has its part. Of the cuts that were measured on an H200 for each layer, state
    and batch, these were the fastest, or within 3 % of it.
    """
    length = next(n for n in LENGTHS if n >= tokens)
    each, whole = batch_rows // multiprocessors, 32 * 1024 // shape.row_bytes
    small = each < FEW_ROWS
    largest = 128 if shape.channel else whole
    at_most = min(64, whole, max(32, each // 2)) if small else largest
    while at_most >= 16:
        rows = rows_up_to(shape, at_most)
        warps = warps_for(shape, rows)
        window = Window(length, rows, warps, registers_for(shape, length, warps), eager=small)
        if each >= MANY_ROWS:
            window = staying(replace(window, span=span_of(shape, rows)), shape, activations)
        if window.fits(shape) and window.shared_bytes(shape, activations) <= shared_limit:
            return window
        at_most //= 2
    return None


def span_of(shape: Shape, rows: int) -> int:
    """Tiles of an item: two where they share a key head."""
    tiles, head = shape.group * shape.head_v_dim // rows, shape.head_v_dim
    return 2 if tiles % 2 == 0 and (2 * rows % head == 0 or head % (2 * rows) == 0) else 1


def warps_for(shape: Shape, rows: int) -> int:
    """Of 32 rows each where that leaves four of them; of 16 with a channel gate, where they have more to work out."""
    wide = min(rows, shape.head_v_dim) % 32 == 0 and rows >= 128 and not shape.channel
    return rows // (32 if wide else 16)


def registers_for(shape: Shape, tokens: int, warps: int) -> int:
    """So many that nothing is spilled, so few that blocks share a multiprocessor."""
    if tokens > 8:
        wanted = 255
    elif shape.channel and warps >= 8 and shape.head_k_dim <= 128:
        wanted = 80 if tokens == 4 and shape.state_dtype == torch.bfloat16 else 128
    else:
        wanted = 168 if warps < 4 or tokens > 4 or shape.head_k_dim > 128 else 128
    return min(wanted, REGISTERS // (32 * warps) // 8 * 8)


def staying(window: Window, shape: Shape, activations: torch.dtype) -> Window:
    """The same in as many blocks as a multiprocessor of Hopper has room for, which take item after item."""
    by_memory = SHARED_BYTES // (window.shared_bytes(shape, activations) + RESERVED_BYTES)
    by_registers = REGISTERS // (window.threads * window.registers)
    return replace(window, per_multiprocessor=max(1, min(by_registers, by_memory)))
