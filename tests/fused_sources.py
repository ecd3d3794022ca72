"""The kernels that take the place of many small ones, a model's own or the sampler's, for compile_kernels.py."""

from __future__ import annotations

from typing import Any

from replayssm.backends.triton import draw, norm, pointwise, single_row, window

Described = tuple[Any, dict[str, str], dict[str, Any], int]


def _norm(
    size: int, num_groups: int = 1, gate: str | None = None, *, first: bool = False, delta: bool = False
) -> Described:
    cut = norm.cut(size)
    pointers = ("x_ptr", "z_ptr", "delta_ptr", "weight_ptr", "y_ptr", "sum_ptr")
    constants = {"SIZE": size, "NUM_GROUPS": num_groups, "GATE": norm.GATES[gate], "GATE_FIRST": first}
    constants |= {"HAS_DELTA": delta, "BLOCK": cut.block, "LINES": cut.lines}
    types = dict.fromkeys(pointers, "*bf16") | {"eps": "fp32", "weight_offset": "fp32"}
    return norm._norm_kernel, types, constants, cut.num_warps


def fused_kernels() -> dict[str, Described]:
    """Name to kernel, types of arguments, constants and warps."""
    found = {
        "fused norm of a sum": _norm(5120, delta=True),
        "fused norm of heads": _norm(128, gate="silu"),
        "fused norm of groups": _norm(8192, 8, "silu", first=True),
    }
    types = dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), "*bf16")
    found["fused swiglu"] = pointwise._swiglu_kernel, types, {"BLOCK": pointwise.BLOCK}, 4
    types = dict.fromkeys(("x_ptr", "gate_ptr", "y_ptr"), "*bf16")
    found["fused gate"] = pointwise._gate_kernel, types, {"BLOCK": pointwise.BLOCK}, 4
    cut = single_row.choose_cut(12352)
    types = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), "*bf16")
    constants = {"NUM_INPUTS": 2560, "OUTPUTS": cut.outputs, "INPUTS": cut.inputs, "UNROLL": cut.unroll}
    found["fused product of a row"] = single_row._single_row_kernel, types, constants, 4
    types = dict.fromkeys(("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16") | {"eps": "fp32"}
    types |= dict.fromkeys(("cos_ptr", "sin_ptr", "q_out_ptr", "k_out_ptr"), "*bf16") | {"weight_offset": "fp32"}
    found["fused rotary"] = pointwise._rotary_kernel, types, {"DIM": 256, "ROTARY": 64, "NORM": True, "BLOCK": 256}, 1
    types = dict.fromkeys(("slots_ptr", "table_ptr", "lengths_ptr", "given_ptr", "num_tokens_ptr", "first_ptr"), "*i32")
    types |= dict.fromkeys(("tokens_ptr", "positions_ptr", "places_ptr", "ids_ptr"), "*i64")
    constants = {"PAGE": 16, "GIVEN": True, "HAS_PAGES": True, "BLOCK": 4}
    found["fused window"] = window._window_kernel, types, constants, 1
    types = dict.fromkeys(("logits", "scores", "numbers", "edit_values", "maxima"), "*fp32")
    types |= dict.fromkeys(("positions", "rows", "integers", "hashes", "seen", "edit_ends", "masks"), "*i32")
    types |= dict.fromkeys(("tokens", "edit_tokens"), "*i64")
    found["fused draw"] = draw._draw_kernel, types, {"BLOCK": draw.BLOCK}, draw.WARPS
    return found
