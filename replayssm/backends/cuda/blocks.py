"""How a decode step is cut into blocks of threads, and what one of them needs.

A block takes ``rows`` rows of one slot's states, ``[H_v d_v, d_k]``: a part of a head, or several heads that share a
key head. The cut changes no bit of the result, so it may depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

HEAD_K_DIMS = (64, 128, 256)
LARGEST_HEAD_V_DIM = 256
UNITS = 16  # records that a kernel takes at once
#: Rows of states for each multiprocessor from which blocks stay; from which they take half tiles, whole ones again; and
#: from which they are fewer, with a 16-bit state.
FEW_ROWS, SOME_ROWS, MANY_ROWS, VERY_MANY_ROWS = 400, 800, 2500, 6000
MOST_REGISTERS = 168  # that a thread is given
FOLD_REGISTERS = 96  # where it only folds
#: What blocks share, and what of the memory each has reserved.
MULTIPROCESSOR = {"registers": 65536, "shared_bytes": 228 * 1024, "reserved": 1024}


@dataclass(frozen=True)
class Shape:
    """What of a layer and its state decides the cut."""

    channel: bool
    delta: bool
    head_v_dim: int
    head_k_dim: int
    group: int  # value heads of a key head
    num_v_heads: int
    ring_rows: int
    state_dtype: torch.dtype
    update_dtype: torch.dtype = torch.float32  # of the ring; its keys are in the activations'
    window: bool = False  # of one token, in place of a decode step

    def unsupported(self) -> str | None:
        """None if there is a kernel, else why not."""
        if self.head_k_dim not in HEAD_K_DIMS:
            return f"d_k is {self.head_k_dim}: its kernels are for {', '.join(map(str, HEAD_K_DIMS))}"
        if self.head_v_dim % 16 or not 16 <= self.head_v_dim <= LARGEST_HEAD_V_DIM:
            return f"d_v is {self.head_v_dim}: its kernels are for multiples of 16 up to {LARGEST_HEAD_V_DIM}"
        return None

    @property
    def row_bytes(self) -> int:
        return self.head_k_dim * self.state_dtype.itemsize


@dataclass(frozen=True)
class Block:
    """A block of threads: the rows of a tile, the warps that share it, and how many of them a multiprocessor runs."""

    rows: int
    warps: int
    registers: int  # of a thread, at most
    resident: int = 0  # blocks of a multiprocessor, which take tile after tile; 0: each block takes one
    eager: bool = False  # fetch ring rows before it is known which are needed: one wait less, up to twice the bytes

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, shape: Shape, activations: torch.dtype) -> int:
        """The size of `Memory` in config.cuh."""
        d_k, ring, heads = shape.head_k_dim, shape.ring_rows, max(1, self.rows // shape.head_v_dim)
        records = ring * (d_k * activations.itemsize + self.rows * shape.update_dtype.itemsize)
        decays = 4 * d_k * (ring + (3 if shape.window else 1)) if shape.channel else 32
        split = shape.state_dtype.itemsize == 2 and (shape.channel or activations != shape.state_dtype)
        terms = 12 * d_k if split else 8 * shape.state_dtype.itemsize
        unit_rows = -(-ring // UNITS) * UNITS
        small = 2 * d_k * activations.itemsize + terms + 8 * self.rows + 8 * unit_rows + 16 + 24
        after = heads * (16 + (16 if shape.channel else 4 * unit_rows))
        return -(-(self.rows * shape.row_bytes + records + decays + small + after) // 128) * 128

    def fits(self, shape: Shape) -> bool:
        """Whether it divides the heads as config.cuh demands."""
        d_v, heads = shape.head_v_dim, self.rows // shape.head_v_dim
        if d_v % self.rows == 0:
            return True
        return self.rows % d_v == 0 and shape.group % heads == 0 and not shape.channel

    def count(self, items: int, multiprocessors: int) -> int:
        """Blocks of a step with so many tiles in all."""
        return min(items, self.resident * multiprocessors) if self.resident else items


def choose(
    shape: Shape, activations: torch.dtype, batch_rows: int, multiprocessors: int, shared_limit: int
) -> Block | None:
    """The block for a step of so many rows of states in all, or None if none fits a multiprocessor.

    The more rows, the larger the tiles, and from FEW_ROWS on blocks stay and take tile after tile. These are the
    fastest of those that were measured on an H200 (docs/performance.md).
    """
    each, whole = batch_rows // multiprocessors, 32 * 1024 // shape.row_bytes
    at_most = min(64, whole) if each < FEW_ROWS else whole
    if shape.channel and each >= MANY_ROWS:  # a whole head, whose decays cost so much
        at_most = min(128, 2 * whole)
    block = half_tile(shape, whole) if SOME_ROWS <= each < MANY_ROWS else None
    while block is None or block.shared_bytes(shape, activations) > shared_limit:
        if at_most < 16:
            return None
        rows = rows_up_to(shape, at_most)
        block = Block(rows, warps_for(shape, rows), MOST_REGISTERS)
        at_most //= 2
    block = replace(block, eager=each < SOME_ROWS)
    if each < FEW_ROWS:
        return block
    return staying(block, shape, activations, registers_for(shape, block, activations, each))


def choose_fold(
    shape: Shape, keys: torch.dtype, batch_rows: int, multiprocessors: int, shared_limit: int
) -> Block | None:
    """The block that folds so many rows of states, or None. It takes one item: a tile of 32 KiB at most."""
    few = min(batch_rows, FEW_ROWS * multiprocessors)
    block = choose(shape, keys, few, multiprocessors, shared_limit)
    return block and replace(block, registers=FOLD_REGISTERS, resident=0, eager=False)


def half_tile(shape: Shape, whole: int) -> Block | None:
    """Of 16 KiB, where that divides the heads and isn't slower."""
    rows = whole // 2
    if rows < 32 or rows_up_to(shape, rows) != rows or (shape.channel and shape.state_dtype == torch.float32):
        return None
    return Block(rows, rows // 16 if shape.channel else max(2, rows // 32), MOST_REGISTERS)


def registers_for(shape: Shape, block: Block, activations: torch.dtype, each: int) -> int:
    """Of a thread: so many that nothing is spilled, and that a very large batch has one block fewer."""
    if shape.head_k_dim > 128 or activations.itemsize > 2 or shape.state_dtype == torch.float16:
        return 128
    small_state = shape.state_dtype.itemsize == 2
    if shape.channel:
        return 96 if small_state and block.rows <= 64 else 128
    return 128 if small_state and shape.delta and each >= VERY_MANY_ROWS else 96


def staying(block: Block, shape: Shape, activations: torch.dtype, registers: int) -> Block:
    """The same in as many blocks as a multiprocessor of Hopper has room for, which take tile after tile."""
    has = MULTIPROCESSOR
    by_memory = has["shared_bytes"] // (block.shared_bytes(shape, activations) + has["reserved"])
    resident = max(1, min(by_memory, has["registers"] // (registers * block.threads)))
    return replace(block, resident=resident, registers=registers)


def rows_up_to(shape: Shape, at_most: int) -> int:
    """The most rows that divide a head, or the heads of a key head, evenly; multiples of 16."""
    heads = min(1 if shape.channel else shape.group, at_most // shape.head_v_dim)
    for whole in range(heads, 0, -1):
        if shape.group % whole == 0:
            return whole * shape.head_v_dim
    parts = [rows for rows in range(16, shape.head_v_dim + 1, 16) if shape.head_v_dim % rows == 0]
    found = max([rows for rows in parts if rows <= at_most] or parts[:1])
    # Rather a little too much than a small part: 80 rows divide into 16 only.
    return next((rows for rows in parts if found * 2 < at_most < rows < at_most * 2), found)


def warps_for(shape: Shape, rows: int) -> int:
    """Four or more where there are the rows, or eight for a tile of 64 KiB."""
    least = 4 if rows * shape.row_bytes < 64 * 1024 else 8
    per_warp = next((n for n in (32, 16) if rows % n == 0 and rows // n >= least), 8)
    return rows // per_warp


def candidates(shape: Shape, activations: torch.dtype, shared_limit: int) -> list[Block]:
    """Cuts that are worth measuring: every one that divides the layer and fits a multiprocessor."""
    found = []
    for rows, warps in product((16, 32, 64, 128), (2, 4)):
        block = Block(rows, warps, MOST_REGISTERS)
        if rows // warps not in (8, 16, 32) or not block.fits(shape):
            continue
        if block.shared_bytes(shape, activations) <= shared_limit:
            registers = registers_for(shape, block, activations, 0)
            found += [block, replace(block, eager=True), staying(block, shape, activations, registers)]
    return found
