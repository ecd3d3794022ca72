"""replayssm.enable on the twelve families: the tokens, the cache and the model are what transformers makes them.

Runs on each supported transformers release; families that the installed one lacks are skipped by name.
"""

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, VOCAB, build, built_models, cache_name, prompts
from transformers import DynamicCache

import replayssm
from replayssm.models import ReplayCache, last_cache

transformers.logging.set_verbosity_error()

NEW_TOKENS = 64
ONE_PER_KIND = ["qwen3_5", "kimi_linear", "bamba", "falcon_h1"]  # GDN, KDA, Mamba-2, a hybrid layer


@pytest.fixture(scope="module")
def models():
    """Each test must leave them disabled."""
    return built_models()


@pytest.fixture(params=list(FAMILIES))
def model(request, models):
    yield (found := models(request.param))
    replayssm.disable(found)


@pytest.fixture(params=ONE_PER_KIND)
def one_per_kind(request, models):
    yield (found := models(request.param))
    replayssm.disable(found)


def generate(model, inputs, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(**inputs, **options)


def decodes_batches(model):
    """False for Falcon-H1 with a norm before transformers 5.24: one token of a batch of B comes out as B tokens."""
    old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
    return not (old and getattr(model.config, "mamba_rms_norm", False))


def upstream(model, inputs, **options):
    """What transformers generates; row by row where it cannot decode a batch."""
    if decodes_batches(model):
        return generate(model, inputs, **options)
    rows = range(len(inputs["input_ids"]))
    return torch.cat([generate(model, {k: v[i : i + 1] for k, v in inputs.items()}, **options) for i in rows])


def skip_without_batches(model):
    if not decodes_batches(model):
        pytest.skip(f"transformers {transformers.__version__} cannot decode a batch of this model")


def forward(model, ids, cache, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=True, **{cache_name(model): cache}).logits


def new_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def random_ids(batch, length, seed=7):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_zeroing_the_state_moves_the_logits_by_order_one(model):
    """Otherwise equal tokens would prove nothing about the state."""
    inputs, token = prompts(), random_ids(1, 1)
    logits = []
    for zero in (False, True):
        cache = new_cache(model)
        forward(model, inputs["input_ids"], cache)
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                if zero and state is not None:
                    state.zero_()
        logits.append(forward(model, token, cache)[:, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.5
    assert (logits[0] - logits[1]).norm() > 0.3 * logits[0].norm()


@pytest.mark.parametrize("ring_len", [5, 16])
@pytest.mark.parametrize("batch", [1, 3], ids=["one", "left-padded"])
def test_greedy_tokens_equal_transformers(model, batch, ring_len):
    inputs = prompts(batch)
    expected = upstream(model, inputs)
    assert len(set(expected[0, 11:].tolist())) > 10, "a loop of few tokens would be too easy"
    replayssm.enable(model, ring_len)
    assert generate(model, inputs).tolist() == expected.tolist()
    counters = last_cache(model).pool.counters()
    assert counters["decode_steps"] == batch * (NEW_TOKENS - 1)
    assert counters["flushes"] == batch * ((NEW_TOKENS - 1) // ring_len)


def test_beams_equal_transformers(model):
    skip_without_batches(model)
    inputs, options = prompts(2), {"num_beams": 3, "max_new_tokens": 24}
    expected = upstream(model, inputs, **options)
    replayssm.enable(model, 5)
    assert generate(model, inputs, **options).tolist() == expected.tolist()


def test_sampling_equals_transformers(model):
    inputs = prompts(3)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 24}
    skip_without_batches(model)
    torch.manual_seed(3)
    expected = generate(model, inputs, **options)
    replayssm.enable(model)
    torch.manual_seed(3)
    assert generate(model, inputs, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_bf16_model_is_as_close_to_fp32_as_transformers_is(name, state_dtype):
    """Teacher forced over 40 tokens; the fp32 model has the same rounded weights."""
    inputs, ids = prompts()["input_ids"], random_ids(1, 40)
    model = build(name, torch.bfloat16)
    exact = build(name, torch.bfloat16).float()

    def decode(model, cache):
        forward(model, inputs, cache)
        return torch.cat([forward(model, ids[:, i : i + 1], cache) for i in range(40)], dim=1).float()

    reference = decode(exact, new_cache(exact))
    theirs = decode(model, new_cache(model))
    replayssm.enable(model, state_dtype=state_dtype)
    ours = decode(model, ReplayCache(model))

    def error(logits):
        # The median step: where two experts score alike, rounding picks one, and that step's logits jump.
        return ((logits - reference).norm(dim=-1) / reference.norm(dim=-1)).median()

    assert error(ours) < 1.25 * error(theirs) + (0.002 if state_dtype == torch.float32 else 0.01)


def test_chunks_and_turns_continue_from_the_ring(model):
    """Several tokens on a cache whose ring holds records, then single ones, then several again."""
    skip_without_batches(model)
    inputs = prompts(2)
    mask = inputs["attention_mask"]
    pieces = [inputs["input_ids"], *(random_ids(2, n, seed=n) for n in (1, 1, 1, 4, 1, 1, 9, 1, 1))]

    def run(cache):
        seen, logits = mask[:, :0], []
        for piece in pieces:
            new = mask if seen.shape[1] == 0 else torch.ones_like(piece)
            seen = torch.cat([seen, new], dim=1)
            logits.append(forward(model, piece, cache, seen)[:, -1])
        return torch.stack(logits)

    expected = run(new_cache(model))
    replayssm.enable(model, 5)
    torch.testing.assert_close(run(ReplayCache(model)), expected, atol=1e-4, rtol=1e-4)


def test_prompts_shorter_than_the_convolution(one_per_kind):
    for length in (1, 2, 3):
        inputs = prompts(1, length)
        expected = upstream(one_per_kind, inputs, max_new_tokens=12)
        replayssm.enable(one_per_kind, 4)
        assert generate(one_per_kind, inputs, max_new_tokens=12).tolist() == expected.tolist()
        replayssm.disable(one_per_kind)


def test_a_direct_call_and_a_prefilled_cache_for_generate(one_per_kind):
    """As users do it for a shared prefix: fill a cache once, copy it, generate from the copies."""
    model, prefix, turn = one_per_kind, prompts()["input_ids"], random_ids(1, 5)
    inputs = {"input_ids": torch.cat([prefix, turn], dim=1)}
    expected = upstream(model, inputs)
    replayssm.enable(model)
    cache = ReplayCache(model)
    forward(model, prefix, cache)
    for _ in range(2):
        copied = copy.deepcopy(cache)
        with torch.no_grad():
            assert generate(model, inputs, **{cache_name(model): copied}).tolist() == expected.tolist()
        assert last_cache(model) is copied
        assert copied.adapters[0].mixer is cache.adapters[0].mixer, "copying a cache must not copy weights"
    assert cache.pool.counters()["decode_steps"] == 0


def test_cache_reset_and_another_batch_size(one_per_kind):
    model = replayssm.enable(one_per_kind, 3)
    cache = ReplayCache(model)
    for batch in (2, 2, 3):
        ids, token = random_ids(batch, 6, batch), random_ids(batch, 1, batch)
        fresh = ReplayCache(model)
        expected = [forward(model, x, fresh) for x in (ids, token)]
        for want, x in zip(expected, (ids, token), strict=True):
            torch.testing.assert_close(forward(model, x, cache), want, atol=0, rtol=0)
        cache.reset()


def test_a_reset_cache_serves_the_model_in_another_dtype():
    model = replayssm.enable(build("qwen3_5"))
    cache, ids = ReplayCache(model), random_ids(2, 6)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        fresh = ReplayCache(model)
        for x in (ids, ids[:, :1]):
            torch.testing.assert_close(forward(model, x, cache), forward(model, x, fresh), atol=0, rtol=0)
        cache.reset()


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "records in the ring"])
def test_rows_are_reordered_repeated_and_selected(one_per_kind, steps):
    model = replayssm.enable(one_per_kind, 4)
    ids, more = random_ids(3, 6), random_ids(6, steps + 3, 9)

    def filled(parents):
        """A cache whose rows have seen what rows `parents` of the other saw."""
        cache = ReplayCache(model)
        forward(model, ids[parents], cache)
        for i in range(steps):
            forward(model, more[:3, i : i + 1][parents], cache)
        return cache

    def follow(cache, rows):
        return torch.cat([forward(model, more[:rows, steps + i : steps + i + 1], cache) for i in range(3)], dim=1)

    for change, parents in [
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.reorder_cache(torch.tensor([1, 2, 0])), [1, 2, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ]:
        cache = filled([0, 1, 2])
        change(cache)
        ours, wanted = follow(cache, len(parents)), follow(filled(parents), len(parents))
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def test_rows_of_an_empty_cache_may_be_changed(models):
    """Nothing to do, as in a DynamicCache; a reset cache is empty too."""
    model = replayssm.enable(models("qwen3_5"), 4)
    used, cache = ReplayCache(model), ReplayCache(model)
    forward(model, random_ids(2, 6), used)
    used.reset()
    for empty in (cache, used):
        empty.reorder_cache(torch.tensor([1, 0, 0]))
        empty.batch_repeat_interleave(2)
        empty.batch_select_indices(torch.tensor([0]))
    torch.testing.assert_close(
        forward(model, random_ids(2, 6), used), forward(model, random_ids(2, 6), cache), atol=0, rtol=0
    )
    replayssm.disable(model)


def test_a_beam_with_one_child_keeps_its_slot(models):
    model = replayssm.enable(models("qwen3_5"))
    cache = ReplayCache(model)
    forward(model, random_ids(4, 6), cache)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    assert cache.rows == [3, 2, 1, 0]
    assert cache.pool.counters()["state_bytes_copied"] == 0
    cache.reorder_cache(torch.tensor([1, 1, 1, 3]))
    assert cache.rows[0] == 2
    assert cache.rows[3] == 0
    assert cache.pool.counters()["state_bytes_copied"] == 2 * cache.pool.checkpoint_bytes_per_slot
    replayssm.disable(model)


def snapshot(model):
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def test_disable_restores_the_model(model):
    before, weights = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    replayssm.enable(model)
    replayssm.enable(model, 4, state_dtype=torch.bfloat16)
    generate(model, prompts(), max_new_tokens=4)
    assert list(model.state_dict()) == list(weights), "nothing is added to what is saved"
    replayssm.disable(model)
    replayssm.disable(model)
    assert snapshot(model) == before
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    cache = generate(model, prompts(), max_new_tokens=4, return_dict_in_generate=True)
    assert not any(isinstance(value, ReplayCache) for value in cache.values())


def test_enable_leaves_other_models_alone(models):
    model, other = models("qwen3_5"), build("qwen3_5", seed=1)
    before, inputs = snapshot(other), prompts()
    expected = generate(other, inputs)
    replayssm.enable(model)
    assert snapshot(other) == before
    assert generate(other, inputs).tolist() == expected.tolist()
    replayssm.disable(model)


def test_enable_again_changes_the_settings(models):
    model, inputs = models("bamba"), prompts()
    expected = generate(model, inputs)
    for ring_len in (16, 1, 4):
        replayssm.enable(model, ring_len)
        assert generate(model, inputs).tolist() == expected.tolist()
        assert last_cache(model).pool.ring_len == ring_len
    cache = ReplayCache(model, 2, state_dtype=torch.float16)
    forward(model, inputs["input_ids"], cache)
    assert cache.pool.ring_len == 2
    assert cache.pool.state_args(0)["checkpoint"].dtype == torch.float16
    replayssm.disable(model)


def test_a_part_of_a_model_may_be_enabled_before_the_whole(models):
    model, inputs = models("qwen3_5"), prompts()
    before, expected = snapshot(model), generate(model, inputs)
    replayssm.enable(model.model)
    replayssm.enable(model)
    assert generate(model, inputs).tolist() == expected.tolist()
    replayssm.disable(model)
    replayssm.disable(model.model)
    assert snapshot(model) == before


def test_a_forward_of_the_instance_is_called_and_restored(models):
    """As accelerate leaves one on each module that it places."""
    model, inputs, calls = models("qwen3_5"), prompts(), []
    mixer = next(m for m in model.modules() if type(m).__name__ == "Qwen3_5GatedDeltaNet")
    expected, own = generate(model, inputs), mixer.forward

    def hooked(*args, **kwargs):
        calls.append(args[0].shape[1] if args else kwargs["hidden_states"].shape[1])
        return own(*args, **kwargs)

    mixer.forward = hooked
    replayssm.enable(model)
    assert generate(model, inputs).tolist() == expected.tolist()
    assert calls == [inputs["input_ids"].shape[1]]
    replayssm.disable(model)
    assert vars(mixer)["forward"] is hooked
    del mixer.forward


def test_a_copy_of_an_enabled_model_is_its_own(models):
    model, inputs = models("qwen3_5"), prompts()
    expected = generate(model, inputs)
    replayssm.enable(model)
    generate(model, inputs, max_new_tokens=2)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert generate(copied, inputs).tolist() == expected.tolist()
    assert last_cache(copied) is not None
    model.load_state_dict(replayssm.disable(copied).state_dict())
    replayssm.disable(model)


def test_weights_may_change_while_enabled(models):
    model, other, inputs = models("bamba"), build("bamba", seed=5), prompts()
    own = {k: v.clone() for k, v in model.state_dict().items()}
    expected = generate(other, inputs)
    replayssm.enable(model)
    generate(model, inputs, max_new_tokens=3)
    model.load_state_dict(other.state_dict())
    assert generate(model, inputs).tolist() == expected.tolist()
    model.load_state_dict(own)
    replayssm.disable(model)


def test_several_samples_of_one_prompt(models):
    model, inputs = models("qwen3_5"), prompts()
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 20}
    torch.manual_seed(0)
    expected = generate(model, inputs, **options)
    replayssm.enable(model, 6)
    torch.manual_seed(0)
    assert generate(model, inputs, **options).tolist() == expected.tolist()
    replayssm.disable(model)


def test_prefill_in_chunks(models):
    model, inputs = models("qwen3_5"), prompts(2)
    options = {"prefill_chunk_size": 4, "max_new_tokens": 20}
    expected = generate(model, inputs, **options)
    replayssm.enable(model, 6)
    assert generate(model, inputs, **options).tolist() == expected.tolist()
    replayssm.disable(model)


def test_the_text_model_inside_a_multimodal_one():
    qwen = pytest.importorskip("transformers.models.qwen3_5")
    text = build("qwen3_5").config
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
    config = qwen.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = qwen.Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(build("qwen3_5").model.state_dict())
    expected = generate(model, prompts(2))
    replayssm.enable(model)
    assert generate(model, prompts(2)).tolist() == expected.tolist()
    assert last_cache(model).pool.counters()["decode_steps"] == 2 * (NEW_TOKENS - 1)


# Errors


def tiny(module, config, model, **kwargs):
    package = pytest.importorskip(f"transformers.models.{module}")
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, **kwargs}
    return getattr(package, model)(getattr(package, config)(**sizes))


ATTENTION = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
UNSUPPORTED = {
    "LlamaForCausalLM": ("llama", "LlamaConfig", ATTENTION),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3Config", {**ATTENTION, "head_dim": 16}),
    "MambaForCausalLM": ("mamba", "MambaConfig", {}),
    "FalconMambaForCausalLM": ("falcon_mamba", "FalconMambaConfig", {}),
    "JambaForCausalLM": (
        "jamba",
        "JambaConfig",
        {**ATTENTION, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    ),
}


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_unsupported_models_get_one_clear_sentence(name):
    module, config, kwargs = UNSUPPORTED[name]
    model = tiny(module, config, name, **kwargs)
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"^{name} is not supported") as error:
        replayssm.enable(model)
    message = str(error.value)
    assert "\n" not in message
    assert "Qwen3.5" in message
    assert "Mamba-2" in message
    assert ("MambaMixer" in message) == ("Mamba" in name or "Jamba" in name)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ring_len": 0}, "ring_len is 0"),
        ({"ring_len": -3}, "ring_len is -3"),
        ({"ring_len": 2.5}, "ring_len is 2.5"),
        ({"ring_len": 5000}, "ring_len is 5000: it must be from 1 to 4096"),
        ({"state_dtype": torch.int8}, "state_dtype is torch.int8"),
        ({"ring_dtype": "bf16"}, "ring_dtype is 'bf16'"),
        ({"ring_dtype": torch.int8}, "ring_dtype is torch.int8"),
        ({"ring_dtype": torch.float16}, "ring_dtype is torch.float16: 'auto', torch.float32 is wanted"),
        ({"backend": "tpu"}, "backend 'tpu' is unknown"),
        ({"backend": "cuda"}, "backend 'cuda' is not available"),
    ],
)
def test_bad_settings_are_refused_and_change_nothing(models, settings, message):
    model = models("qwen3_5")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        replayssm.enable(model, **settings)
    assert snapshot(model) == before


def test_what_is_not_a_model_is_refused():
    with pytest.raises(ValueError, match="a Linear was given: a transformers model is wanted"):
        replayssm.enable(torch.nn.Linear(2, 2))


def test_other_cache_implementations_are_refused(models):
    model = replayssm.enable(models("qwen3_5"))
    for name in ("static", "offloaded"):
        with pytest.raises(ValueError, match=f"cache_implementation is '{name}'"):
            generate(model, prompts(), cache_implementation=name)
    assert generate(model, prompts(), cache_implementation="dynamic", max_new_tokens=2).shape == (1, 13)
    replayssm.disable(model)


def test_a_cache_used_wrongly_says_so(models):
    model, other, ids = models("qwen3_5"), build("qwen3_5", seed=1), random_ids(2, 6)
    with pytest.raises(ValueError, match=r"call enable\(model\) first"):
        ReplayCache(model)
    replayssm.enable(model)
    replayssm.enable(other)
    cache = ReplayCache(model)
    assert cache.pool is None
    forward(model, ids, cache)
    with pytest.raises(ValueError, match="made for another model"):
        forward(other, ids[:, :1], cache)
    with pytest.raises(ValueError, match="a batch of 1 meets a ReplayCache of 2 rows"):
        forward(model, ids[:1, :1], cache)
    with pytest.raises(ValueError, match="doesn't record"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="max_cache_len is 5: this ReplayCache holds 0 tokens, and 6 more don't fit"):
        forward(model, ids, ReplayCache(model, max_cache_len=5))
    replayssm.disable(model)
    with pytest.raises(ValueError, match="enable the model again"):
        forward(model, ids[:, :1], cache)


def test_gradients_flow_through_a_prefill_and_stop_at_decode(one_per_kind):
    model, ids = one_per_kind, random_ids(1, 6)
    weight = model.get_input_embeddings().weight

    def prefill(cache):
        logits = model(input_ids=ids, use_cache=True, **{cache_name(model): cache}).logits
        return torch.autograd.grad(logits.square().sum(), weight)[0]

    expected = prefill(new_cache(model))
    replayssm.enable(model)
    cache = ReplayCache(model)
    torch.testing.assert_close(prefill(cache), expected)
    model(input_ids=ids[:, :1], use_cache=True, **{cache_name(model): cache})
    assert not any(t.requires_grad for t in cache.pool.state_args(0).values() if isinstance(t, torch.Tensor))
    assert not cache.pool.conv_state(0).requires_grad


def test_without_a_cache_an_enabled_model_is_transformers_own(one_per_kind):
    expected = generate(one_per_kind, prompts(), max_new_tokens=6)
    replayssm.enable(one_per_kind)
    assert generate(one_per_kind, prompts(), max_new_tokens=6, use_cache=False).tolist() == expected.tolist()
    given = {cache_name(one_per_kind): new_cache(one_per_kind)}
    assert generate(one_per_kind, prompts(), max_new_tokens=6, **given).tolist() == expected.tolist()
    assert last_cache(one_per_kind) is None


def test_an_enabled_model_is_saved_as_any_other(models, tmp_path):
    model = models("kimi_linear")
    expected = generate(model, prompts(), max_new_tokens=8)
    replayssm.enable(model).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert generate(loaded, prompts(), max_new_tokens=8).tolist() == expected.tolist()
    replayssm.enable(loaded)
    assert generate(loaded, prompts(), max_new_tokens=8).tolist() == expected.tolist()
    replayssm.disable(model)


def test_an_enabled_model_survives_pickling(one_per_kind):
    """As a process does that hands its model to another."""
    expected = generate(one_per_kind, prompts(), max_new_tokens=8)
    replayssm.enable(one_per_kind, 3)
    generate(one_per_kind, prompts(), max_new_tokens=2)
    loaded = pickle.loads(pickle.dumps(one_per_kind))
    assert generate(loaded, prompts(), max_new_tokens=8).tolist() == expected.tolist()
    assert last_cache(loaded).pool.counters()["flushes"] == 2


# A CPU where flash-linear-attention is installed

FAKE_FLA = """
def broken(q=None, k=None, v=None, **kwargs):
    raise RuntimeError("0 active drivers ([]). There should only be one.")
chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = chunk_kda = fused_recurrent_kda = broken
"""


def test_a_cpu_with_flash_linear_attention_installed(tmp_path):
    """transformers then takes fla's kernels and fails; an enabled model runs, and a disabled one is as it was."""
    for name in ("__init__", "ops/__init__", "ops/gated_delta_rule/__init__", "ops/kda/__init__"):
        path = tmp_path / "fla" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE_FLA)
    script = """
    import replayssm
    from families import build, prompts
    for name in ("qwen3_5", "kimi_linear", "qwen3_next", "olmo_hybrid"):
        model = build(name)
        for enabled in (True, False, True):
            replayssm.enable(model) if enabled else replayssm.disable(model)
            try:
                print(name, model.generate(**prompts(), max_new_tokens=20, do_sample=False).tolist()[0])
            except RuntimeError as error:
                print(name, str(error)[:16])
    from replayssm.cli.generate import generate
    from replayssm.loading import load_model
    from replayssm.options import GenerateOptions
    loaded = load_model("kimi_linear-tiny")
    for replay in (True, False):
        options = GenerateOptions(max_new_tokens=20, ignore_eos=True, replay=replay)
        print("kimi_linear-tiny", generate(loaded, "import os", options).token_ids)
    """
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tmp_path), str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = []
    for name in ("qwen3_5", "kimi_linear", "qwen3_next", "olmo_hybrid"):
        tokens = f"{name} {generate(build(name), prompts(), max_new_tokens=20)[0].tolist()}"
        expected += [tokens, f"{name} 0 active drivers", tokens]
    *lines, replayed, stepwise = done.stdout.splitlines()
    assert lines == expected
    assert replayed == stepwise  # without replay, the command line runs there too
    assert replayed.startswith("kimi_linear-tiny [")


@pytest.mark.parametrize("tokens", [1, 3], ids=["decode", "prefill"])
def test_an_interrupted_forward_is_not_continued_in_silence(one_per_kind, tokens):
    """Some layers hold its tokens and some don't: the next forward says so, and a reset cache works again."""
    model = replayssm.enable(one_per_kind)
    cache = ReplayCache(model)
    prompt = random_ids(1, 6)
    expected = forward(model, prompt, cache)
    last = cache.adapters[-1].mixer
    hook = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        forward(model, random_ids(1, tokens), cache)
    hook.remove()
    with pytest.raises(ValueError, match="was interrupted"):
        forward(model, random_ids(1, tokens), cache)
    cache.reset()
    assert torch.equal(forward(model, prompt, cache), expected)


def test_a_step_without_room_is_refused_and_changes_nothing(one_per_kind):
    model, ids = replayssm.enable(one_per_kind), random_ids(2, 6)
    cache = ReplayCache(model, max_cache_len=7)
    forward(model, ids, cache)
    forward(model, ids[:, :1], cache)
    before = [tensor.clone() for tensor in cache.pool.tensors()]
    with pytest.raises(ValueError, match="max_cache_len is 7: this ReplayCache holds 7 tokens, and 1 more don't fit"):
        forward(model, ids[:, :1], cache)
    for now, then in zip(cache.pool.tensors(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    replayssm.disable(model)


def test_a_dtype_changed_in_the_middle_of_a_cache_is_refused():
    """Not at the first step alone: a cache outlives changes of its model."""
    model = replayssm.enable(build("qwen3_5"))
    cache = ReplayCache(model)
    forward(model, random_ids(1, 6), cache)
    forward(model, random_ids(1, 1), cache)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="conv_state has dtype float32: bfloat16 is wanted"):
        forward(model, random_ids(1, 1), cache)
