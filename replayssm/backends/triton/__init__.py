"""Portable GPU kernels in Triton; on a CPU they run in Triton's interpreter, for tests."""

from replayssm.backends.triton.conv import causal_conv1d_update
from replayssm.backends.triton.conv_prefill import causal_conv1d_prefill
from replayssm.backends.triton.conv_verify import causal_conv1d_verify
from replayssm.backends.triton.decode import bind_decode, decode_step
from replayssm.backends.triton.rollback import accept, commit
from replayssm.backends.triton.state import advance, materialize, read_state
from replayssm.backends.triton.verify import verify_step

__all__ = [
    "accept",
    "advance",
    "bind_decode",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "commit",
    "decode_step",
    "materialize",
    "read_state",
    "verify_step",
]
