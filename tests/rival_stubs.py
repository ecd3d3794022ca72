"""Stand-ins for rivals' files: small ones with their names and signatures, around the recurrence in float64 or ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from replayssm.bench import rivals
from replayssm.state import LayerSpec

SMALL = {
    "gdn": LayerSpec("head", "delta", 2, 4, 16, 8),
    "kda": LayerSpec("channel", "delta", 2, 2, 16, 8),
    "mamba2": LayerSpec("head", "additive", 2, 4, 16, 8),
}

PACKED = """
from run_rival_tests import packed_decode

def fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out,
                                                   ssm_state_indices, use_qk_l2norm_in_kernel=False):
    assert a.dim() == 2 and dt_bias.dim() == 1
    packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, True)

def fused_recurrent_kda_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
                                      use_qk_l2norm_in_kernel=False, lower_bound=None):
    from sglang.kernels.ops.attention import kda_packed_decode
    assert a.dim() == 2 and dt_bias.dim() == 1 and not kda_packed_decode.covered(a, b)
    packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, True)
"""
STATELESS = """
import contextlib
import torch
from run_rival_tests import selective_state_update as update
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

def override_ssm_config(config):
    assert len(config) == 2
    return contextlib.nullcontext()

def selective_state_update(state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None,
                           null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None):
    if cu_seqlens is not None:
        rows = torch.arange(len(cu_seqlens) - 1)
        source = state_batch_indices[rows, num_accepted_tokens.long() - 1]
        for token, own in enumerate(state_batch_indices.T):
            at = cu_seqlens[:-1] + token
            state[own] = state[source]
            y = torch.empty_like(x[at])
            update(state, x[at], dt[at], A, B[at], C[at], D, z, dt_bias, dt_softplus, own, y)
            out[at] = y
            source = own
        return
    assert null_block_id == -1
    shifted = torch.cat([state[:1], state])  # the function that answers takes slot 0 for padding
    update(shifted, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices + 1, out)
    state.copy_(shifted[1:])
"""
CONFIG = """
import contextlib

def override_replayssm_config(kernel, config):
    assert len(config) == (2 if kernel == "mamba2_output_only" else len(get_replayssm_config(kernel)))
    return contextlib.nullcontext()

def get_replayssm_config(kernel, **shape):
    assert kernel in {"gdn_spec_verify", "gdn_spec_flush", "mamba2_spec_verify", "mamba2_spec_flush"}
    return 64, 1, 2, 2
"""
LINEAR = "from replayssm.integrations.sglang import fused_recurrent_linear_replayssm_decode\n"
FORK_GDN = """
from replayssm.integrations.sglang import fused_recurrent_linear_replayssm_decode as decode

def fused_recurrent_gated_delta_rule_replayssm(*, ssm_state_indices, **arguments):
    assert (ssm_state_indices > 0).all()  # slot 0 is padding there
    return decode(**arguments, ssm_state_indices=ssm_state_indices)
"""
MAMBA2 = "from replayssm.integrations.vllm import selective_state_update_replayssm_output_only\n"
GDN_NATIVE = """
import torch
from run_rival_tests import packed_decode

def fused_sigmoid_gating_delta_rule_update(A_log, a, b, dt_bias, q, k, v, initial_state, cu_seqlens, ssm_state_indices,
                                           num_accepted_tokens, use_qk_l2norm_in_kernel=False):
    assert (ssm_state_indices > 0).all()  # slot 0 is padding there
    rows, out = torch.arange(len(cu_seqlens) - 1), torch.empty_like(v[0])
    source = ssm_state_indices[rows, num_accepted_tokens.long() - 1]
    for token, own in enumerate(ssm_state_indices.T):
        at = cu_seqlens[:-1] + token
        mixed = torch.cat([x[0, at].flatten(1) for x in (q, k, v)], dim=1)
        initial_state[own] = initial_state[source]
        y = torch.empty_like(v[0, at])[:, None]
        packed_decode(mixed, a[at], b[at], A_log, dt_bias, k.shape[-1] ** -0.5, initial_state, y, own, True)
        out[at] = y[:, 0]
        source = own
    return out[None], initial_state
"""
GDN_WINDOWS = """
import torch
from replayssm import recurrence
from run_rival_tests import packed_decode

def gdn_replayssm_spec_decode(mixed_qkv, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache, g_cache, out,
                              query_start_loc, ssm_state_indices, write_pos, cache_base, is_flush, max_cache_len,
                              max_spec_len, null_block_id=0):
    rows = d_cache.shape[2]
    assert null_block_id == -1 and rows & (rows - 1) == 0 and rows >= max_cache_len and not cache_base.any()
    for row, slot in enumerate(ssm_state_indices.tolist()):
        end = write_pos[slot]
        assert is_flush[slot] == (end + 2 * max_spec_len > max_cache_len)
        records = (x[slot : slot + 1, :, :end].double() for x in (d_cache, k_cache, g_cache))
        state = recurrence.fold(checkpoint_state[slot : slot + 1].double(), *records)
        if is_flush[slot]:
            checkpoint_state[slot] = state[0]
        for t in range(query_start_loc[row], query_start_loc[row + 1]):
            at, first = slice(t, t + 1), torch.zeros(1, dtype=torch.int32)
            y = torch.empty_like(out[at])[:, None]
            packed_decode(mixed_qkv[at], a[at], b[at], A_log, dt_bias, state.shape[-1] ** -0.5, state, y, first, True)
            out[at] = y[0]
"""
MAMBA2_WINDOWS = """
import torch
from replayssm import recurrence
from run_rival_tests import selective_state_update as update

def selective_state_update_replayssm_spec(state_checkpoint, post_conv_cache, dt_cache, conv_out, dt_spec, A, write_pos,
                                          post_conv_state_pos, is_flush, query_start_loc, state_batch_indices,
                                          max_cache_len, max_spec_len, d_inner, ngroups, dstate, D, dt_bias, out,
                                          bc_pre, null_block_id=0):
    heads, dim = state_checkpoint.shape[1:3]
    rows = post_conv_cache.shape[1]
    assert null_block_id == -1 and rows & (rows - 1) == 0 and rows >= max_cache_len and not post_conv_state_pos.any()
    assert post_conv_cache.shape[2] == d_inner + ngroups * dstate and bc_pre.shape[2] == dt_cache.shape[2] == rows
    for row, slot in enumerate(state_batch_indices.tolist()):
        end = write_pos[slot]
        assert is_flush[slot] == (end + 2 * max_spec_len > max_cache_len)
        size = torch.nn.functional.softplus(dt_cache[slot, :, :end].double() + dt_bias[:, :1])
        x, k = post_conv_cache[slot, :end].double().split([d_inner, ngroups * dstate], dim=1)
        u = x.unflatten(1, (heads, dim)).transpose(0, 1) * size[..., None]
        k = k.unflatten(1, (ngroups, dstate)).transpose(0, 1)
        records = (t[None] for t in (u, k, size * A[:, 0, :1]))
        state = recurrence.fold(state_checkpoint[slot : slot + 1].double(), *records)
        if is_flush[slot]:
            state_checkpoint[slot] = state[0]
        for t in range(query_start_loc[row], query_start_loc[row + 1]):
            at = slice(t, t + 1)
            x, B, C = conv_out[at].split([d_inner, ngroups * dstate, ngroups * dstate], dim=1)
            B, C = B.unflatten(1, (ngroups, dstate)), C.unflatten(1, (ngroups, dstate))
            dt = dt_spec[at, :, None].expand(-1, -1, dim)
            update(state, x.unflatten(1, (heads, dim)), dt, A, B, C, D, None, dt_bias, True, None, out[at])
"""
SOURCES = {
    "fla/fused_recurrent.py": PACKED,
    "linear/fused_recurrent_linear_replayssm.py": LINEAR,
    "fused_recurrent_replayssm.py": FORK_GDN,
    "mamba_ssm.py": STATELESS,
    "replayssm_config.py": CONFIG,
    "selective_state_update_replayssm_output_only.py": MAMBA2,
    "fused_sigmoid_gating.py": GDN_NATIVE,
    "gdn_replayssm_spec_decode.py": GDN_WINDOWS,
    "selective_state_update_replayssm_spec.py": MAMBA2_WINDOWS,
}


def forget_rivals() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "vllm")]:
        del sys.modules[name]


def files_in(folder: Path) -> Iterator[Path]:
    """Every file that the projects need, from :data:`SOURCES` or empty; for a fixture to yield from."""
    for project in rivals.PROJECTS:
        for name in project.files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(next((text for end, text in SOURCES.items() if name.endswith(end)), ""))
    forget_rivals()
    yield folder
    forget_rivals()
