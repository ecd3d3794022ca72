"""Portable GPU kernels in Triton; on a CPU they run in Triton's interpreter, for tests."""

from replayssm.backends.triton.conv import causal_conv1d_update
from replayssm.backends.triton.decode import gdn_decode, kda_decode, mamba2_decode
from replayssm.backends.triton.state import advance, materialize, read_state

__all__ = ["advance", "causal_conv1d_update", "gdn_decode", "kda_decode", "mamba2_decode", "materialize", "read_state"]
