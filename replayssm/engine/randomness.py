"""Noise that depends on a request's seed, a sample's index, a place in the sequence and a token: on nothing else.

A token is drawn as the largest of score + Gumbel noise. The noise is a hash, not the state of a generator, so a draw
is the same in any batch, in any row, after a preemption and in a verify window.

All hashes are of 32 bits and written with int32, whose products wrap. n rows, V vocabulary size.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

import torch
from torch import Tensor

from replayssm.engine.params import SamplingParams

GOLDEN = -0x61C88647  # 2**32 divided by the golden ratio, odd: multiples of it are spread evenly
LARGEST = 1 - 2**-24  # below 1 in float32


def draw_seed(params: SamplingParams) -> int:
    """A request's seed: its own, or one from the system. Kept with the request, it gives its draws again."""
    return secrets.randbits(63) if params.seed is None else params.seed


def stream_key(seed: int, index: int) -> tuple[int, int]:
    """Two int32 that stand for sample `index` of a request with this seed."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=8).digest()
    first, second = struct.unpack("<ii", digest)
    return first, second


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """``[V]`` int32, one for each token."""
    return _mix(torch.arange(vocab_size, dtype=torch.int32, device=device) * GOLDEN)


def gumbel(hashes: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Noise ``[n, V]`` fp32, from −2.9 to 22.

    Args:
        hashes: ``[V]``, of the tokens.
        keys: ``[n, 2]`` int32, see :func:`stream_key`.
        positions: ``[n]``, the place in the sequence of the token that is drawn.
    """
    place = _mix(keys[:, 0] + positions.to(torch.int32) * GOLDEN)
    bits = _mix((hashes ^ place[:, None]).mul_((keys[:, 1] | 1)[:, None]))
    # Half steps from 0 to 1. Large noise comes from small numbers, which float32 holds finely.
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2**-31).clamp_max_(LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser, in place: a bijection in which each bit of x reaches each bit of the result."""
    x ^= _shifted(x, 16)
    x *= -0x7A143595
    x ^= _shifted(x, 13)
    x *= -0x3D4D51CB
    x ^= _shifted(x, 16)
    return x


def _shifted(x: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)
