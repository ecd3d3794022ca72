"""How a decode step is cut into blocks of threads, and what one of them needs.

A block takes ``rows`` rows of one slot's states, ``[H_v d_v, d_k]``: a part of a head, or several heads that share a
key head. The cut changes no bit of the result, so it may depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_K_DIMS = (64, 128, 256)
LARGEST_HEAD_V_DIM = 256
STATE_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True)
class Shape:
    """What of a layer and its state decides the cut."""

    channel: bool
    delta: bool
    head_v_dim: int
    head_k_dim: int
    group: int  # value heads of a key head
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
    """A block of threads: its rows of the state, and its warps."""

    rows: int
    warps: int
    registers: int  # of a thread, at most
    flush_passes: int = 2  # of a warp's reads, what a flush keeps in registers
    eager: bool = False  # fetch ring rows before it is known which are needed: one wait less, up to twice the bytes

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def heads(self, shape: Shape) -> int:
        return max(1, self.rows // shape.head_v_dim)

    def shared_bytes(self, shape: Shape) -> int:
        """As `Memory` in decode.cu lays it out."""
        heads = self.heads(shape)
        vectors = 2 + (1 + shape.ring_rows) * shape.channel
        pairs = self.rows + heads * shape.ring_rows
        barriers = self.warps + (self.warps + pairs) % 2
        decays = 0 if shape.channel else heads * shape.ring_rows
        small = 8 * (pairs + barriers) + 16 * (1 + heads) + 4 * decays
        return self.rows * shape.row_bytes + 4 * vectors * shape.head_k_dim + small


def choose(shape: Shape, batch_rows: int, multiprocessors: int, shared_limit: int) -> Block | None:
    """The block for a step of so many rows of states in all, or None if none fits a multiprocessor.

    A large batch takes blocks of 32 KiB of a 16-bit state or 64 KiB of a float32 one; a small one is cut finer, so that
    every multiprocessor has its part.
    """
    largest = (64 if shape.state_dtype == torch.float32 else 32) * 1024 // shape.row_bytes
    at_most = max(32, min(largest, -(-batch_rows // (4 * multiprocessors))))
    while at_most >= 16:
        block = cut(shape, rows_up_to(shape, at_most), eager=at_most < largest)
        if block.shared_bytes(shape) <= shared_limit:
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
    return max([rows for rows in parts if rows <= at_most] or parts[:1])


def cut(shape: Shape, rows: int, *, eager: bool = False) -> Block:
    """Warps for a block, four or more where it has the rows, and what bounds their registers."""
    per_warp = next((n for n in (32, 16) if rows % n == 0 and rows // n >= 4), 8)
    wide = shape.state_dtype == torch.float32
    return Block(rows, rows // per_warp, 128 if wide else 96, 4 if wide else 2, eager)
