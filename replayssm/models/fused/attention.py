"""Attention with norms of queries and keys and a gate, as in Qwen3-Next and Qwen3.5: two kernels beside attention.

One norms and turns queries and keys, the other multiplies the output by the sigmoid of the gate.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.models.fused.check import Forward, agree, by_kind, draw, own_forward
from replayssm.models.fused.norms import find_form

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "config", "layer_idx")
_CACHES = ("cache", "past_key_values")  # what transformers calls it, since 5.24 and before


def fused_attention(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """Each such module, with a forward of ours."""
    for module, form in by_kind(filter(_may_be, model.modules()), lambda module: _form(module, dtype)):
        yield module, _forward(module, form)


def _may_be(module: nn.Module) -> bool:
    return own_forward(module) is not None and all(hasattr(module, name) for name in _PARTS)


def _form(module: Any, dtype: torch.dtype) -> Any:
    """Of its norms, if the module is what we take it for; else None."""
    form = find_form(module.q_norm, dtype)
    if form is None or form != find_form(module.k_norm, dtype):
        return None
    weight = module.q_proj.weight
    x = draw(2, 3, weight.shape[-1], dtype=dtype, device=weight.device)
    angle = 6 * torch.rand(2, 3, module.head_dim // 2, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 2)
    turned = (angle.cos().to(x), angle.sin().to(x))
    ours, own = _forward(module, form), module.forward
    return form if agree(lambda: ours(x, turned, None)[:1], lambda: own(x, turned, None)[:1]) else None


def _forward(module: Any, form: Any) -> Forward:
    from replayssm.backends.triton.pointwise import HeadNorms, rotary, sigmoid_gated

    scope: dict[str, Any] = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    functions: Any = scope.get("ALL_ATTENTION_FUNCTIONS")
    eager = scope.get("eager_attention_forward")

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        caches = [kwargs.pop(name, None) for name in _CACHES]
        cache = next((cache for cache in caches if cache is not None), None)
        tokens, size = hidden_states.shape[:-1], module.head_dim
        q, gate = module.q_proj(hidden_states).view(*tokens, -1, 2 * size).chunk(2, dim=-1)
        k, v = (project(hidden_states).view(*tokens, -1, size) for project in (module.k_proj, module.v_proj))
        norms = HeadNorms(module.q_norm.weight, module.k_norm.weight, form.eps, form.weight_offset)
        q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings, norms)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, module.layer_idx)
        attend = functions.get_interface(module.config._attn_implementation, eager)
        y, weights = attend(module, q, k, v, attention_mask, dropout=0.0, scaling=module.scaling, **kwargs)
        return module.o_proj(sigmoid_gated(y.reshape(*tokens, -1), gate)), weights

    return forward
