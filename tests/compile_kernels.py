"""Compile the Triton kernels for many GPUs, on a machine without one, and report registers and spills.

Run by test_triton_compile.py in a process of its own, since kernels that were defined for the interpreter can't be
compiled. Prints one JSON line per kernel and target.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from attention_sources import attention_kernels
from fused_sources import fused_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from verify_sources import described

from replayssm.backends.triton import conv, conv_prefill, decode, state

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

#: kind: (group, d_v, d_k)
DECODE_SHAPES = {"gdn": (2, 128, 128), "kda": (1, 128, 128), "mamba2": (8, 64, 128), "mamba2-n256": (48, 64, 256)}
WIDE = ("checkpoint_stride", "ring_u_stride", "ring_k_stride", "ring_g_stride", "ring_stride", "out_stride")
WIDE += ("state_slot", "window_slot")


def source(fn: Any, types: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    """Describe one specialisation: pointers aligned to 16 bytes, slot strides of 64 bits, other integers of 32."""
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        else:
            signature[name] = types.get(name) or ("i64" if name in WIDE else "i32")
            if signature[name].startswith("*") or name.endswith("_stride"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn, signature, constexprs, attributes)


def decode_source(
    kind: str, state_type: str, activation: str, records: str = "updates", *, window: bool = False
) -> tuple[ASTSource, int]:
    group, d_v, d_k = DECODE_SHAPES[kind]
    delta = not kind.startswith("mamba2")
    ring = "fp32" if state_type == "fp32" else activation
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "z_ptr", "y_ptr"), f"*{activation}")
    types |= dict.fromkeys(("rate_ptr", "bias_ptr", "d_ptr", "ring_g_ptr"), "*fp32")
    types |= {"checkpoint_ptr": f"*{state_type}", "ring_u_ptr": f"*{ring}", "ring_k_ptr": f"*{activation}"}
    types |= dict.fromkeys(
        ("write_pos_ptr", "checkpoint_slot_ptr", "slots_ptr", "force_flush_ptr", "num_tokens_ptr"), "*i32"
    )
    types |= dict.fromkeys(("scale", "beta_scale", "lower_bound", "dt_min", "dt_max"), "fp32")
    cut = decode.tiling(d_v, d_k, 16, kind == "kda", 4 if state_type == "fp32" else 2)
    constants = {
        "NUM_V_HEADS": 2 * group,
        "GROUP": group,
        "HEAD_V_DIM": d_v,
        "HEAD_K_DIM": d_k,
        "RING_ROWS": 16,
        "CHANNEL_GATE": kind == "kda",
        "DELTA_RULE": delta,
        "BOUNDED": False,
        "L2_NORM": delta,
        "SOFTPLUS": True,
        "HAS_BIAS": True,
        "HAS_D": not delta,
        "HAS_Z": not delta,
        "ROW_CURSORS": records != "updates",
        "NORMAL_KEYS": records == "normalised",
        "INPUT_RECORDS": records == "inputs",
        "ZERO_PADDING": records != "inputs",
        "FORCED": False,
        "WINDOW": window,
        "EPS": 1e-6,
        "BLOCK_V": cut.rows,
        "BLOCK_K": cut.columns,
        "BLOCK_R": cut.records,
        "CHUNKS": 16 // cut.records,
    }
    return source(decode._decode_kernel, types, constants), cut.num_warps


def sources() -> dict[str, tuple[ASTSource, int]]:
    found = {}
    for kind in DECODE_SHAPES:
        for state_type in ("fp32", "bf16"):
            found[f"{kind} {state_type}"] = decode_source(kind, state_type, "bf16")
            found[f"{kind} {state_type} window of one"] = decode_source(kind, state_type, "bf16", window=True)
    for kind, records in (("gdn", "normalised"), ("kda", "normalised"), ("mamba2", "inputs")):
        found[f"{kind} fp32 {records}"] = decode_source(kind, "fp32", "bf16", records)
    pointers = {
        "checkpoint_ptr": "*fp32",
        "ring_u_ptr": "*fp32",
        "ring_k_ptr": "*bf16",
        "ring_g_ptr": "*fp32",
        "out_ptr": "*fp32",
    } | dict.fromkeys(("write_pos_ptr", "checkpoint_slot_ptr", "src_ptr", "dst_ptr"), "*i32")
    for channel in (False, True):
        block_v, block_k, num_warps = state.fold_tile(128, 128)
        constants = {"GROUP": 1, "HEAD_V_DIM": 128, "HEAD_K_DIM": 128, "RING_ROWS": 16, "CHANNEL_GATE": channel}
        constants |= {"TO_SLOTS": True, "BLOCK_V": block_v, "BLOCK_K": block_k}
        name = f"fold {'channel' if channel else 'head'}"
        found[name] = source(state._fold_kernel, pointers, constants), num_warps
    types = dict.fromkeys(("x_ptr", "state_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16") | {"slots_ptr": "*i32"}
    constants = {"WIDTH": 4, "HAS_BIAS": True, "SILU": True, "BLOCK_C": conv.BLOCK_C}
    found["conv"] = source(conv._conv_kernel, types, constants), 4
    types |= {"last_ptr": "*bf16", "sequence_ptr": "*i32", "cuts_ptr": "*i32"}
    constants |= {"BLOCK_T": conv_prefill.BLOCK_T, "BLOCK_C": conv_prefill.BLOCK_C}
    found["conv prefill"] = source(conv_prefill._conv_prefill_kernel, types, constants), 4
    types = dict.fromkeys(("write_pos_ptr", "checkpoint_slot_ptr", "slots_ptr", "force_flush_ptr"), "*i32")
    constants = {"FORCED": True, "COUNTED": True, "BLOCK": 128}
    found["advance"] = source(state._advance_kernel, types | {"counters_ptr": "*i64"}, constants), 4
    for name, (fn, types, constants, num_warps) in (described() | attention_kernels() | fused_kernels()).items():
        found[name] = source(fn, types, constants), num_warps
    return found


def resources(compiled: Any, target: str) -> tuple[int, int]:
    """Registers per thread, and spilled loads and stores (for AMD: spilled registers)."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers, spills = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count")
        )
        return registers, spills
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([cuobjdump, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    return int(re.search(r"REG:(\d+)", usage)[1]), len(re.findall(r"\b(?:STL|LDL)\b", sass))


#: In the names of kernels that differ from another in little, or take few registers anywhere.
VARIANTS = (" bf16", "normalised", "inputs", "window of one", "fused")


def main() -> None:
    """Targets, all by default, and `main` for one kernel of those that differ in little."""
    targets = [name for name in sys.argv[1:] if name != "main"]
    for name, (what, num_warps) in sources().items():
        if "main" in sys.argv and any(variant in name for variant in VARIANTS):
            continue
        for target in targets or TARGETS:
            compiled = triton.compile(what, target=TARGETS[target], options={"num_warps": num_warps})
            registers, spills = resources(compiled, target)
            row = {"kernel": name, "target": target, "registers": registers, "spills": spills}
            print(json.dumps(row | {"shared": compiled.metadata.shared}), flush=True)


if __name__ == "__main__":
    main()
