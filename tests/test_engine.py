"""The engine over a model that is a hash of what slots and pages hold: batching, cancelling, preempting, failing."""

import random

import pytest
import torch

from replayssm.engine.engine import Engine
from replayssm.engine.errors import EngineClosed, QueueFull
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.errors import InputError
from tests.token_model import EOS, VOCAB, TokenRunner, greedy, logits_of, memory_for, random_prompt, token_model

SMALL = {"page_size": 4, "chunk_tokens": 16, "max_step_tokens": 48, "snapshot_every": 8, "ring_len": 4}
LONG = {"max_tokens": 40, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def engine_with(**options) -> Engine:
    """An engine with small pages and few rows, unless told otherwise."""
    return Engine(token_model(), EngineOptions(**memory_for(6, 24, 800) | SMALL | options), runner=TokenRunner)


def assert_all_is_accounted_for(engine: Engine) -> None:
    """Every page and slot is free, or held by the prefix cache alone; without it, all are free."""
    assert not engine.has_work
    assert not engine.requests
    stats = engine.stats()
    assert stats.queued == stats.running == 0
    assert engine.pages.num_available == engine.pages.num_pages
    assert stats.slots_free + stats.snapshots == stats.slots_total
    if engine.cache is not None:
        engine.cache.clear()
    assert engine.pages.num_free == engine.pages.num_pages
    assert engine.runner.pool.num_free == engine.runner.pool.num_slots


def tokens_of(engine: Engine, prompts, params=GREEDY) -> list[list[int]]:
    return [output.completions[0].token_ids for output in engine.generate(prompts, params)]


def run(engine: Engine) -> dict[str, list]:
    """Step until nothing is left: all updates by request."""
    updates: dict[str, list] = {}
    while engine.has_work:
        for update in engine.step():
            updates.setdefault(update.request_id, []).append(update)
    return updates


@pytest.fixture(params=[False, True], ids=["in-step", "ahead"])
def ahead(request):
    return request.param


def test_tokens_are_those_of_the_model_alone(ahead):
    rng = random.Random(0)
    prompts = [random_prompt(rng, length) for length in (1, 3, 4, 5, 16, 17, 40, 64)]
    engine = engine_with(run_ahead=ahead)
    assert tokens_of(engine, prompts) == [greedy(prompt, 24) for prompt in prompts]
    assert_all_is_accounted_for(engine)


def test_a_step_gives_what_it_brought_to_each_request(ahead):
    engine = engine_with(run_ahead=ahead)
    first = engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    second = engine.add([8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    updates = run(engine)
    assert [len(update.token_ids) for update in updates[first]] == [1, 1, 1]
    assert [update.finish_reason for update in updates[first]] == [None, None, "length"]
    assert [update.finish_reason for update in updates[second]] == [None, "length"]
    assert updates[first][0].cached_tokens == 0
    assert updates[first][1].cached_tokens is None


def test_a_sample_ends_at_the_end_of_sequence_and_what_was_computed_ahead_is_dropped(ahead):
    rng = random.Random(1)
    engine = engine_with(run_ahead=ahead)
    prompts = [random_prompt(rng, 6) for _ in range(90)]
    ended = 0
    for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        (completion,) = output.completions
        assert completion.token_ids == greedy(prompt, 24)
        ended += completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")
    assert ended > 1
    assert_all_is_accounted_for(engine)


def test_samples_of_one_request_differ_and_come_again_with_the_seed():
    params = SamplingParams(n=4, seed=11, max_tokens=12, ignore_eos=True)
    outputs = [engine_with().generate([[3, 4, 5, 6, 7]], params)[0] for _ in range(2)]
    texts = [[completion.token_ids for completion in output.completions] for output in outputs]
    assert texts[0] == texts[1]
    assert len({tuple(tokens) for tokens in texts[0]}) == 4


def test_samples_of_one_request_compute_its_prompt_once():
    engine = engine_with()
    engine.generate([random_prompt(random.Random(2), 41)], SamplingParams(n=5, max_tokens=1))
    assert engine.stats().prefilled_tokens == 41 + 4


def test_the_second_of_two_requests_computes_the_tail_only(ahead):
    rng = random.Random(3)
    prefix = random_prompt(rng, 200)
    first, second = [*prefix, 1, 2], [*prefix, 3, 4, 5]
    engine = engine_with(run_ahead=ahead)
    engine.add(first, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(20):
        engine.step()
    assert engine.stats().running == 1  # it still decodes
    before = engine.stats().prefilled_tokens
    output = engine.generate([second], GREEDY)[0]
    assert output.completions[0].token_ids == greedy(second, 24)
    assert output.cached_tokens == 200
    assert engine.stats().prefilled_tokens - before == 3
    run(engine)
    assert_all_is_accounted_for(engine)


def test_an_evicted_prefix_is_computed_again_and_found_again():
    rng = random.Random(4)
    prefix = random_prompt(rng, 120)
    engine = engine_with(**memory_for(1, 12, 52), max_context=208)
    cached = []
    for prompt in ([*prefix, 1], [*prefix, 2], random_prompt(rng, 180), random_prompt(rng, 180), [*prefix, 3], prefix):
        output = engine.generate([prompt], GREEDY)[0]
        assert output.completions[0].token_ids == greedy(prompt, 24)
        cached.append(output.cached_tokens)
    assert cached == [0, 120, 0, 0, 0, 112]
    assert engine.stats().evictions > 0
    assert_all_is_accounted_for(engine)


@pytest.mark.parametrize("option", [{"prefix_cache": False}, {"replay": False}, {"ring_len": 1}, {"chunk_tokens": 4}])
def test_options_change_no_token(option):
    rng = random.Random(5)
    shared = random_prompt(rng, 30)
    prompts = [shared + random_prompt(rng, length) for length in (1, 2, 9, 30)] + [random_prompt(rng, 50)]
    assert tokens_of(engine_with(**option), prompts) == [greedy(prompt, 24) for prompt in prompts]


def test_hits_are_the_same_without_replay():
    rng = random.Random(6)
    shared = random_prompt(rng, 60)
    prompts = [shared + random_prompt(rng, 5) for _ in range(6)]
    cached = [
        [output.cached_tokens for output in engine_with(replay=replay).generate(prompts, GREEDY)]
        for replay in (True, False)
    ]
    assert cached[0] == cached[1]
    assert sum(cached[0]) == 5 * 60


def test_preemption_loses_no_token_and_sends_none_twice(ahead):
    rng = random.Random(7)
    engine = engine_with(**memory_for(6, 6, 60), run_ahead=ahead)
    prompts = [random_prompt(rng, 30) for _ in range(6)]
    params = SamplingParams(temperature=0, **LONG)
    outputs = engine.generate(prompts, params)
    assert engine.stats().preemptions > 0
    whole = engine_with(max_rows=1)
    assert [o.completions[0].token_ids for o in outputs] == tokens_of(whole, prompts, params)
    assert not any(o.cached_tokens for o in outputs), "what a sample finds of itself again was not cached for it"
    assert_all_is_accounted_for(engine)


def test_a_preempted_sample_stays_on_its_random_stream(ahead):
    rng = random.Random(8)
    engine = engine_with(**memory_for(6, 6, 60), run_ahead=ahead)
    prompts = [random_prompt(rng, 30) for _ in range(6)]
    params = [
        SamplingParams(seed=i, temperature=0.8, top_p=0.9, frequency_penalty=0.3, repetition_penalty=1.1, **LONG)
        for i in range(6)
    ]
    outputs = engine.generate(prompts, params)
    assert engine.stats().preemptions > 0
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        alone = engine_with(max_rows=1).generate([prompt], one)[0]
        assert output.completions[0].token_ids == alone.completions[0].token_ids


def test_a_cancelled_request_ends_with_an_abort_and_leaves_its_neighbours_alone(ahead):
    rng = random.Random(9)
    engine = engine_with(max_rows=2, run_ahead=ahead)
    prompts = [random_prompt(rng, 20) for _ in range(4)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = [engine.add(prompt, params) for prompt in prompts]
    for _ in range(5):
        engine.step()
    assert engine.cancel(ids[1])  # runs
    assert engine.cancel(ids[3])  # waits
    assert not engine.cancel(ids[3])
    assert not engine.cancel("nobody")
    updates = run(engine)
    assert [updates[name][-1].finish_reason for name in ids] == ["length", "abort", "length", "abort"]
    assert len(updates[ids[3]]) == 1
    assert engine.stats().cancelled == 2
    assert engine.stats().finished == 2
    assert_all_is_accounted_for(engine)


def test_a_higher_priority_overtakes():
    engine = engine_with(max_rows=1)
    slow = engine.add([1, 2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add([3, 4], GREEDY)
    fast = engine.add([5, 6], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), priority=3)
    order = [name for name, updates in run(engine).items() if updates[-1].finish_reason]
    assert order.index(fast) < len(order) - 1
    assert engine.stats().preemptions == 1
    assert slow in order


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        ("", {}, "the prompt is empty"),
        (None, {}, "the prompt is a NoneType: text or token ids are wanted"),
        (5, {}, "the prompt is a int: text or token ids are wanted"),
        (b"text", {}, "the prompt is a bytes"),
        ({1: 2}, {}, "the prompt is a dict"),
        ([1, VOCAB], {}, f"token id {VOCAB}: the model's are from 0 to {VOCAB - 1}"),
        ([1, "2"], {}, "token ids are wanted"),
        (torch.tensor([[1, 2], [3, 4]]), {}, "the prompt has 2 dimensions: one, of token ids, is wanted"),
        (torch.tensor([[1]]), {}, "the prompt has 2 dimensions"),
        (torch.tensor(1), {}, "the prompt has 0 dimensions"),
        (torch.tensor([1.0, 2.0]), {}, "the prompt has a Tensor that is no whole number: token ids"),
        ([torch.tensor([1, 2])], {}, "the prompt has a Tensor that is no whole number"),
        ([1] * 300, {"max_tokens": 300}, "together at most 512 fit"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids has token id"),
        ([1], {"n": 5000}, "at most max_queue"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_queued(prompt, params, message):
    engine = engine_with()
    with pytest.raises(InputError, match=message):
        engine.add(prompt, SamplingParams(**params))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None,), "model is a NoneType: a name, a folder, or a model from replayssm.loading.load_model is wanted"),
        ((torch.nn.Linear(1, 1),), "model is a Linear"),
        ((token_model(), {"max_rows": 1}), "options is a dict: EngineOptions is wanted"),
        ((token_model(), EngineOptions(), {"device": "cpu"}), "load is a dict: LoadOptions is wanted"),
    ],
)
def test_other_objects_than_an_engine_is_made_of_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        Engine(*given)


def test_what_is_no_params_is_refused():
    with pytest.raises(InputError, match="params is a dict: SamplingParams are wanted"):
        engine_with().add([1], {"n": 2})


def test_a_request_as_long_as_the_memory_is_served_and_one_token_more_is_refused():
    engine = engine_with(**memory_for(3, 2, 40))
    prompt = random_prompt(random.Random(10), engine.max_context - 30)
    assert engine.max_context < 512
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    others = [engine.add([i, i + 1], params) for i in range(1, 4)]
    output = engine.generate([prompt], params)[0]
    assert len(output.completions[0].token_ids) == 30
    assert others
    with pytest.raises(InputError, match=f"at most {engine.max_context} fit"):
        engine.add([*prompt, 1], params)
    run(engine)
    assert_all_is_accounted_for(engine)


def test_a_full_queue_refuses_and_names_taken_are_refused():
    engine = engine_with(max_rows=1, max_queue=2)
    engine.add([1], GREEDY, request_id="mine")
    with pytest.raises(InputError, match="request_id 'mine' is that of a request that isn't finished"):
        engine.add([1], GREEDY, request_id="mine")
    engine.add([2], GREEDY)
    with pytest.raises(QueueFull, match="2 samples wait already"):
        engine.add([3], GREEDY)
    engine.step()
    engine.add([3], GREEDY)


@pytest.mark.parametrize("name", [["x"], [], 7, 0, b"x"])
def test_a_name_that_is_no_string_is_refused(name):
    engine = engine_with()
    with pytest.raises(InputError, match=f"request_id is a {type(name).__name__}: a string is wanted"):
        engine.add([1], GREEDY, request_id=name)
    assert not engine.has_work


def test_a_prompt_may_be_a_tensor():
    assert tokens_of(engine_with(), [torch.tensor([5, 6, 7])]) == [greedy([5, 6, 7], 24)]


def test_a_name_is_taken_until_its_last_update_is_given():
    engine = engine_with()
    engine.add([1, 2], GREEDY, request_id="mine")
    engine.step()
    engine.cancel("mine")
    with pytest.raises(InputError, match="request_id 'mine' is that of a request whose last updates the next step"):
        engine.add([3, 4], GREEDY, request_id="mine")
    assert [update.finish_reason for update in engine.step()] == ["abort"]
    engine.add([3, 4], GREEDY, request_id="mine")
    assert [token for update in run(engine)["mine"] for token in update.token_ids] == greedy([3, 4], 24)


def test_more_prompts_than_may_wait_are_fed_as_there_is_room():
    engine = engine_with(max_queue=3)
    prompts = [[i] for i in range(1, 30)]
    assert tokens_of(engine, prompts) == [greedy(prompt, 24) for prompt in prompts]


def test_updates_of_others_are_kept_while_some_are_served_offline():
    engine = engine_with()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    other = engine.add([1, 2], params)
    engine.generate([[3, 4]], GREEDY)
    tokens = [token for update in run(engine)[other] for token in update.token_ids]
    assert len(tokens) == 4


def test_a_failing_step_ends_what_ran_and_the_engine_goes_on(ahead, monkeypatch):
    engine = engine_with(max_rows=2, run_ahead=ahead)
    prompts = [random_prompt(random.Random(i), 20) for i in range(3)]
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.stats().snapshots == 0  # nobody knows what they hold
    updates = run(engine)
    for name in ids[:2]:
        assert updates[name][-1].finish_reason == "error"
        assert updates[name][-1].message == "the engine failed: ZeroDivisionError: division by zero"
    tokens = [token for update in updates[ids[2]] for token in update.token_ids]
    assert tokens == greedy(prompts[2], 24)
    assert_all_is_accounted_for(engine)


def test_who_waits_goes_on_after_a_step_that_failed_while_another_joined(monkeypatch):
    engine = engine_with()
    prompt, greedily = random_prompt(random.Random(0), 60), SamplingParams(temperature=0, max_tokens=8, n=3)
    samples = engine.add(prompt, greedily)
    engine.step()
    assert engine.stats().queued == 2  # for the prompt's state, which the first sample computes
    other = engine.add([1, 2, 3], GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.pool, "alloc", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.stats().queued == 3
    updates = run(engine)
    assert [update.finish_reason for update in updates[samples] if update.index == 0] == ["error"]
    for name, index, tokens in (
        (samples, 1, greedy(prompt, 8)),
        (samples, 2, greedy(prompt, 8)),
        (other, 0, greedy([1, 2, 3], 24)),
    ):
        assert [token for update in updates[name] if update.index == index for token in update.token_ids] == tokens
    assert_all_is_accounted_for(engine)


def test_what_was_read_before_a_step_failed_is_not_lost(monkeypatch):
    engine = engine_with(run_ahead=True)
    short = engine.add([1, 2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    long = engine.add([3, 4], SamplingParams(temperature=0, **LONG))
    updates = [update for _ in range(3) for update in engine.step()]
    engine.run_ahead = False  # as when a row joins that needs each token on the host: what is in flight is read first
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    updates += [update for updates in run(engine).values() for update in updates]
    assert [update.finish_reason for update in updates if update.request_id == short] == [None, None, "length"]
    assert [update.finish_reason for update in updates if update.request_id == long][-1] == "error"


def test_a_preempted_sample_whose_token_was_in_flight_when_a_step_failed_is_served_whole(monkeypatch):
    engine = engine_with(**memory_for(2, 0, 18), run_ahead=True)
    prompts = [random_prompt(random.Random(i), 20) for i in range(2)]
    names = [engine.add(prompt, SamplingParams(temperature=0, **LONG)) for prompt in prompts]
    decode, updates = engine.runner.decode, []

    def fail_after_a_preemption(*args):
        return 1 / 0 if engine.scheduler.preemptions else decode(*args)

    monkeypatch.setattr(engine.runner, "decode", fail_after_a_preemption)
    with pytest.raises(ZeroDivisionError):
        while True:
            updates += engine.step()
    monkeypatch.setattr(engine.runner, "decode", decode)
    while engine.has_work:
        updates += engine.step()
    tokens = [token for update in updates if update.request_id == names[1] for token in update.token_ids]
    assert (
        tokens
        == engine_with().generate([prompts[1]], SamplingParams(temperature=0, **LONG))[0].completions[0].token_ids
    )


def test_offline_requests_are_dropped_when_serving_breaks_off():
    engine = engine_with()

    def interrupt(update):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2], [3, 4]], GREEDY, on_update=interrupt)
    assert run(engine) == {}
    assert_all_is_accounted_for(engine)


def test_a_closed_engine_serves_nobody():
    with engine_with() as engine:
        engine.add([1, 2], GREEDY)
        engine.step()
        engine.add([3, 4], GREEDY)
        assert engine.has_work
    assert engine.runner.closed
    assert not engine.has_work
    with pytest.raises(EngineClosed):
        engine.add([1], GREEDY)
    with pytest.raises(EngineClosed):
        engine.step()


def test_counts_add_up():
    engine = engine_with()
    prompts = [random_prompt(random.Random(12), 33)] * 2 + [[1, 2, 3]]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    stats = engine.stats()
    assert stats.prompt_tokens == 69
    assert stats.cached_tokens == sum(output.cached_tokens for output in outputs) == 32
    assert stats.cache_hits == 1
    assert stats.prefilled_tokens == 69 - 32
    assert stats.generated_tokens == 27
    assert stats.finished == 3
    assert stats.counters["decode_steps"] == 24
    assert outputs[0].seconds >= outputs[0].ttft_seconds >= outputs[0].queue_seconds >= 0


def test_speculation_changes_no_token_and_saves_steps():
    rng = random.Random(13)
    prompts = [random_prompt(rng, length) for length in (3, 20, 41, 8, 17)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain, speculating = engine_with(), engine_with(speculate="ngram", num_draft=3, fixed_draft=True)
    expected = tokens_of(plain, prompts, params)
    assert tokens_of(speculating, prompts, params) == expected
    stats = speculating.stats()
    assert stats.accepted > 10
    assert stats.drafted > stats.accepted
    assert stats.steps < plain.stats().steps
    steps_of_rows = stats.counters["decode_steps"] + stats.counters["verify_steps"]
    assert len(prompts) + steps_of_rows + stats.accepted == stats.generated_tokens  # the first ones are the prefills'
    longer = [prompt + tokens + [7] for prompt, tokens in zip(prompts, expected, strict=True)]
    hits = [output.cached_tokens for output in speculating.generate(longer, GREEDY)]
    assert min(hits) >= 56  # snapshots of decoding rows hold what was accepted, and no more
    assert tokens_of(speculating, longer) == [greedy(prompt, 24) for prompt in longer]
    assert_all_is_accounted_for(speculating)


def test_a_window_that_ends_a_sample_gives_nothing_behind_its_end():
    engine, cut = engine_with(speculate="ngram", num_draft=4, fixed_draft=True, max_rows=4), 0
    beginning = random_prompt(random.Random(15), 9)
    prompt = [*beginning, *greedy(beginning, 200)]  # has repetitions, so that drafts are right
    whole = [token for token in greedy(prompt, 30) if token != EOS]
    for stop in set(whole):
        params = SamplingParams(temperature=0, max_tokens=30, logprobs=1, stop_token_ids=(stop,))
        before = engine.stats()
        (completion,) = engine.generate([prompt], params)[0].completions
        after = engine.stats()
        assert completion.token_ids == whole[: whole.index(stop) + 1]
        assert [entry.token for entry in completion.logprobs] == completion.token_ids
        steps = sum(after.counters[name] - before.counters[name] for name in ("decode_steps", "verify_steps"))
        cut += 1 + steps + after.accepted - before.accepted - len(completion.token_ids)
    assert cut > 0, "no window held tokens behind an end"


def test_speculation_reads_each_step_before_the_next_although_told_to_run_ahead():
    prompts = [random_prompt(random.Random(i), 12) for i in range(4)]
    engine = engine_with(speculate="ngram", fixed_draft=True, run_ahead=True)
    assert tokens_of(engine, prompts) == [greedy(prompt, 24) for prompt in prompts]
    assert engine.stats().windows > 0


class Turns:
    """A constraint: the remainder by three of what comes is that of the last token and the number of tokens before.

    No end of sequence comes.
    """

    error = None

    def __init__(self):
        self.tokens = []

    def copy(self):
        return Turns()

    def advance(self, tokens):
        for token in tokens:
            assert token in self.allowed(self.tokens)
            self.tokens.append(token)
        if len(self.tokens) > 30:
            self.error = "too many turns"

    @staticmethod
    def allowed(tokens):
        return [token for token in range(1, VOCAB) if token % 3 == sum(tokens[-1:], len(tokens)) % 3]

    def mask(self, drafts=()):
        may_come = self.allowed([*self.tokens, *drafts])
        bits = [sum(1 << token % 32 for token in may_come if token // 32 == word) for word in range(2)]
        return torch.tensor(bits).to(torch.int32)


class Turning:
    """In the place of :class:`replayssm.engine.constraints.Constraints`."""

    def start(self, params):
        return Turns() if params.constrained else None

    def masks(self, constraints, device):
        return torch.stack([one.mask() for one in constraints]) if constraints else None

    def window_masks(self, constraints, drafts, width, device):
        rows = [[one.mask(ids[:place]) for place in range(width)] for one, ids in zip(constraints, drafts, strict=True)]
        return torch.stack([torch.stack(row) for row in rows]) if rows else None


@pytest.mark.parametrize(
    "options",
    [
        {"run_ahead": False},
        {"run_ahead": True},
        {"speculate": "ngram", "fixed_draft": True},
        {"speculate": "ngram", "fixed_draft": True, "run_ahead": True},
        memory_for(4, 0, 30),
    ],
)
def test_constrained_rows_keep_to_their_constraint_beside_free_ones(options):
    prompts = [random_prompt(random.Random(i), 20) for i in range(6)]
    bound = SamplingParams(temperature=0, max_tokens=24, regex="of turns")
    params = [bound, GREEDY, bound, bound, GREEDY, GREEDY]
    engine = engine_with(**options)
    engine.intake.constraints = engine.launcher.constraints = Turning()
    tokens = tokens_of(engine, prompts, params)
    for prompt, one, got in zip(prompts, params, tokens, strict=True):
        if one is GREEDY:
            assert got == greedy(prompt, 24)
            continue
        expected = []
        while len(expected) < 24:
            logits = logits_of((*prompt, *expected)).tolist()
            expected.append(max(Turns.allowed(expected), key=logits.__getitem__))
        assert got == expected


def test_a_constraint_that_breaks_ends_its_own_sample_alone():
    engine = engine_with()
    engine.intake.constraints = engine.launcher.constraints = Turning()
    bound = engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=60, regex="of turns"))
    free = engine.add([8, 9], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    updates = run(engine)
    last = updates[bound][-1]
    assert (last.finish_reason, last.message) == ("error", "too many turns")
    assert updates[free][-1].finish_reason == "length"
    assert_all_is_accounted_for(engine)


def test_speculation_keeps_sampled_tokens_as_they_are():
    rng = random.Random(14)
    prompts = [random_prompt(rng, 12) for _ in range(5)]
    params = [SamplingParams(seed=i, max_tokens=40, temperature=0.4, presence_penalty=0.1 * i) for i in range(5)]
    speculating = engine_with(speculate="ngram", fixed_draft=True)
    assert tokens_of(speculating, prompts, params) == tokens_of(engine_with(), prompts, params)
