"""Compare the training forms with transformers' own functions, outputs and gradients.

python -m training.check_chunked [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from training import chunked


def compare(
    name: str, ours: Callable[..., Any], theirs: Callable[..., Any], inputs: dict[str, Tensor], **options: Any
) -> None:
    """Print relative errors of output and gradients; fail above 1e-3, or 2e-2 on a GPU, where tf32 may be on."""
    results = []
    for function in (ours, theirs):
        leaves = {key: value.clone().requires_grad_() for key, value in inputs.items()}
        out = function(**leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).sin()
        (out * weight).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves.values())])
    errors = [((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(*results, strict=True)]
    print(name, " ".join(f"{label}={error:.1e}" for label, error in zip(["out", *inputs], errors, strict=True)))
    bound = 2e-2 if out.is_cuda else 1e-3
    if not all(error < bound for error in errors):
        raise SystemExit(f"{name}: error above {bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    batch, length, heads, dim = 2, 200, 4, 64

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    qkv = {name: draw(batch, length, heads, dim) for name in ("query", "key", "value")}
    beta = draw(batch, length, heads).sigmoid()
    gate = -8 * F.softplus(draw(batch, length, heads) - 3)
    wide = -8 * F.softplus(2 * draw(batch, length, heads, dim) - 3)
    norm = {"use_qk_l2norm_in_kernel": True}
    none = {"initial_state": None, "output_final_state": False}
    compare(
        "gdn",
        chunked.chunk_gated_delta_rule,
        qwen.torch_chunk_gated_delta_rule,
        {**qkv, "g": gate, "beta": beta},
        **norm,
    )
    compare(
        "kda",
        chunked.chunk_kimi_delta_attention,
        kimi.chunk_kimi_delta_attention,
        {**qkv, "g": wide, "beta": beta},
        **norm,
        **none,
    )
    compare(
        "kda, step by step",
        chunked.chunk_kimi_delta_attention,
        kimi.recurrent_kimi_delta_attention,
        {**qkv, "g": wide, "beta": beta},
        **norm,
        **none,
    )
    ssm = {
        "hidden_states": draw(batch, length, heads, dim),
        "dt": draw(batch, length, heads),
        "A": -torch.rand(heads, device=device) * 8,
        "B": draw(batch, length, 2, dim),
        "C": draw(batch, length, 2, dim),
        "D": draw(heads),
        "dt_bias": draw(heads) - 3,
    }
    compare("ssd", chunked.mamba2_chunk_scan, granite.mamba2_chunk_scan, ssm, chunk_size=64, dt_softplus=True)
    conv = {"hidden_states": draw(batch, 96, length), "weight": draw(96, 4), "bias": draw(96)}
    compare("conv", chunked.causal_conv1d_fn, qwen.causal_conv1d_fn, conv, activation="silu")


if __name__ == "__main__":
    main()
