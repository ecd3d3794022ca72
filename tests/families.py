"""Tiny models of the twelve families, with weights on which the recurrent state decides the next token.

transformers' default initialisation hides a broken state: zeroing it moves the logits by 1e-7 to 1e-3. The weights here
are scaled until it moves them by order 1, and `test_transformers.py` asserts that.
"""

from __future__ import annotations

import copy
import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import replayssm

VOCAB = 101
PAD = 0


@dataclass(frozen=True)
class Family:
    module: str
    config: str
    model: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    linear_layers: int = 0


_COMMON = {"vocab_size": VOCAB, "hidden_size": 48, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
_GDN = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "intermediate_size": 64,
    "head_dim": 16,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MLA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
_MAMBA = {
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", {**_ATTENTION, **_GDN, **_MOE}, linear_layers=2
    ),
    "qwen3_5": Family("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_ATTENTION, **_GDN}, linear_layers=2),
    "qwen3_5_moe": Family(
        "qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_ATTENTION, **_GDN, **_MOE}, linear_layers=2
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**_ATTENTION, **_GDN, "linear_num_key_heads": 4, "head_dim": 12},
        linear_layers=2,
    ),
    "kimi_linear": Family(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**_MLA, "linear_head_dim": 16, "linear_num_heads": 3},
        linear_layers=2,
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {**_MLA, "linear_head_dim": 16, "linear_num_heads": 4, "head_dim": 16, "num_mtp_layers": 0},
        linear_layers=2,
    ),
    "mamba2": Family(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_hidden_layers": 2, "num_heads": 6, "head_dim": 16, "state_size": 20, "n_groups": 2, "chunk_size": 8},
        linear_layers=2,
    ),
    "nemotron_h": Family(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_ATTENTION,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "head_dim": 16,
            "intermediate_size": 64,
            "ssm_state_size": 20,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
        linear_layers=2,
    ),
    "bamba": Family(
        "bamba",
        "BambaConfig",
        "BambaForCausalLM",
        {**_ATTENTION, **_MAMBA, "attn_layer_indices": [1]},
        linear_layers=2,
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_ATTENTION,
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
        },
        linear_layers=2,
    ),
    "falcon_h1": Family(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_ATTENTION,
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "ssm_in_multiplier": 1.25,
            "head_dim": 16,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
        },
        linear_layers=2,
    ),
    # The gated norm after the scan, which most Falcon-H1 releases leave out.
    "falcon_h1_norm": Family(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_ATTENTION, **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_rms_norm": True, "head_dim": 16},
        linear_layers=2,
    ),
    "zamba2": Family(
        "zamba2",
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            **_ATTENTION,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 1,
            "intermediate_size": 64,
            "mamba_d_state": 20,
            "n_mamba_heads": 6,
            "mamba_ngroups": 2,
            "chunk_size": 8,
            "use_mem_rope": True,
            "tie_word_embeddings": False,
        },
        linear_layers=4,
    ),
}


def load(name: str) -> tuple[type, type]:
    """The config and model classes of a family; skips the test when the installed transformers lacks it."""
    import transformers

    family = FAMILIES[name]
    try:
        module = importlib.import_module(f"transformers.models.{family.module}")
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {family.module}")
    return getattr(module, family.config), getattr(module, family.model)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny model in eval mode, about 100k parameters, on whose next token the recurrent state decides."""
    config_class, model_class = load(name)
    config = config_class(**{**_COMMON, **FAMILIES[name].kwargs})
    torch.manual_seed(seed)
    model = model_class(config)
    scale_weights(model)
    model = model.to(dtype).eval()
    model.generation_config.pad_token_id = PAD
    return model


@torch.no_grad()
def scale_weights(model: torch.nn.Module) -> None:
    """Re-draw the weights so that every layer's output, the recurrent part most, is of the size of the residual."""
    for name, weight in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            weight.copy_(torch.empty_like(weight).uniform_(0.05, 1.0).log())
        elif leaf == "dt_bias":
            weight.uniform_(-2.5, -0.5)
        elif leaf == "D":
            weight.uniform_(-0.3, 0.3)
        elif "conv1d" in name:
            weight.normal_(0.0, 0.6)
        elif "embed" in name:
            weight.normal_(0.0, 1.0)
        elif weight.ndim >= 2:
            weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[-1]))
            if ("out_proj" in name or "o_proj" in name) and (
                "linear_attn" in name or "mamba" in name or "mixer" in name
            ):
                weight.mul_(2.0)
        else:
            weight.add_(torch.empty_like(weight).normal_(0.0, 0.1))


def built_models() -> Any:
    """A function that gives tiny models by family, each built once and without replay."""
    built: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in built:
            built[name] = build(name)
        return replayssm.disable(built[name])

    return get


def disturbed(model: Any, noise: float = 0.03) -> Any:
    """The same model with other weights: some of its guesses are right, some wrong."""
    other = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=rng))
    return other


def prompts(batch: int = 1, length: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random token ids `[batch, length]` and their mask; rows past the first are left-padded, each differently."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        pad = (2 * row + 1) % length
        ids[row, :pad] = PAD
        mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


def cache_name(model: Any) -> str:
    """What this transformers version calls the cache argument of a model's forward."""
    import inspect

    parameters = inspect.signature(type(model).forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in parameters)
