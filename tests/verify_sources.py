"""What compile_kernels.py compiles for verify windows."""

from __future__ import annotations

from typing import Any

from replayssm.backends.triton import conv_verify, rollback, verify

Described = tuple[Any, dict[str, str], dict[str, Any], int]  # kernel, types, constants, warps

#: kind: (group, d_v, d_k)
SHAPES = {"gdn": (2, 128, 128), "kda": (1, 128, 128), "mamba2": (8, 64, 128), "mamba2-n256": (48, 64, 256)}


def window_kernels(kind: str, state_type: str, activation: str, *, tree: bool, ring_rows: int) -> dict[str, Described]:
    group, d_v, d_k = SHAPES[kind]
    delta = not kind.startswith("mamba2")
    ring = "fp32" if state_type == "fp32" else activation
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "z_ptr", "y_ptr"), f"*{activation}")
    types |= dict.fromkeys(("rate_ptr", "bias_ptr", "d_ptr", "ring_g_ptr"), "*fp32")
    types |= {"checkpoint_ptr": f"*{state_type}", "ring_u_ptr": f"*{ring}", "ring_k_ptr": f"*{activation}"}
    indices = ("write_pos_ptr", "checkpoint_slot_ptr", "slots_ptr", "num_tokens_ptr", "parents_ptr")
    types |= dict.fromkeys(indices, "*i32")
    types |= dict.fromkeys(("scale", "beta_scale", "lower_bound", "dt_min", "dt_max"), "fp32")
    cut = verify.window_tiling(4, d_v, ring_rows, kind == "kda", 4 if state_type == "fp32" else 2)
    shared = {
        "GROUP": group,
        "HEAD_K_DIM": d_k,
        "RING_ROWS": ring_rows,
        "CHANNEL_GATE": kind == "kda",
        "DELTA_RULE": delta,
        "BOUNDED": False,
        "SOFTPLUS": True,
        "HAS_BIAS": True,
        "BLOCK_T": cut.tokens,
    }
    constants = shared | {
        "NUM_V_HEADS": 2 * group,
        "HEAD_V_DIM": d_v,
        "L2_NORM": delta,
        "HAS_D": not delta,
        "HAS_Z": not delta,
        "TREE": tree,
        "CLAMPED": False,
        "TF32": True,
        "EPS": 1e-6,
        "NARROW": True,
        "BLOCK_V": cut.rows,
        "BLOCK_K": cut.columns,
        "BLOCK_R": verify.record_block(ring_rows),
        "FOLD_K": verify.FOLD_COLUMNS,
        "STAGES": cut.stages,
    }
    return {
        f"verify {kind} {state_type}": (verify._verify_kernel, types, constants, cut.num_warps),
        f"append {kind} {state_type}": (verify._append_kernel, types, shared | {"BLOCK_K": d_k}, 1),
    }


def described() -> dict[str, Described]:
    found: dict[str, Described] = {}
    for kind in SHAPES:
        found |= window_kernels(kind, "fp32", "bf16", tree=False, ring_rows=16)
        found |= window_kernels(kind, "bf16", "bf16", tree=True, ring_rows=19)
    indices = ("write_pos_ptr", "slots_ptr", "num_tokens_ptr", "num_accepted_ptr", "path_ptr", "checkpoint_slot_ptr")
    types = dict.fromkeys((*indices, "parents_ptr"), "*i32") | {"ring_ptr": "*fp32", "counters_ptr": "*i64"}
    types |= dict.fromkeys(("x_ptr", "state_ptr", "window_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
    moved = {"RING_ROWS": 19, "WIDTH": 128, "BLOCK_T": rollback.BLOCK_T, "BLOCK": 128}
    found["move"] = rollback._move_kernel, types, moved, 4
    found["shift"] = rollback._shift_kernel, types, {"KEPT": 3, "CHAIN": False, "BLOCK_C": rollback.BLOCK_C}, 4
    found["commit"] = rollback._commit_kernel, types, {"COUNTED": True, "BLOCK": 128}, 4
    tapped = {"WIDTH": 4, "TREE": True, "HAS_BIAS": True, "SILU": True, "BLOCK_C": conv_verify.BLOCK_C}
    found["conv window"] = conv_verify._conv_window_kernel, types, tapped, 4
    return found
