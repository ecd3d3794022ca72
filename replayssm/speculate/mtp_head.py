"""The multi-token prediction head that Qwen3-Next, Qwen3.5 and Nemotron-H checkpoints bring along.

transformers leaves the tensors `mtp.*` out when it loads such a checkpoint. Here they are read from the safetensors
and put into transformers' own decoder layers of the model.

One step turns the embedding e of token t + 1 and the hidden state h of token t (the trunk's, after its final norm)
into a hidden state whose ``lm_head`` output predicts token t + 2:

    h' = norm(layers(fc([norm_e(e), norm_h(h)])))

Deeper drafts feed h' back in the place of h, with the drafted token's embedding and the next position.

- Qwen3-Next, Qwen3.5: norm_e, norm_h, fc are `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`; one attention layer
  with its MLP or experts; then `norm`.
- Nemotron-H: `enorm`, `hnorm`, `eh_proj` of the first block; one block each of attention, which has no positions, and
  of experts; then the last block's `final_layernorm`.
"""

from __future__ import annotations

import copy
import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from replayssm.models.switch import cache_argument
from replayssm.speculate.keys_values import KeysValues

PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.")


class MtpHead(nn.Module):
    """One step of multi-token prediction, [B, n, D] → [B, n, D].

    Attributes:
        layers: transformers' decoder layers, whose keys and values go into a :class:`KeysValues`.
    """

    layers: nn.ModuleList

    @abstractmethod
    def fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """``fc([norm_e(e), norm_h(h)])``."""

    @abstractmethod
    def finish(self, hidden: Tensor) -> Tensor:
        """The last norm."""

    @abstractmethod
    def positions(self, x: Tensor, positions: Tensor) -> dict[str, Any]:
        """What the layers want to know about positions ``[B, n]``."""

    def forward(self, embedding: Tensor, hidden: Tensor, cache: KeysValues) -> Tensor:
        """Hidden states that predict the token after the embedded one; keys are added to the cache, not kept."""
        x = self.fuse(embedding, hidden)
        num_tokens = x.shape[1]
        options = self.positions(x, cache.positions(num_tokens))
        options["attention_mask"] = cache.mask(num_tokens, x.dtype)
        for layer in self.layers:
            x = layer(x, **options, **{cache_argument(type(layer).forward): cache})
        return self.finish(x)


class QwenHead(MtpHead):
    """Qwen3-Next and Qwen3.5, dense or with experts."""

    def __init__(self, trunk: Any, config: Any, names: frozenset[str]) -> None:
        super().__init__()
        count = len(_layer_numbers(names))
        if count != 1:
            raise ValueError(f"the MTP head has {count} layers: heads of one layer are supported")
        like = _full_attention_layer(trunk)
        norm = type(like.input_layernorm)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(width, eps=eps)
        layer = type(like)(config, like.self_attn.layer_idx)
        layer.self_attn.layer_idx = 0
        self.layers = nn.ModuleList([layer])
        self.norm = norm(width, eps=eps)
        self._rotary = [trunk.rotary_emb]  # the trunk's own, in a list so that it's no submodule

    def fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """See :meth:`MtpHead.fuse`."""
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1))

    def finish(self, hidden: Tensor) -> Tensor:
        """See :meth:`MtpHead.finish`."""
        return self.norm(hidden)

    def positions(self, x: Tensor, positions: Tensor) -> dict[str, Any]:
        """Rotary tables; in Qwen3.5 the three position numbers of a text token are the same."""
        rotary = self._rotary[0]
        per_axis = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions
        return {"position_embeddings": rotary(x, per_axis)}


class NemotronHead(MtpHead):
    """Nemotron-H: blocks of its own kinds, of which attention is the only one with memory."""

    def __init__(self, trunk: Any, config: Any, names: frozenset[str]) -> None:
        super().__init__()
        kinds = [self._kind(number, names) for number in _layer_numbers(names)]
        block, norm = type(trunk.layers[0]), type(trunk.norm_f)
        config.layer_types = kinds
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList([block(config, index) for index in range(len(kinds))])
        first, last = self.layers[0], self.layers[-1]
        first.enorm, first.hnorm = norm(width, eps=eps), norm(width, eps=eps)
        first.eh_proj = nn.Linear(2 * width, width, bias=False)
        last.final_layernorm = norm(width, eps=eps)

    @staticmethod
    def _kind(number: int, names: frozenset[str]) -> str:
        """What a block is: released configurations may not say it, the names of its tensors do."""
        signs = {"full_attention": "q_proj.weight", "moe": "gate.weight", "mlp": "up_proj.weight"}
        for kind, sign in signs.items():
            if f"layers.{number}.mixer.{sign}" in names:
                return kind
        raise ValueError(
            f"block {number} of the MTP head is no attention, expert or MLP block: those kinds are supported"
        )

    def fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """See :meth:`MtpHead.fuse`."""
        first: Any = self.layers[0]
        fused: Tensor = first.eh_proj(torch.cat([first.enorm(embedding), first.hnorm(hidden)], dim=-1))
        return fused

    def finish(self, hidden: Tensor) -> Tensor:
        """See :meth:`MtpHead.finish`."""
        last: Any = self.layers[-1]
        normed: Tensor = last.final_layernorm(hidden)
        return normed

    def positions(self, x: Tensor, positions: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: these layers have no positions."""
        return {}


HEADS: Mapping[str, type[MtpHead]] = {
    "qwen3_next": QwenHead,
    "qwen3_5_text": QwenHead,
    "qwen3_5_moe_text": QwenHead,
    "nemotron_h": NemotronHead,
}


def load_mtp_head(model: Any, folder: str | Path) -> MtpHead:
    """The MTP head of a loaded transformers model, on its device and in its dtype.

    Args:
        model: a causal language model of a family in `HEADS`.
        folder: the model's folder, with safetensors that hold `mtp.*`.

    Raises:
        ValueError: another family, or a folder whose tensors are not those of this model's head.
    """
    config = copy.deepcopy(model.config.get_text_config())
    check_folder(config.model_type, Path(folder))
    tensors = read_mtp_tensors(Path(folder))
    # Masks are given as tensors to be added to the scores, which not every attention function takes.
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        head = HEADS[config.model_type](model.get_decoder(), config, frozenset(tensors))
    wanted = head.state_dict()
    tensors = _stack_experts(tensors, frozenset(wanted))
    _check_names_and_shapes(tensors, wanted, Path(folder))
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    state = {
        name: tensor.to(model.device, torch.float32 if any(part in name for part in kept) else model.dtype)
        for name, tensor in tensors.items()
    }
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False).eval()


def check_folder(model_type: str, folder: Path) -> None:
    """Refuse a model without an MTP head, by what its folder says; no weights are read.

    Args:
        model_type: of the model's text part.
        folder: the model's.

    Raises:
        ValueError: a family without such heads, or a folder without their tensors.
    """
    if model_type not in HEADS:
        raise ValueError(f"a {model_type} model has no MTP head that is known here: wanted one of {', '.join(HEADS)}")
    if not _files_with_mtp(folder):
        raise ValueError(f"{folder} has no MTP weights: tensors mtp.* in its safetensors are wanted")


def read_mtp_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors `mtp.*` of a model folder, without that prefix."""
    found: dict[str, Tensor] = {}
    for file, names in _files_with_mtp(folder).items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                found[_without_prefix(name) or name] = opened.get_tensor(name)
    return found


def _files_with_mtp(folder: Path) -> dict[Path, list[str]]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", framework="pt") as opened:
            weight_map = dict.fromkeys(opened.keys(), "model.safetensors")
    else:
        raise ValueError(f"{folder} has no safetensors: MTP weights are read from model.safetensors or its index")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if _without_prefix(name) is not None:
            files.setdefault(folder / file, []).append(name)
    return files


def _without_prefix(name: str) -> str | None:
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), None)


def _stack_experts(tensors: dict[str, Tensor], wanted: frozenset[str]) -> dict[str, Tensor]:
    """Checkpoints store experts one by one, transformers all in one tensor: gate above up where both are there."""
    result = dict(tensors)
    expert = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
    groups: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = expert.fullmatch(name)
        if match:
            groups.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
            del result[name]
    for prefix, parts in groups.items():
        stacked = {part: torch.stack([found[i] for i in sorted(found)]) for part, found in parts.items()}
        if f"{prefix}.gate_up_proj" in wanted and {"gate_proj", "up_proj"} <= stacked.keys():
            stacked["gate_up_proj"] = torch.cat([stacked.pop("gate_proj"), stacked.pop("up_proj")], dim=1)
        result |= {f"{prefix}.{part}": tensor for part, tensor in stacked.items()}
    return result


def _check_names_and_shapes(tensors: dict[str, Tensor], wanted: dict[str, Tensor], folder: Path) -> None:
    for what, names in (("lacks", wanted.keys() - tensors.keys()), ("has unknown", tensors.keys() - wanted.keys())):
        if names:
            first = sorted(names)[0]
            raise ValueError(f"the MTP head in {folder} {what} {len(names)} tensors, the first is mtp.{first}")
    for name, tensor in sorted(tensors.items()):
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"mtp.{name} in {folder} is {tuple(tensor.shape)}: this model wants {tuple(wanted[name].shape)}"
            )


def _layer_numbers(names: frozenset[str]) -> list[int]:
    return sorted({int(name.split(".")[1]) for name in names if name.startswith("layers.")})


def _full_attention_layer(trunk: Any) -> Any:
    """The trunk's last layer of full attention: the MTP layer is built like it."""
    return next(layer for layer in reversed(trunk.layers) if hasattr(layer, "self_attn"))
