"""The runner beside transformers' `generate`: the same greedy tokens however a request is run."""

from __future__ import annotations

import copy
import math
import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from families import FAMILIES
from running import LENGTHS, NEW, PAGE, Desk, generated, int32, loaded, prompt

from replayssm import bundled, disable, enable
from replayssm.engine import Engine, EngineOptions, SamplingParams
from replayssm.engine.attention import Queries, TorchAttention, TritonAttention, parts_of, some_pages
from replayssm.engine.forward import Chunk
from replayssm.engine.graphs import Graphs, row_counts
from replayssm.engine.runner import Runner
from replayssm.loading import load_model
from replayssm.models.binding import binding_of

BUNDLED = bundled.names()
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)
IN_CI = ("qwen3_next", "mamba2", "olmo_hybrid")  # the other tests have some of the rest
EACH_FAMILY = [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.thorough) for name in FAMILIES]
ATTENTIONS = [TorchAttention, pytest.param(TritonAttention, marks=INTERPRETED)]


def expect(name, rows):
    """Each row's new tokens are the first that `generate` gives."""
    for row in rows:
        length = len(row.text) - row.sampled
        assert 0 < row.sampled <= NEW
        assert row.new == generated(name, length)[: row.sampled]


@pytest.mark.parametrize("name", [*BUNDLED, *EACH_FAMILY])
def test_a_ragged_batch_gives_the_tokens_of_each_request_alone(name):
    lengths = LENGTHS if name in BUNDLED else LENGTHS[:3]
    with Desk(name) as desk:
        rows = desk.start(*lengths)
        for _ in range(NEW - 1):
            desk.decode(rows)
        expect(name, rows)


@pytest.mark.parametrize("name", [*BUNDLED, "bailing_hybrid", "nemotron_h", "falcon_h1", "zamba2"])
def test_a_prompt_in_chunks_between_decodes_of_others_gives_the_same(name):
    with Desk(name, ring_len=4) as desk:
        (first,) = desk.start(11)
        long, short = desk.row(70), desk.row(37)
        for part in (1, 16, 2, 40):
            desk.prefill((long, part))
            desk.decode([first])
        desk.prefill((long, 11), (short, 30))  # ends one, goes on with another
        desk.decode([None, long, first, None], width=30)
        desk.prefill((short, 7))
        while long.sampled < NEW:
            desk.decode([long, *([first] if first.sampled < NEW else []), short])
        expect(name, [first, long, short])


@pytest.mark.parametrize("name", BUNDLED)
def test_what_was_decoded_can_be_continued_by_a_prefill(name):
    """A slot with records in its ring, as after a snapshot of a running request."""
    with Desk(name, ring_len=16) as desk:
        (row,) = desk.start(37)
        for _ in range(5):
            desk.decode([row])
        row.text += (ahead := generated(name, 37)[6:12])
        row.sampled += len(ahead)
        desk.prefill((row, 1 + len(ahead)))
        for _ in range(4):
            desk.decode([row])
        expect(name, [row])


@pytest.mark.parametrize("name", [*BUNDLED, "nemotron_h", "zamba2"])
def test_chunks_of_one_prompt_in_one_forward_give_the_tokens_of_the_whole_and_the_states_between(name):
    with Desk(name, ring_len=4) as desk:
        pool = desk.runner.pool
        short, long, other = desk.row(11), desk.row(37), desk.row(70)
        desk.prefill((other, 64))
        for row in (short, long):
            row.keep = pool.alloc(1, zero=False)[0]
        parts = [(short, 8, short.keep), (other, 5, None), (long, 16, None), (short, 3, None), (long, 16, long.keep)]
        parts += [(long, 5, None)]
        chunks = []
        for row, count, keep in parts:
            text = row.text[row.done : row.done + count]
            chunks.append(Chunk(row.slot, row.pages, row.done, text, keep))
            row.done += count
        forward = desk.runner.prefill(chunks)
        for row, place in ((short, 3), (long, 5)):
            row.add(int(forward.logits[place].argmax()))
            pool.seal(row.keep)
        desk.prefill((other, 1))
        forks = [desk.fork(short, short.keep, length=11, done=8), desk.fork(long, long.keep, length=37, done=32)]
        desk.prefill((forks[0], 3), (forks[1], 5))
        for _ in range(6):
            desk.decode([long, *forks, short, other])
        expect(name, [short, long, other, *forks])


def test_chunks_that_continue_another_come_behind_the_first_ones_of_all_slots():
    with Desk(BUNDLED[0]) as desk:
        one, other = desk.row(11), desk.row(37)
        chunks = [Chunk(one.slot, one.pages, 0, [1]), Chunk(one.slot, one.pages, 1, [2])]
        with pytest.raises(ValueError, match=rf"chunk 1 of slot {other.slot} comes behind a chunk 2 of another"):
            desk.runner.prefill([*chunks, Chunk(other.slot, other.pages, 0, [3])])


@pytest.mark.parametrize("name", BUNDLED)
def test_forks_of_a_snapshot_share_pages_and_state(name):
    with Desk(name, ring_len=4) as desk:
        first = desk.row(70)
        first.text = prompt(70)
        desk.prefill((first, 16 * PAGE))
        snapshot = desk.runner.pool.snapshot(first.slot)
        desk.prefill((first, 6))
        forks = [desk.fork(first, snapshot, length=70, done=16 * PAGE) for _ in range(2)]
        desk.prefill(*((fork, 6) for fork in forks))
        for _ in range(7):
            desk.decode([first, *forks])
        # One of what a running request has decoded, which is not at a flush, and no prefill behind it.
        assert first.done % PAGE == 1
        desk.decode([first])
        desk.decode([first])
        desk.decode([first])
        again = desk.runner.pool.snapshot(first.slot)
        late = desk.fork(first, again, length=70, done=first.done)
        late.text, late.sampled = list(first.text), first.sampled
        for _ in range(4):
            desk.decode([late, *forks, first])
        expect(name, [first, *forks, late])


@pytest.mark.parametrize("name", [*BUNDLED, "kimi_linear", "bamba", "falcon_h1", "zamba2"])
def test_windows_keep_the_drafts_that_are_right(name):
    with Desk(name, ring_len=4, ring_capacity=8, max_window=4) as desk:
        rows = desk.start(11, 37, 3)
        texts = [generated(name, length) for length in (11, 37, 3)]

        def drafts(row, right, wrong):
            ahead = texts[rows.index(row)][row.sampled : row.sampled + right]
            return ahead + [1 + (texts[rows.index(row)][row.sampled + right] + 3) % 90] * wrong

        a, b, c = rows
        desk.verify(rows, [drafts(a, 3, 0), drafts(b, 1, 2), drafts(c, 0, 3)], 4)
        assert [row.sampled for row in rows] == [5, 3, 2]
        desk.verify(rows, [drafts(a, 2, 1), None, []], 4)
        assert [row.sampled for row in rows] == [8, 3, 3]
        desk.decode(rows)
        desk.verify(rows, [drafts(a, 0, 1), drafts(b, 1, 0), drafts(c, 1, 0)], 2)
        desk.decode([c, None, a])
        desk.verify([c, b], [drafts(c, 3, 0), drafts(b, 2, 1)], 4)
        expect(name, rows)


@pytest.mark.parametrize("name", BUNDLED)
def test_batch_invariant_bits_are_those_of_a_request_alone(name):
    found = []
    for others in ((), (37, 3, 25)):
        with Desk(name, batch_invariant=True, max_window=3) as desk:
            rows = desk.start(70, *others)
            seen = [desk.decode(rows[::-1]).logits[-1] for _ in range(3)]
            slots, table, lengths = desk.batch(rows)
            tokens = torch.tensor([[row.text[-1], 5, 6] for row in rows])
            counts = int32([3] * len(rows))
            seen += list(desk.runner.verify(slots, table, lengths, tokens, counts).logits[0])
            desk.runner.commit(slots, counts, counts)
            found.append(torch.stack(seen))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", BUNDLED)
def test_hidden_states_are_those_that_give_the_logits(name):
    head = loaded(name).model.get_output_embeddings()
    scaling = getattr(loaded(name).model.config, "logits_scaling", 1.0)

    def check(hidden, logits):
        torch.testing.assert_close(head(hidden) / scaling, logits, rtol=1e-4, atol=1e-4)

    with Desk(name, max_window=2) as desk, torch.no_grad():
        rows = [desk.row(11), desk.row(3)]
        forward = desk.prefill((rows[0], 11), (rows[1], 3))
        assert forward.hidden.shape[0] == 14
        check(forward.hidden[[10, 13]], forward.logits)
        forward = desk.decode(rows)
        check(forward.hidden, forward.logits)
        slots, table, lengths = desk.batch(rows)
        forward = desk.runner.verify(slots, table, lengths, torch.ones(2, 2, dtype=torch.long), int32([2, 2]))
        check(forward.hidden, forward.logits)
        assert forward.logits.dtype == torch.float32


@pytest.mark.parametrize("name", BUNDLED)
def test_what_earlier_tenants_left_is_never_used(name):
    """NaN in all pages, rings and convolution states but the rows' own."""
    with Desk(name, max_window=3) as desk:
        for tensor in desk.runner.page_tensors().values():
            tensor.fill_(math.nan)
        for layer in range(len(desk.runner.pool.layers)):
            for key in ("checkpoint", "ring_u", "ring_k", "ring_g"):
                desk.runner.pool.fold_args(layer)[key].fill_(math.nan)
            desk.runner.pool.conv_state(layer).fill_(math.nan)
            desk.runner.pool.conv_window(layer).fill_(math.nan)
        rows = desk.start(37, 3)
        for _ in range(3):
            desk.decode([rows[0], None, rows[1]])
        desk.verify(rows, [[1], None], 3)
        expect(name, rows)


def test_padding_rows_and_unused_tokens_touch_nothing_else():
    with Desk("qwen3_5-tiny", max_window=3) as desk:
        row, other = desk.start(11, 3)
        pool, pages = desk.runner.pool, desk.runner.page_tensors()
        before = [t.clone() for t in (*pages.values(), *pool.tensors())]
        desk.decode([None, None], width=3)
        slots, table, lengths = desk.batch([None, other])
        desk.runner.verify(slots, table, lengths, torch.ones(2, 3, dtype=torch.long), int32([3, 0]))
        desk.runner.commit(slots, int32([3, 0]), int32([0, 0]))
        after = (*pages.values(), *pool.tensors())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if not a.isnan().any())
        desk.decode([row, other])
        expect("qwen3_5-tiny", [row, other])


@pytest.mark.parametrize("name", ["qwen3_5-tiny", "kimi_linear-tiny", "zamba2", "mamba2"])
def test_the_model_is_put_back(name):
    model = loaded(name).model
    before = [dict(vars(module)) for module in model.modules()]
    implementation = model.config._attn_implementation
    desk = Desk(name)
    (row,) = desk.start(11)
    with pytest.raises(ValueError, match="is served by an engine"):
        Desk(name)
    text = torch.tensor([prompt(11)])
    plain = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(text, attention_mask=torch.ones_like(text), **plain)  # between two steps of the runner
    assert out[0, 11:].tolist() == generated(name, 11)[:3]
    desk.decode([row])
    expect(name, [row])
    desk.runner.close()
    desk.runner.close()
    assert model.config._attn_implementation == implementation
    assert binding_of(model) is None
    assert [vars(module).keys() for module in model.modules()] == [old.keys() for old in before]


@pytest.mark.parametrize("name", ["qwen3_5-tiny", "mamba2"])
@pytest.mark.parametrize("by_caller", [False, True], ids=["enabled-by-the-engine", "enabled-by-the-caller"])
def test_a_model_that_is_served_is_neither_enabled_nor_disabled(name, by_caller):
    model = loaded(name).model
    if by_caller:
        enable(model, ring_len=3)
    before = binding_of(model)
    with Desk(name) as desk:
        (row,) = desk.start(11)
        for switch in (partial(enable, model), partial(enable, model.get_decoder()), partial(disable, model)):
            with pytest.raises(ValueError, match="is served by an engine: close that one first"):
                switch()
        desk.decode([row])
        expect(name, [row])
        assert binding_of(disable(copy.deepcopy(model))) is None  # nobody serves a copy
    assert binding_of(model) is before
    disable(enable(model))
    assert binding_of(model) is None


@pytest.mark.parametrize("by_caller", [False, True], ids=["enabled-by-the-engine", "enabled-by-the-caller"])
def test_a_model_whose_engine_was_forgotten_is_free_and_still_has_replay(by_caller):
    loaded_model = load_model("qwen3_5-tiny")
    if by_caller:
        enable(loaded_model.model, ring_len=3)
    engine = Engine(loaded_model, EngineOptions(max_rows=1, max_context=64))
    engine.add("import os", SamplingParams(max_tokens=4))
    engine.step()
    binding = binding_of(loaded_model.model)
    del engine
    with Engine(loaded_model, EngineOptions(max_rows=1, max_context=64)):
        assert binding_of(loaded_model.model) is binding
    assert binding_of(loaded_model.model) is binding
    forgotten = Engine(loaded_model, EngineOptions(max_rows=1, max_context=64))
    del forgotten
    assert binding_of(disable(loaded_model.model)) is None


def test_a_failed_forward_leaves_the_model_as_it_was():
    model = loaded("qwen3_5-tiny").model
    with Desk("qwen3_5-tiny") as desk:
        before = [set(vars(module)) for module in model.modules()]
        implementation = model.config._attn_implementation
        (slot,) = desk.runner.pool.alloc(1)
        with pytest.raises(IndexError):
            desk.runner.prefill([Chunk(slot, desk.pages(3), 0, [1, 2, 10**6])])
        assert model.config._attn_implementation == implementation
        assert [set(vars(module)) for module in model.modules()] == before
        assert not any(hooks for module in model.modules() for hooks in (module._forward_hooks,))
        expect("qwen3_5-tiny", desk.start(11))


@pytest.mark.parametrize("name", [*BUNDLED, "falcon_h1", "mamba2"])
def test_bytes_are_known_before_anything_is_allocated(name):
    settings = {"page_size": PAGE, "ring_len": 5, "ring_capacity": 9, "max_window": 4, "state_dtype": torch.bfloat16}
    per_slot, per_page = Runner.bytes_per(loaded(name), **settings, graphs=True)
    assert binding_of(loaded(name).model) is None
    with Desk(name, **settings, num_slots=3, num_pages=10) as desk:
        assert desk.runner.pool.bytes_per_slot == per_slot
        assert sum(t.nbytes for t in desk.runner.page_tensors().values()) == 10 * per_page
        assert all(len(tensor) == 10 for tensor in desk.runner.page_tensors().values())
        assert (per_page == 0) == (name == "mamba2")


def test_latents_are_kept_instead_of_keys_and_values():
    with Desk("kimi_linear") as desk:
        assert [list(t.shape) for t in desk.runner.page_tensors().values()] == [[160, PAGE, 1, 24]]


def test_models_with_attention_that_forgets_are_refused(monkeypatch):
    model = loaded("qwen3_5").model
    monkeypatch.setattr(model.config, "layer_types", ["linear_attention", "sliding_attention", "linear_attention"])
    with pytest.raises(ValueError, match="the model has sliding_attention layers: attention that sees all tokens"):
        Desk("qwen3_5")
    assert binding_of(model) is None


class Replayed(Graphs):
    """Graphs that run the steps again, on their fixed inputs, in place of what a GPU would have recorded."""

    def _capture(self, wanted):
        return {key: partial(self.run, *key) for key in wanted}


@pytest.mark.parametrize("name", BUNDLED)
def test_steps_from_fixed_inputs_give_the_same(name):
    """Batches of changing sizes, all padded; outputs stay where they are."""
    with Desk(name, ring_len=4, ring_capacity=8, max_window=4) as desk:
        desk.runner.graphs = graphs = Replayed(
            desk.runner, max_rows=8, max_window=4, max_pages=40, device=torch.device("cpu"), only_largest=False
        )
        a, b, c = rows = desk.start(37, 11, 3)
        logits = desk.decode(rows).logits
        desk.decode([b])
        desk.verify([c, a], [generated(name, 3)[2:3], generated(name, 37)[2:5]], 4)
        desk.decode([None, a, b, c, None])
        desk.verify([b, c], [[1, 2], None], 3)
        assert desk.decode(rows).logits.data_ptr() == logits.data_ptr() == graphs.logits.data_ptr()
        assert [row.sampled for row in rows] == [8, 6, 6]
        expect(name, rows)
        desk.runner.decode(*desk.batch([], width=1), torch.zeros(0, dtype=torch.long))
        assert not graphs.takes(9)
        assert not graphs.takes(1, pages=41)


@pytest.mark.parametrize("name", ["qwen3_5-tiny", "mamba2"])
def test_what_forwards_take_holds_the_fixed_buffers(name):
    sizes = {"max_rows": 8, "max_window": 4}
    counted = Runner.bytes_fixed(loaded(name), **sizes, max_step_tokens=64, graphs=True, page_size=PAGE)
    with Desk(name, max_window=4) as desk:
        graphs = Replayed(desk.runner, **sizes, max_pages=40, device=torch.device("cpu"), only_largest=False)
    buffers = graphs.logits.nbytes + graphs.hidden.nbytes
    assert counted > 2 * buffers
    without = Runner.bytes_fixed(loaded(name), **sizes, max_step_tokens=64)
    assert counted - without == buffers


def test_graphs_pad_little():
    assert row_counts(1) == [1]
    assert row_counts(8) == [1, 2, 4, 8]
    assert row_counts(50) == [1, 2, 4, 8, 16, 32, 48, 50]
    for rows in range(1, 257):
        count = next(n for n in row_counts(256) if n >= rows)
        assert count < 2 * rows or count == rows == 1
        assert count < rows + 16


def test_graphs_want_a_gpu():
    with pytest.raises(ValueError, match="graphs were asked for on cpu: they want a GPU with Triton"):
        Desk("qwen3_5-tiny", graphs=True)
    with Desk("qwen3_5-tiny") as desk:  # the model is free
        expect("qwen3_5-tiny", desk.start(11))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", BUNDLED)
def test_a_gpu_gives_the_same_tokens_without_waiting(name, graphs):
    with Desk(name, device="cuda", ring_len=4, ring_capacity=8, max_window=4, graphs=graphs) as desk:
        assert (desk.runner.graphs is not None) == graphs
        a, b, c = rows = desk.start(37, 11, 3)
        for _ in range(3):
            desk.decode(rows)
        desk.verify(rows, [generated(name, 37)[4:7], None, [1]], 4)
        batch = desk.batch(rows)
        tokens = torch.tensor([row.text[-1] for row in rows], device="cuda")
        desk.runner.decode(*batch, tokens)  # warm, and of no row's text
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            desk.runner.decode(*batch, tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expect(name, [a, b, c])


# Attention alone.


def rows_of_keys(lengths, counts, *, heads=4, num_k_heads=2, key_dim=8, value_dim=6, page=PAGE):
    """Random keys and values in shuffled pages, NaN elsewhere; queries packed one row behind the other."""
    rng = torch.Generator().manual_seed(1)
    width = max(-(-(a + n) // page) for a, n in zip(lengths, counts, strict=True))
    num_pages = 2 + len(lengths) * width
    table = torch.randperm(num_pages, generator=rng)[: len(lengths) * width].view(len(lengths), width).int()
    keys, values = (torch.full((num_pages, page, num_k_heads, dim), math.nan) for dim in (key_dim, value_dim))
    for row, total in enumerate(a + n for a, n in zip(lengths, counts, strict=True)):
        for t in range(total if counts[row] else 0):
            for pages in (keys, values):
                at = pages[table[row, t // page], t % page]
                at.copy_(torch.randn(at.shape, generator=rng))
    first = [sum(counts[:row]) for row in range(len(counts))]
    queries = Queries(table, int32(lengths), int32(first), int32(counts), max(counts), sum(counts))
    return torch.randn(sum(counts), heads, key_dim, generator=rng), keys, values, queries


def by_hand(query, keys, values, queries, scale):
    """Softmax over each token's own keys, in float64."""
    out = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.double)
    group = query.shape[1] // keys.shape[2]
    for row, (before, first, count) in enumerate(
        zip(*(t.tolist() for t in (queries.lengths, queries.first, queries.num_tokens)), strict=True)
    ):
        k, v = (x[queries.page_table[row].long()].flatten(0, 1).double() for x in (keys, values))
        for t in range(count):
            for head in range(query.shape[1]):
                seen = slice(0, before + t + 1)
                scores = k[seen, head // group] @ query[first + t, head].double() * scale
                out[first + t, head] = scores.softmax(0) @ v[seen, head // group]
    return out


def made(kind):
    return kind(PAGE) if kind is TorchAttention else kind("cpu", fixed_rows=1)


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize(
    ("num_k_heads", "key_dim", "value_dim"), [(1, 24, 16), (2, 8, 6), (4, 16, 16)], ids=["latent", "grouped", "each"]
)
def test_paged_attention_is_softmax_over_each_rows_own_tokens(kind, num_k_heads, key_dim, value_dim):
    shape = {"num_k_heads": num_k_heads, "key_dim": key_dim, "value_dim": value_dim}
    for lengths, counts in (((0, 9, 3, 70, 8), (5, 1, 0, 4, 1)), ((40, 7), (1, 1)), ((5, 0), (3, 40))):
        query, keys, values, queries = rows_of_keys(lengths, counts, **shape)
        attention = made(kind)
        attention.begin(queries)
        y = attention.run(query, keys, values, 0.3)
        torch.testing.assert_close(y.double(), by_hand(query, keys, values, queries, 0.3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_a_rows_attention_has_the_same_bits_alone(kind):
    counts = (5, 1, 1, 4, 1)
    query, keys, values, queries = rows_of_keys((0, 9, 3, 30, 8), counts)
    attention = made(kind)
    attention.begin(queries)
    together = attention.run(query, keys, values, 0.3)
    for row, count in enumerate(counts):
        at = slice(int(queries.first[row]), int(queries.first[row]) + count)
        one = queries._replace(
            page_table=queries.page_table[row : row + 1],
            lengths=queries.lengths[row : row + 1],
            first=int32([0]),
            num_tokens=int32([count]),
            total=count,
        )
        attention.begin(one)
        assert torch.equal(attention.run(query[at], keys, values, 0.3), together[at])


@INTERPRETED
@pytest.mark.parametrize("name", ["qwen3_5-tiny", pytest.param("kimi_linear-tiny", marks=pytest.mark.thorough)])
def test_the_kernels_for_a_gpu_give_the_same_tokens(name):
    with Desk(name, max_window=2) as desk:
        desk.runner.cache.attention = TritonAttention("cpu")
        rows = desk.start(11, 3)
        desk.decode([rows[0], None, rows[1]])
        desk.verify(rows, [generated(name, 11)[2:3], []], 2)
        desk.decode(rows)
        expect(name, rows)
        assert [row.sampled for row in rows] == [5, 4]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("num_k_heads", "key_dim", "value_dim"), [(4, 256, 256), (2, 128, 128), (8, 80, 80), (1, 576, 512)]
)
def test_paged_attention_on_a_gpu_is_softmax(num_k_heads, key_dim, value_dim, dtype, tolerance):
    shape = {"heads": 16, "num_k_heads": num_k_heads, "key_dim": key_dim, "value_dim": value_dim, "page": 16}
    for lengths, counts in (((300, 9, 31, 70), (1, 1, 0, 1)), ((40, 513), (4, 3)), ((0, 100), (130, 40))):
        query, keys, values, queries = rows_of_keys(lengths, counts, **shape)
        query, keys, values = (x.to(dtype) for x in (query, keys, values))
        expected = by_hand(query, keys, values, queries, key_dim**-0.5)
        attention = TritonAttention("cuda")
        attention.begin(Queries(*(x.cuda() for x in queries[:4]), *queries[4:]))
        y = attention.run(query.cuda(), keys.cuda(), values.cuda(), key_dim**-0.5).cpu().double()
        assert (y - expected).norm() < tolerance * expected.norm()


def test_long_walks_are_split_where_there_are_few_programs():
    assert [parts_of(n, 264) for n in (1, 32, 132, 264, 4096)] == [16, 16, 2, 1, 1]


def test_rows_of_about_the_same_length_share_a_call():
    assert [some_pages(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
