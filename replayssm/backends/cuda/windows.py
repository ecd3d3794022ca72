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
LENGTHS = (1, 2, 4, 8, 16)  # of windows that there are kernels for; others run with the next one's


@dataclass(frozen=True)
class Window:
    """A block of threads: its rows, the warps that share them, and the longest window that it takes."""

    tokens: int
    rows: int
    warps: int
    registers: int  # of a thread, at most
    per_multiprocessor: int = 0  # blocks, which then take one tile after the other; 0: as many as there are tiles
    eager: bool = False  # fetch ring rows before it is known which are needed: one wait less, up to twice the bytes

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, shape: Shape, activations: torch.dtype) -> int:
        """The size of `WindowMemory` in window.cuh."""
        heads, d_k, tokens = max(1, self.rows // shape.head_v_dim), shape.head_k_dim, self.tokens
        columns = tokens * (2 if shape.delta else 1)
        records = -(-shape.ring_rows // UNITS) * UNITS
        parts = d_k // 32 if shape.channel else 1
        pitch = d_k + 64 // shape.state_dtype.itemsize
        bytes_ = self.rows * shape.row_bytes + 2 * tokens * pitch * activations.itemsize
        of_channels = (shape.ring_rows + 3 * columns) * (d_k + 16) + d_k + tokens * d_k
        floats = of_channels if shape.channel else 6 * 4
        floats += max(self.rows * (columns + 4 * (columns >= 8)), parts * records * columns)
        floats += heads * (columns * (1 + tokens) + 2 * records * (columns + 2 * (columns >= 8)) + tokens)
        floats += parts * tokens * columns
        floats += heads * (8 if shape.channel else records + tokens * tokens)
        floats += heads * (2 * tokens + 1) + 2 * tokens
        words = -(-(bytes_ + 4 * (floats + ROW_WORDS)) // 8)
        return -(-(8 * words + 16) // 128) * 128

    def blocks(self, items: int, multiprocessors: int) -> int:
        """How many are launched for so many tiles."""
        return min(items, self.per_multiprocessor * multiprocessors) if self.per_multiprocessor else items

    def fits(self, shape: Shape) -> bool:
        """Whether it divides the heads as window.cuh demands."""
        d_v, heads = shape.head_v_dim, max(1, self.rows // shape.head_v_dim)
        divides = d_v % self.rows == 0 or self.rows % d_v == 0
        per_warp = self.rows // self.warps
        whole = heads == 1 or (not shape.channel and d_v % per_warp == 0)
        return divides and shape.group % heads == 0 and whole and per_warp in (8, 16, 32)


def choose(
    shape: Shape, tokens: int, activations: torch.dtype, batch_rows: int, multiprocessors: int, shared_limit: int
) -> Window | None:
    """The block for a window of so many tokens and rows of states in all, or None if none fits a multiprocessor.

    A large batch takes tiles of 32 KiB, or of a whole head with a channel gate, where a head's decays cost so much, in
    blocks that stay. A small one is cut finer, so that every multiprocessor has its part. Of up to five cuts for each
    layer, state and batch that were measured on an H200, these were the fastest, or within 3 % of it.
    """
    length = next(n for n in LENGTHS if n >= tokens)
    each = batch_rows // multiprocessors
    small = each < FEW_ROWS
    largest = 128 if shape.channel else 32 * 1024 // shape.row_bytes
    at_most = min(16 * 1024 // shape.row_bytes, max(32, each // 2)) if small else largest
    while at_most >= 16:
        rows = rows_up_to(shape, at_most)
        warps = warps_for(shape, rows)
        window = Window(length, rows, warps, registers_for(shape, length, warps), eager=small)
        shared = window.shared_bytes(shape, activations)
        if window.fits(shape) and shared <= shared_limit:
            stay = blocks_that_fit(window, shared) if each >= MANY_ROWS else 0
            return replace(window, per_multiprocessor=stay)
        at_most //= 2
    return None


def warps_for(shape: Shape, rows: int) -> int:
    """Of 32 rows each where that leaves four of them, or two for the additive rule, else of 16."""
    wide = rows % 32 == 0 and rows >= (128 if shape.delta else 64)
    return rows // (32 if wide else 16)


def registers_for(shape: Shape, tokens: int, warps: int) -> int:
    """So many that nothing is spilled, so few that blocks share a multiprocessor."""
    if tokens > 8:
        return 255
    if warps < 4 or shape.head_k_dim > 128 or shape.channel:
        return 168
    if shape.state_dtype == torch.float16:  # its folds are not those of bfloat16
        return 120 if tokens <= 4 else 168
    return 96 if tokens <= 4 else 128


def blocks_that_fit(window: Window, shared_bytes: int) -> int:
    """On a multiprocessor of Hopper at once."""
    by_registers = REGISTERS // (window.threads * window.registers)
    return max(1, min(by_registers, SHARED_BYTES // (shared_bytes + RESERVED_BYTES)))
