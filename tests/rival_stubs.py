"""Stand-ins for rivals' files: small ones with their names and signatures, around the recurrence in float64 or ours.

And `replayssm bench` on small shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replayssm import cli
from replayssm.bench import measure
from replayssm.bench.rivals.projects import PROJECTS
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
KDA_CUDA = """
from run_rival_tests import packed_decode
from sglang.kernels.jit.utils import cache_once, is_arch_support_pdl, load_jit, make_cpp_args

def covered(*arguments):
    return True

def kda_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, num_q_heads,
                      lower_bound=None):
    assert f"<{make_cpp_args(8, True)}>" == "<8, true>" and a.dim() == 2 and dt_bias.dim() == 1
    assert mixed_qkv.shape[1] == initial_state.shape[-1] * (2 * num_q_heads) + out[0].numel()
    packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, True)
"""
FLA_GDN = """
import torch
from fla.backends import dispatch
from fla.ops.utils.op import exp
from fla.utils import IS_NVIDIA, input_guard
from run_rival_tests import packed_decode

def fused_recurrent_gated_delta_rule_fwd(q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
                                         use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, state_v_first):
    assert output_final_state and state_v_first and use_beta_sigmoid_in_kernel and initial_state.is_contiguous()
    state, out, rows = initial_state.clone(), torch.empty_like(v), torch.arange(len(v), dtype=torch.int32)
    mixed = torch.cat([x[:, 0].flatten(1) for x in (q, k, v)], dim=1)
    packed_decode(mixed, g[:, 0], beta[:, 0], A_log, dt_bias, scale, state, out, rows, use_qk_l2norm_in_kernel)
    return out, state
"""
FLA_KDA = """
import torch
from fla.backends import dispatch
from run_rival_tests import packed_decode

@dispatch("kda")
def fused_recurrent_kda_fwd(q, k, v, g, beta, A_log, dt_bias, scale, initial_state, inplace_final_state, state_v_first,
                            ssm_state_indices, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                            use_beta_sigmoid_in_kernel, out):
    assert inplace_final_state and state_v_first and use_gate_in_kernel and use_beta_sigmoid_in_kernel
    mixed = torch.cat([x[:, 0].flatten(1) for x in (q, k, v)], dim=1)
    packed_decode(mixed, g[:, 0].flatten(1), beta[:, 0], A_log, dt_bias.flatten(), scale, initial_state, out,
                  ssm_state_indices, use_qk_l2norm_in_kernel)
    return out, initial_state
"""
MAMBA_SSM = """
import torch
from run_rival_tests import selective_state_update as update

def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    out = torch.empty_like(x)
    shifted = torch.cat([state[:1], state])  # the function that answers takes slot 0 for padding
    update(shifted, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices + 1, out)
    state.copy_(shifted[1:])
    return out
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

_overrides = {}

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
FLASHINFER_GDN = """
import torch
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from flashinfer.api_logging import flashinfer_api
from flashinfer.jit.core import logger
from flashinfer.jit.cute_dsl_core import build_and_load_cute_dsl_kernel
from flashinfer.trace.templates.gdn import gated_delta_rule_decode_trace
from flashinfer.utils import get_compute_capability
from run_rival_tests import packed_decode

@cute.kernel
def kernel(state: cute.Tensor, tile: cutlass.Constexpr[int]):
    cpasync.copy(state)

@flashinfer_api(trace=gated_delta_rule_decode_trace)
def gated_delta_rule_decode_pretranspose(q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
                                         initial_state, initial_state_indices, backend):
    assert state is None and backend == "flashinfer" and q.shape[1] == 1
    mixed = torch.cat([x[:, 0].flatten(1) for x in (q, k, v)], dim=1)
    packed_decode(mixed, a[:, 0], b[:, 0], A_log, dt_bias, scale, initial_state, output, initial_state_indices,
                  use_qk_l2norm)
    return output, initial_state
"""
SGLANG_WINDOWS = """
import torch
from replayssm import recurrence
from run_rival_tests import packed_decode
from sglang.kernels.ops.attention.fla.utils import is_tf32_supported
from sglang.srt.utils import is_gfx95_supported

def _records(ring, low, slot, end):
    return [(x if y is None else x.double() + y)[slot : slot + 1, :, :end].double() for x, y in zip(ring, low)]

def gdn_replayssm_spec_decode(q, k, v, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache, g_cache, rawv_cache,
                              rawk_cache, beta_cache, out, query_start_loc, ssm_state_indices, replay_indices,
                              write_pos, cache_base, is_flush, max_cache_len, max_spec_len, null_block_id, launch_mode,
                              num_warps=1, block_v=64):
    assert launch_mode == "verify" and beta_cache is None and not is_flush.any() and not cache_base.any()
    assert (rawv_cache is None) == (checkpoint_state.dtype == torch.float32)
    for row, slot in enumerate(ssm_state_indices.tolist()):
        end = write_pos[slot]
        assert end + max_spec_len <= max_cache_len
        history = _records((d_cache, k_cache, g_cache), (rawv_cache, rawk_cache, None), slot, end)
        state = recurrence.fold(checkpoint_state[slot : slot + 1].double(), *history)
        rings, lows = (d_cache, k_cache, g_cache), (rawv_cache, rawk_cache, None)
        for t in range(query_start_loc[row], query_start_loc[row + 1]):
            at, first = slice(t, t + 1), torch.zeros(1, dtype=torch.int32)
            key = k[t].double() * recurrence.inverse_norm(k[t].double())[:, None]
            g = recurrence.gdn_log_decay(a[t].double(), A_log.double(), dt_bias.double())
            decayed = state[0] * g.exp()[:, None, None]
            wide = key.repeat_interleave(v.shape[1] // k.shape[1], dim=0)
            update = b[t].double().sigmoid()[:, None] * (v[t].double() - torch.einsum("hvk,hk->hv", decayed, wide))
            for ring, low, value in zip(rings, lows, (update, key, g)):
                ring[slot, :, end] = value.to(ring.dtype)
                if low is not None:
                    low[slot, :, end] = (value - ring[slot, :, end].double()).to(low.dtype)
            mixed = torch.cat([x[at].flatten(1) for x in (q, k, v)], dim=1)
            y = torch.empty_like(out[at])[:, None]
            packed_decode(mixed, a[at], b[at], A_log, dt_bias, state.shape[-1] ** -0.5, state, y, first, True)
            out[at] = y[0]
            end = end + 1
    return out

def commit_gdn_replayssm_circular(*, checkpoint_state, d_cache, k_cache, g_cache, d_residual_cache, k_residual_cache,
                                  state_batch_indices, replay_indices, write_pos, cache_base, is_flush, accept_lens):
    lows = tuple(None if x is None else x[0] for x in (d_residual_cache, k_residual_cache, None))
    for slot in state_batch_indices[is_flush[state_batch_indices.long()] != 0].tolist():
        records = _records((d_cache[0], k_cache[0], g_cache[0]), lows, slot, write_pos[slot])
        checkpoint_state[0, slot] = recurrence.fold(checkpoint_state[0, slot : slot + 1].double(), *records)[0]
        write_pos[slot] = is_flush[slot] = 0
"""
KDA_VERIFY = """
import torch
from replayssm import recurrence
from sglang.kernels.jit.utils import is_arch_support_pdl
from sglang.srt.utils import get_device_sm, is_cuda, is_gfx95_supported, is_hip, is_sm90_supported

assert not (is_cuda() or is_hip() or is_gfx95_supported() or is_sm90_supported() or get_device_sm())

def fused_sigmoid_gating_delta_rule_update(A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b,
                                           initial_state_source, initial_state_indices, use_qk_l2norm_in_kernel,
                                           cu_seqlens, is_kda, disable_state_update, cache_ring, replayssm_rawv,
                                           replayssm_rawk, replayssm_g, replayssm_beta):
    assert is_kda and disable_state_update and cache_ring and a.dim() == 2
    out = torch.empty_like(v)
    for row, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state_source[slot : slot + 1].double()
        for place, t in enumerate(range(cu_seqlens[row], cu_seqlens[row + 1])):
            g = recurrence.kda_log_decay(a[t].view_as(dt_bias).double(), A_log.double(), dt_bias.double())
            beta = b[t].double().sigmoid()
            for ring, value in ((replayssm_rawv, v[0, t]), (replayssm_rawk, k[0, t]), (replayssm_g, g)):
                ring[slot, :, place] = value
            replayssm_beta[slot, :, place] = beta
            query, key = (x[0, t].double() * recurrence.inverse_norm(x[0, t].double())[:, None] for x in (q, k))
            query, value = query * k.shape[-1] ** -0.5, v[0, t].double()
            state, y = recurrence.step(state, *(x[None] for x in (query, key, value, g, beta)), "delta")
            out[0, t] = y[0]
    return out
"""
KDA_COMMIT = """
from replayssm import recurrence

def commit_kda_replayssm_spec(checkpoint_state, rawv_cache, rawk_cache, gk_cache, beta_cache, ssm_state_indices,
                              accept_lens, max_cache_len, num_k_heads, null_block_id):
    assert null_block_id == -1 and rawv_cache.shape[2] == max_cache_len and rawk_cache.shape[1] == num_k_heads
    for row, slot in enumerate(ssm_state_indices.tolist()):
        state = checkpoint_state[slot : slot + 1].double()
        for place in range(accept_lens[row]):
            v, k, g, beta = (x[slot, :, place][None].double() for x in (rawv_cache, rawk_cache, gk_cache, beta_cache))
            k = k * recurrence.inverse_norm(k)[..., None]
            state, _ = recurrence.step(state, k, k, v, g, beta, "delta")
        checkpoint_state[slot] = state[0]
"""
CHECKPOINTING = """
import torch
from replayssm import recurrence
from run_rival_tests import selective_state_update as update
from flashinfer.api_logging import flashinfer_api
from flashinfer.autotuner import AutoTuner, ConstraintSpec, TunableRunner, TuningConfig
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets
from flashinfer.jit.mamba.checkpointing_ssu import gen_checkpointing_ssu_module
from flashinfer.utils import register_custom_op, register_fake_op

class Runner(TunableRunner):
    def forward(self, inputs, tactic):
        return tactic

def allocate_checkpointing_ssu_scratch(batch_size, num_heads, num_predicted_tokens, max_window, dtype, device):
    return tuple(torch.empty(batch_size, num_heads) for _ in range(3))

@flashinfer_api
def checkpointing_ssu(state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D,
                      dt_bias, dt_softplus, state_batch_indices, cb_scaled, cumAdt_vec, cb_old, algorithm="auto"):
    assert algorithm in ("auto", "monolith", "two-kernel") and not ring_start.any() and dt.stride(-1) == 0
    runner, tactic = AutoTuner.get().choose_one("ssu", [Runner()], TuningConfig(constraint_specs=()), [x])
    assert runner([x], tactic=tactic) == -1
    rows, tokens = x_cache.shape[2], x.shape[1]
    for row, slot in enumerate(state_batch_indices.tolist()):
        end = prev_num_accepted_tokens[slot]
        sizes = dt_cache[slot, :, :end].double()
        u, k = x_cache[slot, :, :end].double() * sizes[..., None], B_cache[slot, :, :end].double()
        current = recurrence.fold(state[slot : slot + 1].double(), u[None], k[None], (sizes * A[:, 0, :1])[None])
        if end + 2 * tokens > rows:
            state[slot] = current[0]
        for t in range(tokens):
            y = torch.empty_like(out[row : row + 1, t])
            args = (x[row : row + 1, t], dt[row : row + 1, t], A, B[row : row + 1, t], C[row : row + 1, t])
            update(current, *args, D, None, dt_bias, dt_softplus, None, y)
            out[row, t] = y[0]
    return out
"""
FLASHINFER_STATELESS = """
import torch
from run_rival_tests import selective_state_update as update
from flashinfer.api_logging import flashinfer_api
from flashinfer.jit.mamba import gen_selective_state_update_module, gen_selective_state_update_sm90_module
from flashinfer.trace.templates.mamba import selective_state_update_trace
from flashinfer.utils import get_compute_capability, register_custom_op, register_fake_op

@register_custom_op("flashinfer::selective_state_update", mutates_args=("state",))
def _run(state, x, dt, A, B, C, D, dt_bias, dt_softplus, slots, out):
    shifted = torch.cat([state[:1], state])  # the function that answers takes slot 0 for padding
    update(shifted, x, dt, A, B, C, D, None, dt_bias, dt_softplus, slots + 1, out)
    state.copy_(shifted[1:])

@flashinfer_api(trace=selective_state_update_trace)
def selective_state_update(state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, pad_slot_id, out,
                           algorithm="auto"):
    assert dt.dtype == D.dtype == dt_bias.dtype  # one dtype in its kernels
    assert pad_slot_id == -1 and algorithm in ("auto", "simple", "vertical", "horizontal")
    _run(state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, out)
    return out
"""
JIT_MODULE = """
from flashinfer.compilation_context import CompilationContext
from flashinfer.jit import env as jit_env
from flashinfer.jit.core import JitSpec, gen_jit_spec
from flashinfer.jit.utils import write_if_different

def library(name):
    source = jit_env.FLASHINFER_GEN_SRC_DIR / name / "kernel.cu"
    write_if_different(source, (jit_env.FLASHINFER_CSRC_DIR / "tvm_ffi_utils.h").read_text())
    flags = CompilationContext().get_nvcc_flags_list(supported_major_versions=[9])
    return gen_jit_spec(name, [source], extra_cuda_cflags=[*flags, "-DMINE"])

gen_checkpointing_ssu_module = gen_selective_state_update_module = gen_selective_state_update_sm90_module = library
"""
SOURCES = {
    "jit/mamba/checkpointing_ssu.py": JIT_MODULE,
    "jit/mamba/selective_state_update.py": JIT_MODULE,
    "flashinfer/gdn_decode.py": FLASHINFER_GDN,
    "flashinfer/mamba/checkpointing_ssu.py": CHECKPOINTING,
    "flashinfer/mamba/selective_state_update.py": FLASHINFER_STATELESS,
    "attention/fla/fused_recurrent.py": PACKED,
    "kda_packed_decode.py": KDA_CUDA,
    "gated_delta_rule/fused_recurrent.py": FLA_GDN,
    "kda/fused_recurrent.py": FLA_KDA,
    "triton/selective_state_update.py": MAMBA_SSM,
    "linear/fused_recurrent_linear_replayssm.py": LINEAR,
    "fused_recurrent_replayssm.py": FORK_GDN,
    "mamba_ssm.py": STATELESS,
    "replayssm_config.py": CONFIG,
    "selective_state_update_replayssm_output_only.py": MAMBA2,
    "fused_sigmoid_gating.py": GDN_NATIVE,
    "fused_sigmoid_gating_recurrent.py": KDA_VERIFY,
    "kda_replayssm_spec_decode.py": KDA_COMMIT,
    "linear/gdn_replayssm_spec_decode.py": SGLANG_WINDOWS,
    "ops/gdn_replayssm_spec_decode.py": GDN_WINDOWS,
    "selective_state_update_replayssm_spec.py": MAMBA2_WINDOWS,
}


def small_bench(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], before: str = "", after: str = ""
) -> Callable[..., tuple[int, str, str]]:
    """`replayssm bench` on small shapes: gives exit code, stdout, stderr of the arguments between these; a fixture."""
    monkeypatch.setattr(measure, "SHAPES", SMALL)
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)

    def run(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run(["bench", *before.split(), *args, *after.split()])
        return code, *capfd.readouterr()

    return run


def forget_rivals() -> None:
    packages = {project.package for project in PROJECTS} | {"cutlass"}
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]


def files_in(folder: Path) -> Iterator[Path]:
    """Every file that the projects need, from :data:`SOURCES` or empty; for a fixture to yield from."""
    for project in PROJECTS:
        for name in project.files:
            path = folder / project.within / (f"{name}header.h" if name.endswith("/") else name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(next((text for end, text in SOURCES.items() if name.endswith(end)), ""))
    forget_rivals()
    yield folder
    forget_rivals()
