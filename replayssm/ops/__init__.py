"""Public operators: check, choose a backend, call. Tensors in, tensors out.

Shapes use ``N`` slots, ``B`` rows, ``H_v`` value heads, ``H_k`` key heads, ``R`` ring rows, ``d_v`` and ``d_k`` head
dims. A value head ``i`` uses key head ``i // (H_v // H_k)``. Arguments that name the state are the same everywhere:

=================  ==========================================  ==================================================
argument           shape                                       dtype
=================  ==========================================  ==================================================
checkpoint         ``[N, H_v, d_v, d_k]``                      float32, bfloat16 or float16; slot stride is free
ring_u             ``[N, H_v, R, d_v]``                        float32 or the activation dtype
ring_k             ``[N, H_k, R, d_k]``                        the activation dtype
ring_g             ``[N, H_v, R]``; KDA ``[N, H_v, R, d_k]``   float32
write_pos          ``[N]``, committed records of each slot     int32
checkpoint_slot    ``[N]``, where a slot's checkpoint lies     int32
slots              ``[B]``, negative for a padding row         int32
=================  ==========================================  ==================================================

A decode operator writes the rings, or on a flush the checkpoint of the slot itself; it doesn't move cursors. After
the last layer of a forward, :func:`advance` does, once for all layers. A verify operator runs a window of tokens;
after it :func:`accept`, for each layer, and :func:`commit`, once, take what was accepted of it. Both kinds of forward
may follow each other in any order. Prefill operators take whole prompts, packed, from one state to another:
:mod:`replayssm.ops.prefill`.

``backend`` is one of :data:`BACKENDS`, or ``"auto"``: the fastest that runs where the tensors are, see
:func:`resolve_backend`.
"""

from replayssm.ops.conv import causal_conv1d_update
from replayssm.ops.conv_verify import causal_conv1d_verify
from replayssm.ops.decode import gdn_decode, kda_decode, mamba2_decode
from replayssm.ops.dispatch import BACKENDS, resolve_backend, unavailable_reason
from replayssm.ops.prefill import causal_conv1d_prefill, gdn_prefill, kda_prefill, mamba2_prefill
from replayssm.ops.rollback import accept, commit
from replayssm.ops.state import advance, materialize, read_state
from replayssm.ops.verify import gdn_verify, kda_verify, mamba2_verify
from replayssm.ops.windows import MAX_WINDOW

__all__ = [
    "BACKENDS",
    "MAX_WINDOW",
    "accept",
    "advance",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "commit",
    "gdn_decode",
    "gdn_prefill",
    "gdn_verify",
    "kda_decode",
    "kda_prefill",
    "kda_verify",
    "mamba2_decode",
    "mamba2_prefill",
    "mamba2_verify",
    "materialize",
    "read_state",
    "resolve_backend",
    "unavailable_reason",
]
