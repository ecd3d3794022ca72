"""The bundled models: they load offline, write recognisable text, and their recurrent state matters."""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from replayssm import bundled

NAMES = bundled.names()
LIMIT = 8_000_000  # bytes of safetensors
# Written for this test, so in no training file.
CODE = '''\
import json
from pathlib import Path


class Settings:
    """Options that are read from a file in the home directory."""

    def __init__(self, path, defaults=None):
        self.path = Path(path)
        self.values = dict(defaults or {})

    def load(self):
        """Return the stored values, or the default values if there is no file."""
        if not self.path.exists():
            return self.values
        with open(self.path, encoding="utf-8") as file:
            self.values.update(json.load(file))
        return self.values
'''
STRINGS = [
    "",
    "plain text",
    "  spaces\tand\r\nlines \n",
    "naïve café – “quotes”",
    "日本語 Ελληνικά العربية",
    "👩‍👩‍👧 \U0010ffff \ufffe",
    "\x00\x01\x7f",
    "a <b> | < |im_start| >",
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may ask a hub."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a bundled model asked the network"))


@cache
def model_of(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled.path(name), dtype=torch.float32).eval()


@cache
def tokenizer_of(name: str) -> Any:
    return AutoTokenizer.from_pretrained(bundled.path(name))


def code_tokens() -> Tensor:
    return torch.tensor([list(CODE.encode())])


def loss(logits: Tensor, tokens: Tensor) -> float:
    """Mean loss in nats per byte: logits [1, T, V] predict tokens [1, T]."""
    return F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).item()


@torch.no_grad()
def stepwise_logits(name: str, tokens: Tensor, forget: bool) -> Tensor:
    """Logits of token-by-token decoding, zeroing every recurrent state after each step if `forget`."""
    model = model_of(name)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    past = DynamicCache(config=model.config)
    logits: list[Tensor] = []
    for token in tokens.split(1, dim=1):
        logits.append(model(token, use_cache=True, **{keyword: past}).logits)
        if forget:
            states = [s for layer in past.layers for s in getattr(layer, "recurrent_states", {}).values()]
            assert states
            for state in states:
                state.zero_()
    return torch.cat(logits, dim=1)


def test_names_start_with_the_default_and_unknown_ones_are_refused() -> None:
    assert NAMES == ["qwen3_5-tiny", "kimi_linear-tiny", "granite_hybrid-tiny"]
    with pytest.raises(ValueError, match=r"unknown bundled model 'gpt': wanted one of qwen3_5-tiny, "):
        bundled.path("gpt")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_small_bf16_and_documented(name: str) -> None:
    folder = bundled.path(name)
    assert (folder / "model.safetensors").stat().st_size <= LIMIT
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert {opened.get_slice(key).get_dtype() for key in opened.keys()} == {"BF16"}  # noqa: SIM118
    card = (folder / "MODEL_CARD.md").read_text()
    assert all(word in card for word in ("CPython", "PSF License", "held-out loss", "steps", "state zeroed"))


@pytest.mark.parametrize("name", NAMES)
def test_every_string_survives_the_tokenizer(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in STRINGS:
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == model_of(name).config.vocab_size == 272
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 259)


@pytest.mark.parametrize("name", NAMES)
def test_chat_template_marks_the_turns(name: str) -> None:
    turns = [{"role": "user", "content": "What is zip?"}]
    text = tokenizer_of(name).apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is zip?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer_of(name).encode(text)
    assert [token for token in ids if token > 255] == [257, 258, 257]
    assert tokenizer_of(name).decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_unseen_code_is_predicted_well(name: str) -> None:
    tokens = code_tokens()
    assert loss(model_of(name)(tokens, use_cache=False).logits, tokens) < 1.2  # an untrained model: 5.6


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_python(name: str) -> None:
    tokenizer = tokenizer_of(name)
    inputs = tokenizer("class Reader:\n    def __init__(self, ", return_tensors="pt")
    out = model_of(name).generate(**inputs, max_new_tokens=80, do_sample=False)
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert "):\n        " in text
    assert "self." in text


@pytest.mark.parametrize("name", NAMES)
def test_decoding_needs_the_recurrent_state(name: str) -> None:
    tokens = code_tokens()[:, :112]
    kept = loss(stepwise_logits(name, tokens, forget=False), tokens)
    lost = loss(stepwise_logits(name, tokens, forget=True), tokens)
    assert lost > kept + 0.3


def test_the_first_model_carries_an_mtp_layer() -> None:
    folder = bundled.path(NAMES[0])
    config = json.loads((folder / "config.json").read_text())
    width, inner, heads, groups, dim = (
        config[key]
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    assert config["mtp_num_hidden_layers"] == 1
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        found = {key: opened.get_slice(key).get_shape() for key in opened.keys() if key.startswith("mtp.")}  # noqa: SIM118
    layer = "mtp.layers.0."
    assert found == {
        "mtp.fc.weight": [width, 2 * width],
        "mtp.pre_fc_norm_embedding.weight": [width],
        "mtp.pre_fc_norm_hidden.weight": [width],
        "mtp.norm.weight": [width],
        f"{layer}input_layernorm.weight": [width],
        f"{layer}post_attention_layernorm.weight": [width],
        f"{layer}self_attn.q_proj.weight": [2 * heads * dim, width],
        f"{layer}self_attn.k_proj.weight": [groups * dim, width],
        f"{layer}self_attn.v_proj.weight": [groups * dim, width],
        f"{layer}self_attn.o_proj.weight": [width, heads * dim],
        f"{layer}self_attn.q_norm.weight": [dim],
        f"{layer}self_attn.k_norm.weight": [dim],
        f"{layer}mlp.gate_proj.weight": [inner, width],
        f"{layer}mlp.up_proj.weight": [inner, width],
        f"{layer}mlp.down_proj.weight": [width, inner],
    }


@torch.no_grad()
def test_mtp_drafts_are_accepted_more_than_two_tokens_a_step() -> None:
    from training import model_card

    model = model_of(NAMES[0])
    predictor = model_card.load_predictor(model, bundled.path(NAMES[0]))
    prompt = code_tokens()[:, :200]
    tokens = model_card.greedy_continuation(model, prompt, 128)
    drafted = model_card.drafts(model, predictor, tokens, depth=3)
    count, steps = model_card.tokens_per_step(drafted[0], tokens[0], start=prompt.shape[1] - 1)
    assert count / steps > 2
