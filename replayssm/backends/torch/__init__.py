"""Vectorised PyTorch: the default on a CPU without a C compiler.

It takes slots and cursors to the host, which costs nothing on a CPU. On a GPU it is correct but waits for the device
at each call, and its matrix products choose their order of summation by the batch size.
"""

from replayssm.backends.torch.conv import causal_conv1d_update, causal_conv1d_verify
from replayssm.backends.torch.layers import decode_step, verify_step
from replayssm.backends.torch.prefill import causal_conv1d_prefill
from replayssm.backends.torch.rollback import accept, commit
from replayssm.backends.torch.state import advance, materialize, read_state

__all__ = [
    "accept",
    "advance",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "commit",
    "decode_step",
    "materialize",
    "read_state",
    "verify_step",
]
