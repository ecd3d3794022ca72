"""What compile_kernels.py compiles for attention over pages."""

from __future__ import annotations

from verify_sources import Described

from replayssm.backends.triton import attention

#: lines of query, d_k, d_v, H / H_k: of Qwen3.5 and Kimi-Linear. Smaller heads take fewer registers.
SHAPES = {
    "decode 256": (4, 256, 256, 4),
    "prefill 256": (2048, 256, 256, 4),
    "decode latent": (32, 576, 512, 32),
}


def attention_kernels() -> dict[str, Described]:
    found: dict[str, Described] = {}
    for name, (lines, key_dim, value_dim, group) in SHAPES.items():
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
        types |= dict.fromkeys(("table_ptr", "lengths_ptr", "first_ptr", "num_tokens_ptr"), "*i32")
        types |= dict.fromkeys(("y_ptr", "maximum_ptr", "sum_ptr"), "*fp32") | {"scale": "fp32"}
        cut = attention.tile(lines, key_dim, value_dim, 2)
        block_v = 1 << (value_dim - 1).bit_length()
        constants = {"PAGE": 16, "GROUP": group, "KEY_DIM": key_dim, "LOW_DIM": cut.low, "HIGH_DIM": cut.high}
        constants |= {"VALUE_DIM": value_dim, "PARTS": 4 if lines < 64 else 1}
        constants |= {"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_V": block_v}
        found[f"attention {name}"] = attention._attention_kernel, types, constants, cut.num_warps
    types = dict.fromkeys(("first_ptr", "num_tokens_ptr"), "*i32") | {"y_ptr": "*bf16"}
    types |= dict.fromkeys(("parts_ptr", "maximum_ptr", "sum_ptr"), "*fp32")
    found["attention join"] = attention._join_kernel, types, {"VALUE_DIM": 256, "PARTS": 16, "BLOCK_V": 256}, 4
    return found
