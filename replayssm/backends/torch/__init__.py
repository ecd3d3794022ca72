"""Vectorised PyTorch: the default on CPU.

It takes slots and cursors to the host, which costs nothing on a CPU. On a GPU it is correct but waits for the device
at each call, and its matrix products choose their order of summation by the batch size.
"""

from replayssm.backends.torch.conv import causal_conv1d_update
from replayssm.backends.torch.layers import gdn_decode, kda_decode, mamba2_decode
from replayssm.backends.torch.state import advance, materialize, read_state

__all__ = ["advance", "causal_conv1d_update", "gdn_decode", "kda_decode", "mamba2_decode", "materialize", "read_state"]
