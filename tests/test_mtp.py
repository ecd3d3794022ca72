"""Multi-token prediction: the head of a checkpoint, and drafts from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from safetensors.torch import save_file
from speculation import (
    GRANITE,
    PROMPTS,
    QWEN,
    TableVerifier,
    counting_table,
    drafter_of,
    model_of,
)
from torch import Tensor

from replayssm import bundled
from replayssm.speculate import (
    Accepted,
    MtpDrafter,
    RecomputingVerifier,
    Start,
    load_mtp_head,
    speculate,
)
from replayssm.speculate.keys_values import KeysValues


@torch.no_grad()
def test_mtp_drafts_are_those_of_the_forward_that_the_head_was_trained_with():
    from training import model_card

    model, folder = model_of(QWEN), bundled.path(QWEN)
    tokens = torch.tensor([PROMPTS[0]])
    expected = model_card.drafts(model, model_card.load_predictor(model, folder), tokens, depth=3)
    verifier, drafter = RecomputingVerifier(model), MtpDrafter(model, folder)
    start, end = 40, 70
    prefilled = verifier.prefill(tokens[:, :start], torch.ones(1, start, dtype=torch.bool))
    first = tokens[:, start]
    prompt = tokens[:, :start]
    drafter.start(
        Start(prompt, prompt >= 0, prompt.tolist(), first, first.tolist(), prefilled.hidden, max_new_tokens=200)
    )
    for place in range(start, end):
        drafted = drafter.propose(3, 1, 3).tokens
        assert drafted[0].tolist() == expected[0, place - 1].tolist(), place
        one = torch.ones(1, dtype=torch.int32)
        hidden = verifier.verify(tokens[:, place, None], None, one).hidden
        verifier.commit(one, None)
        following = tokens[:, place + 1, None]
        drafter.update(Accepted(following, one, torch.zeros(1, 1, dtype=torch.int32), following.tolist(), hidden))


def test_mtp_gives_more_than_two_tokens_a_step():
    found = speculate(
        RecomputingVerifier(model_of(QWEN)), drafter_of("mtp", QWEN), PROMPTS[:1], max_new_tokens=40, num_drafts=3
    )
    assert found.statistics.tokens_per_step > 2


def test_keys_that_were_not_kept_are_never_seen():
    cache = KeysValues(2, capacity=8, device=torch.device("cpu"))

    def put(value: float, count: int) -> tuple[Tensor, Tensor]:
        new = torch.full((2, 1, count, 1), value)
        mask = cache.mask(count, torch.float32)
        return cache.update(new, new, 0)[0], mask

    put(1.0, 3)
    cache.keep(torch.tensor([3, 1]), 3)
    cache.offset = 0
    put(9.0, 1)  # a draft
    cache.offset = 0
    keys, mask = put(2.0, 2)
    seen = [[keys[b, 0, s, 0].item() for s in range(keys.shape[2]) if mask[b, 0, -1, s] == 0] for b in range(2)]
    assert seen == [[1, 1, 1, 2, 2], [1, 2, 2]]
    assert cache.positions(1).tolist() == [[3], [1]]


def released_names(head: Any) -> dict[str, Tensor]:
    """A head's tensors as checkpoints hold them: each expert by itself."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith(".experts"):
            tensors[f"mtp.{name}"] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)) if "gate" in part else {}
            for piece, weight in (parts or {part: matrix}).items():
                tensors[f"mtp.{prefix.removesuffix('.experts')}.experts.{expert}.{piece}.weight"] = weight
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def a_head_for(family: str, model: Any) -> Any:
    """An MTP head of random weights, put together here by its released names."""
    import copy

    from replayssm.speculate.mtp_head import HEADS

    config = copy.deepcopy(model.config.get_text_config())
    config._attn_implementation = "sdpa"
    kinds = {"nemotron_h": ("q_proj.weight", "gate.weight")}.get(family)
    names = ["layers.0.x"] if kinds is None else [f"layers.{i}.mixer.{sign}" for i, sign in enumerate(kinds)]
    head = HEADS[config.model_type](model.get_decoder(), config, frozenset(names))
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return head


HEADED = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h"]


@torch.no_grad()
@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
@pytest.mark.parametrize("family", HEADED)
def test_an_mtp_head_is_read_from_released_tensor_names(family, sharded, tmp_path):
    model = build(family)
    written = a_head_for(family, model)
    tensors = released_names(written) | {"model.other.weight": torch.zeros(1)}
    if sharded:
        names = sorted(tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in shards.items():
            save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map = {name: file for file, part in shards.items() for name in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    head = load_mtp_head(model, tmp_path)
    expected = written.state_dict()
    assert head.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in head.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("family", HEADED)
def test_an_mtp_head_gives_the_same_in_pieces_as_at_once(family):
    model = build(family)
    head = a_head_for(family, model).eval()
    width = model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    embedding, hidden = torch.randn(2, 2, 9, width, generator=generator)
    whole = head(embedding, hidden, KeysValues(2, 16, model.device))
    cache, parts = KeysValues(2, 16, model.device), []
    for piece in (slice(0, 4), slice(4, 5), slice(5, 9)):
        cache.offset = 0
        parts.append(head(embedding[:, piece], hidden[:, piece], cache))
        cache.keep(torch.tensor([piece.stop - piece.start] * 2), piece.stop - piece.start)
        cache.offset = 0
        head(hidden[:, :1], embedding[:, :1], cache)  # a draft that is forgotten
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    # The order of its two inputs matters, and so does what came before.
    assert not torch.allclose(head(hidden, embedding, KeysValues(2, 16, model.device)), whole, atol=1e-2)
    alone = head(embedding[:, 8:], hidden[:, 8:], KeysValues(2, 16, model.device))
    assert not torch.allclose(alone, whole[:, 8:], atol=1e-4)


@torch.no_grad()
def test_the_nemotron_head_computes_what_its_tensors_say():
    """By hand: fuse, one block of attention without positions, one of experts, the last norm."""
    model = build("nemotron_h")
    head = a_head_for("nemotron_h", model).eval()
    attention, experts = head.layers
    width = model.config.hidden_size
    embedding, hidden = torch.randn(2, 1, 5, width, generator=torch.Generator().manual_seed(1))

    def norm(x: Tensor, module: Any) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + model.config.layer_norm_epsilon).rsqrt() * module.weight

    fused = torch.cat([norm(embedding, attention.enorm), norm(hidden, attention.hnorm)], -1)
    x = fused @ attention.eh_proj.weight.T
    mixer, heads = attention.mixer, model.config.num_attention_heads
    y = norm(x, attention.norm)
    q, k, v = (
        (y @ p.weight.T).view(1, 5, -1, mixer.head_dim).transpose(1, 2)
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) * mixer.head_dim**-0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, 5, -1) @ mixer.o_proj.weight.T
    x = x + experts.mixer(norm(x, experts.norm))
    expected = norm(x, experts.final_layernorm)
    assert torch.allclose(head(embedding, hidden, KeysValues(1, 8, model.device)), expected, atol=1e-5)


def test_an_mtp_head_of_another_vocabulary_is_refused():
    class WithHidden(TableVerifier):
        gives_hidden = True

    with pytest.raises(ValueError, match="MTP head predicts 272 tokens, the target 7"):
        speculate(WithHidden(counting_table()), MtpDrafter(model_of(QWEN), bundled.path(QWEN)), [[0]], max_new_tokens=4)


def test_a_checkpoint_without_its_mtp_head_is_refused(tmp_path: Path):
    model = model_of(QWEN)
    with pytest.raises(ValueError, match="has no safetensors"):
        load_mtp_head(model, tmp_path)
    save_file({"model.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no MTP weights"):
        load_mtp_head(model, tmp_path)
    with pytest.raises(ValueError, match="a granitemoehybrid model has no MTP head"):
        load_mtp_head(model_of(GRANITE), bundled.path(GRANITE))


def test_mtp_tensors_that_do_not_fit_are_named(tmp_path: Path):
    model = model_of(QWEN)
    whole = released_names(load_mtp_head(model, bundled.path(QWEN)))

    def refused(tensors: dict[str, Tensor], match: str) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=match):
            load_mtp_head(model, tmp_path)

    refused({k: v for k, v in whole.items() if k != "mtp.fc.weight"}, "lacks 1 tensors, the first is mtp.fc.weight")
    refused(whole | {"mtp.fc.weight_scale": torch.ones(1)}, "has unknown 1 tensors, the first is mtp.fc.weight_scale")
    refused(whole | {"mtp.norm.weight": torch.ones(3)}, r"mtp.norm.weight .* is \(3,\): this model wants \(192,\)")
    second = {k.replace("layers.0", "layers.1"): v.clone() for k, v in whole.items() if "layers.0" in k}
    refused(whole | second, "has 2 layers")


def test_the_families_with_an_mtp_head_are_families_that_replay_serves():
    assert set(HEADED) <= set(FAMILIES)
