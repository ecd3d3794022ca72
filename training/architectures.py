"""The bundled models: their configurations, their initialisation, and the trunk forward that training compiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from training.chunked import causal_attention
from training.tokenizer import END_OF_TEXT, IM_END, PAD, VOCAB_SIZE

PATTERN = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "num_hidden_layers": len(PATTERN),
    "layer_types": PATTERN,
    "bos_token_id": None,
    "eos_token_id": [END_OF_TEXT, IM_END],
    "pad_token_id": PAD,
    "max_position_embeddings": 8192,
}

RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "output_linear.weight")

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5-tiny": {
        **COMMON,
        "model_type": "qwen3_5_text",
        "intermediate_size": 384,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,  # two value heads share a key head
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    },
    "kimi_linear-tiny": {
        **COMMON,
        "model_type": "kimi_linear",
        "intermediate_size": 384,
        "mlp_layer_types": ["dense"] * len(PATTERN),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "linear_num_heads": 4,
        "linear_head_dim": 64,
        "num_local_experts": 2,  # unused: every layer is dense
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    "granite_hybrid-tiny": {
        **COMMON,
        "model_type": "granitemoehybrid",
        "intermediate_size": 384,
        "shared_intermediate_size": 384,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mamba_expand": 2,
        "mamba_n_heads": 6,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,  # as released Granite; transformers before 5.18 normalises more groups otherwise
        "mamba_d_state": 128,
        "mamba_chunk_size": 64,
        "position_embedding_type": None,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.125,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
}


class MultiTokenPredictor(nn.Module):
    """Qwen3.5's MTP layer, with the tensor names of released checkpoints (prefix `mtp.`).

    Depth j predicts token t+1+j from h⁽ʲ⁾ = norm(layer(fc([norm(embed(x_{t+j})), norm(h⁽ʲ⁻¹⁾)]))), where h⁽⁰⁾ is the
    trunk's hidden state after its final norm, and the logits are lm_head(h⁽ʲ⁾). Keys of depth 1 form the layer's cache;
    a deeper step sees them up to t, and its own chain's keys, at positions t+1, t+2, …
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = qwen.Qwen3_5RMSNorm(width, eps=eps)
        self.apply_rotary = qwen.apply_rotary_pos_emb

    def forward(self, embeddings: list[Tensor], hidden: Tensor, rotary: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Hidden states of every depth, each from the one before; embeddings and rotary tables per depth."""
        chain: list[tuple[Tensor, Tensor]] = []
        states = []
        for embedding, tables in zip(embeddings, rotary, strict=True):
            hidden = self.step(embedding, hidden, tables, chain)
            states.append(hidden)
        return states

    def step(self, embedding: Tensor, hidden: Tensor, tables: tuple[Tensor, Tensor], chain: list) -> Tensor:
        """One depth, [B, T, D] → [B, T, D]; `chain` collects (k, v) of every depth, the first being the cache."""
        layer = self.layers[0]
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1))
        x = x + self._attention(layer.self_attn, layer.input_layernorm(x), tables, chain)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def _attention(self, attention: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], chain: list) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, attention.head_dim)
        query, gate = attention.q_proj(x).view(batch, length, -1, 2 * attention.head_dim).chunk(2, dim=-1)
        query = attention.q_norm(query).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
        value = attention.v_proj(x).view(shape).transpose(1, 2)
        query, key = self.apply_rotary(query, key, *rotary)
        chain.append((key, value))
        query, key, value = query.to(value.dtype), chain[0][0].to(value.dtype), chain[0][1]
        if len(chain) == 1:
            out = causal_attention(attention, query, key, value, None, attention.scaling)[0].transpose(1, 2)
        else:
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (query @ key.transpose(-1, -2)).masked_fill(~causal, float("-inf"))
            own = [(query * k.to(value.dtype)).sum(-1, keepdim=True) for k, _ in chain[1:]]
            weights = (torch.cat([scores, *own], -1).float() * attention.scaling).softmax(-1).to(value.dtype)
            out = weights[..., :length] @ value
            for index, (_, v) in enumerate(chain[1:]):
                out = out + weights[..., length + index, None] * v
        out = out.transpose(1, 2).reshape(batch, length, -1) * gate.reshape(batch, length, -1).sigmoid()
        return attention.o_proj(out)


def build(name: str) -> tuple[nn.Module, MultiTokenPredictor | None]:
    """An initialised transformers model, and its MTP layer if the configuration has one, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in CONFIGS:
        raise ValueError(f"unknown model {name!r}: wanted one of {', '.join(CONFIGS)}")
    options = dict(CONFIGS[name])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    predictor = None
    if options.get("mtp_num_hidden_layers"):
        config._attn_implementation = "sdpa"
        predictor = MultiTokenPredictor(config)
    initialise(model)
    if predictor is not None:
        initialise(predictor)
    return model, predictor


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Fan-in scaled matrices, smaller ones into the residual stream, and decays that leave long memory available.

    Steps Δ are log-uniform in [1e-3, 1e-1] and A uniform in [1, 16], as in Mamba-2 and Gated DeltaNet, so that a head
    forgets over ten to thousands of tokens.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            parameter.copy_(step + torch.log(-torch.expm1(-step)))
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.normal_(std=0.02)
        elif name.endswith("conv1d.weight"):
            parameter.uniform_(-0.5, 0.5)
        elif parameter.dim() == 2:
            into_residual = name.endswith(RESIDUAL)
            parameter.normal_(std=(0.25 if into_residual else 1.0) * 0.6 * parameter.shape[1] ** -0.5)


def compile_layers(model: nn.Module, predictor: MultiTokenPredictor | None) -> None:
    """Compile each decoder layer by itself: layers of one kind share their code, so two graphs serve all."""
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    if predictor is not None:
        predictor.forward = torch.compile(predictor.forward, dynamic=False)


def rotary_tables(model: nn.Module, x: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin [1, length, rotary_dim] for positions from 0, or None for a model without rotary positions."""
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None:
        return None
    positions = torch.arange(length, device=x.device).view(1, 1, -1).expand(3, 1, -1)
    return rotary(x[:1, :1], positions)


def trunk(model: nn.Module, ids: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Hidden states after the final norm, [B, T] → [B, T, D]."""
    hidden = model.model.embed_tokens(ids) * getattr(model.model, "embedding_multiplier", 1.0)
    extra = {} if rotary is None else {"position_embeddings": tuple(table[:, : ids.shape[1]] for table in rotary)}
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, **extra)
    return model.model.norm(hidden)


def logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """[…, D] → fp32 […, V]."""
    return model.lm_head(hidden).float() / getattr(model.config, "logits_scaling", 1.0)
