"""How a decode step is cut into blocks of threads, and what one of them needs.

A block takes ``rows`` rows of one slot's states, ``[H_v d_v, d_k]``: a part of a head, or several heads that share a
key head. The cut changes no bit of the result, so it may depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_K_DIMS = (64, 128, 256)
LARGEST_HEAD_V_DIM = 256
UNITS = 16  # records that a kernel takes at once
#: Rows of float32 states on a multiprocessor from which two warps for 64 rows are faster than four.
MANY_ROWS = 3000
STATE_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


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

    def unsupported(self) -> str | None:
        """None if there is a kernel, else why not."""
        if self.head_k_dim not in HEAD_K_DIMS:
            return f"d_k is {self.head_k_dim}: its kernels are for {', '.join(map(str, HEAD_K_DIMS))}"
        if self.head_v_dim % 16 or not 16 <= self.head_v_dim <= LARGEST_HEAD_V_DIM:
            return f"d_v is {self.head_v_dim}: its kernels are for multiples of 16 up to {LARGEST_HEAD_V_DIM}"
        return None

    @property
    def row_bytes(self) -> int:
        return self.head_k_dim * STATE_BYTES[self.state_dtype]


@dataclass(frozen=True)
class Block:
    """A block of threads: the rows of a tile, the warps that share it, how many tiles it takes, how many at once."""

    rows: int
    warps: int
    tiles: int
    stages: int
    registers: int  # of a thread, at most
    eager: bool = False  # fetch ring rows before it is known which are needed: one wait less, up to twice the bytes

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def span(self) -> int:
        return self.rows * self.tiles

    def shared_bytes(self, shape: Shape, activations: torch.dtype) -> int:
        """The size of `Memory` in config.cuh."""
        heads = 1 if shape.channel else max(1, self.span // shape.head_v_dim)
        key_heads = max(1, heads // shape.group)
        records = -(-shape.ring_rows // UNITS) * UNITS
        keys = 4 * shape.head_k_dim * (shape.ring_rows + 1) if shape.channel else 32
        vectors = 2 * shape.head_k_dim * activations.itemsize * key_heads
        split = shape.state_dtype.itemsize == 2 and (shape.channel or activations != shape.state_dtype)
        terms = key_heads * (12 * shape.head_k_dim if split else 8 * shape.state_dtype.itemsize)
        decays = heads * (16 + (16 if shape.channel else 4 * records))
        small = 8 * self.rows + key_heads * (8 * records + 16) + decays + 8 * self.stages
        return -(-(self.stages * self.rows * shape.row_bytes + keys + vectors + terms + small) // 128) * 128

    def fits(self, shape: Shape) -> bool:
        """Whether it divides the heads as config.cuh demands."""
        d_v, heads = shape.head_v_dim, max(1, self.span // shape.head_v_dim)
        whole = self.span % d_v == 0 and shape.num_v_heads % heads == 0
        of_keys = shape.channel or shape.group % heads == 0 or heads % shape.group == 0
        return (d_v % self.span == 0 or whole) and of_keys and self.stages <= self.tiles


def choose(
    shape: Shape, activations: torch.dtype, batch_rows: int, multiprocessors: int, shared_limit: int
) -> Block | None:
    """The block for a step of so many rows of states in all, or None if none fits a multiprocessor.

    A large batch takes blocks of 32 KiB, or of a whole head with a channel gate, where a head's decays cost so much. A
    small one is cut finer, so that every multiprocessor has its part. These are the fastest of up to nine cuts that
    were measured on an H200 (docs/performance.md); there, several tiles in a block were slower than one.
    """
    wide = shape.state_dtype == torch.float32 and not shape.channel
    largest = 128 if shape.channel else 32 * 1024 // shape.row_bytes
    at_most = max(32, min(largest, 2 * batch_rows // (7 * multiprocessors)))  # 3.5 blocks on each multiprocessor
    large = at_most == largest and (not wide or batch_rows > MANY_ROWS * multiprocessors)
    while at_most >= 16:
        rows = rows_up_to(shape, at_most)
        warps = 2 if large and wide and rows == 64 else warps_for(rows)
        # So many registers that nothing is spilled, so few that blocks share a multiprocessor.
        tight = warps > 2 and shape.head_k_dim <= 128 and not (shape.channel and shape.state_dtype == torch.float32)
        block = Block(rows, warps, 1, 1, 104 if tight else 168, eager=not large)
        if block.shared_bytes(shape, activations) <= shared_limit:
            return block
        at_most //= 2
    return None


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


def warps_for(rows: int) -> int:
    """Four or more where there are the rows."""
    per_warp = next((n for n in (32, 16) if rows % n == 0 and rows // n >= 4), 8)
    return rows // per_warp
