"""Drawing tokens: the distribution, the noise, and that a request's draws depend on nothing but the request."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from replayssm.engine import distribution, sampler
from replayssm.engine.distribution import Filters, threshold
from replayssm.engine.logprobs import Logprobs
from replayssm.engine.outputs import TokenLogprobs
from replayssm.engine.params import SamplingParams
from replayssm.engine.randomness import draw_seed, gumbel, stream_key, token_hashes
from replayssm.engine.sampler import Sampler
from replayssm.speculate.sampling import NO_TOKEN

VOCAB = 97  # no multiple of 32, nor of a vector's length
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)

FILTERS = {
    "all": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.77},
    "min-p": {"min_p": 0.13},
    "top-k and top-p": {"top_k": 9, "top_p": 0.83},
    "all of them": {"temperature": 1.3, "top_k": 11, "top_p": 0.91, "min_p": 0.04},
    "one token": {"top_k": 1},
    "more than there are": {"top_k": 10_000, "top_p": 0.5},
}
REQUESTS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(),
    **{name: SamplingParams(**settings) for name, settings in FILTERS.items() if settings},
    "penalised": SamplingParams(presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.3),
    "greedy, penalised": SamplingParams(temperature=0, frequency_penalty=1.1, repetition_penalty=1.2),
    "biased": SamplingParams(logit_bias={3: 2.5, 17: -100.0}, top_p=0.9),
    "min_tokens": SamplingParams(min_tokens=9, stop_token_ids=(4, 5), temperature=2.0),
    "with logprobs": SamplingParams(logprobs=3, top_k=40, repetition_penalty=1.1),
    "greedy with logprobs": SamplingParams(temperature=0, logprobs=20),
}


def some_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def sampler_of(requests: list[SamplingParams], vocab_size: int = VOCAB, **join: object) -> Sampler:
    """A sampler with these requests in its rows, each with its own seed."""
    made = Sampler(vocab_size, CPU, max_rows=max(8, len(requests)))
    for row, params in enumerate(requests):
        made.join(row, params, **{"seed": 100 + row, "prompt": [1, 2, 1, 3], "eos_token_ids": [0], **join})
    return made


def draws(params: SamplingParams, logits: Tensor, count: int) -> Tensor:
    """`count` tokens of one row, at places one after the other."""
    made = sampler_of([params], len(logits))
    rows = made.rows([0] * count)
    return made.sample(logits.expand(count, -1), rows, torch.arange(count)).tokens


# A slow reference, in float64 and row by row.


def allowed(logits: Tensor, params: SamplingParams) -> list[int]:
    """Tokens that may be drawn."""
    scores = (logits.double() / params.temperature).tolist()
    ordered = sorted(range(len(scores)), key=lambda token: -scores[token])
    lowest = scores[ordered[0]] + (math.log(params.min_p) if params.min_p else -math.inf)
    ordered = ordered[: params.top_k or None]
    if params.top_k:
        lowest = max(lowest, scores[ordered[-1]])
    if params.top_p < 1:
        weights = [math.exp(scores[token] - scores[ordered[0]]) for token in ordered]
        mass = 0.0
        for token, weight in zip(ordered, weights, strict=True):
            if mass < params.top_p * math.fsum(weights):
                last = token
            mass += weight
        lowest = max(lowest, scores[last])
    return [token for token, score in enumerate(scores) if score >= lowest]


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    scores = torch.full_like(logits, -math.inf, dtype=torch.float64)
    tokens = allowed(logits, params)
    scores[tokens] = logits.double()[tokens] / params.temperature
    return scores.softmax(-1)


def assert_distributed(counts: Tensor, expected: Tensor) -> None:
    """Pearson's test; of 10,000 right samplers one fails."""
    assert not counts[expected == 0].any(), "a token was drawn that may not be"
    counts, expected = counts[expected > 0], expected[expected > 0] * counts.sum()
    freedom = len(counts) - 1
    if freedom:
        found = float(((counts - expected) ** 2 / expected).sum())
        spread = 2 / (9 * freedom)  # Wilson and Hilferty's approximation of the quantile
        assert found < freedom * (1 - spread + 3.72 * spread**0.5) ** 3


# The distribution.


@pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS.keys())
def test_draws_follow_the_distribution(settings):
    logits, params = some_logits(1, vocab_size=16, scale=1.2)[0], SamplingParams(**settings)
    counts = torch.bincount(draws(params, logits, 20_000), minlength=16)
    assert_distributed(counts, probabilities(logits, params))


def test_first_draws_of_requests_follow_the_distribution():
    logits, count = some_logits(1, vocab_size=12, scale=1.0)[0], 2000
    made = sampler_of([SamplingParams()] * count, 12)
    tokens = made.sample(logits.expand(count, -1), made.rows(range(count)), torch.full((count,), 5)).tokens
    assert_distributed(torch.bincount(tokens, minlength=12), probabilities(logits, SamplingParams()))


def test_samples_of_one_request_follow_the_distribution():
    logits, count = some_logits(1, vocab_size=12, scale=1.0)[0], 2000
    made = Sampler(12, CPU, count)
    for index in range(count):
        made.join(index, SamplingParams(), seed=7, index=index, prompt=[1])
    tokens = made.sample(logits.expand(count, -1), made.rows(range(count)), torch.full((count,), 1)).tokens
    assert_distributed(torch.bincount(tokens, minlength=12), probabilities(logits, SamplingParams()))


@pytest.mark.parametrize("distance", [1, 2, 64])
def test_draws_at_two_places_are_independent(distance):
    tokens = draws(SamplingParams(), torch.tensor([0.3, 0.0, -0.4, 0.1]), 20_000)
    pairs = 4 * tokens[:-distance] + tokens[distance:]
    one = probabilities(torch.tensor([0.3, 0.0, -0.4, 0.1]), SamplingParams())
    # Pairs overlap, but each has its own noise at its own places.
    assert_distributed(torch.bincount(pairs, minlength=16), torch.outer(one, one).flatten())


def test_unlikely_tokens_are_drawn_as_often_as_they_should_be():
    logits = torch.zeros(512)
    logits[:2] = 9.0  # the others have 3 % together
    tokens = draws(SamplingParams(), logits, 20_000)
    expected = probabilities(logits, SamplingParams())[2:].sum().item() * 20_000
    assert abs((tokens >= 2).sum().item() - expected) < 4 * expected**0.5


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS.keys())
def test_kept_tokens_are_those_of_a_simple_reference(settings, ties):
    params = SamplingParams(**settings)
    logits = some_logits(50, seed=3)
    if ties:
        logits = logits.mul(2).round().div(2)
    logits[::7, 10:60] = -math.inf  # as a constraint leaves them
    scores = logits / torch.tensor(params.temperature)
    filters = Filters(
        torch.full((50,), min(params.top_k, VOCAB)),
        torch.full((50,), params.top_p),
        torch.full((50,), math.log(params.min_p) if params.min_p else -math.inf),
    )
    num_sorted = VOCAB if params.top_p < 1 and not params.top_k else min(params.top_k, VOCAB)
    kept = scores >= threshold(scores, filters, num_sorted)[:, None]
    for row in range(50):
        assert kept[row].nonzero()[:, 0].tolist() == allowed(logits[row], params)


@pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS.keys())
def test_only_kept_tokens_are_drawn_and_all_of_them(settings):
    logits, params = some_logits(1, vocab_size=24, scale=1.0, seed=1)[0], SamplingParams(**settings)
    assert sorted(set(draws(params, logits, 20_000).tolist())) == allowed(logits, params)


def test_greedy_rows_take_the_likeliest_token():
    logits = some_logits(5)
    filtered = SamplingParams(temperature=0, top_k=3, top_p=0.2, min_p=0.5, seed=1)
    made = sampler_of([GREEDY, filtered, GREEDY, filtered, GREEDY])
    drawn = made.sample(logits, made.rows(range(5)), torch.arange(5))
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
    assert drawn.tokens.dtype == torch.int64


def test_logits_are_left_as_they_are():
    requests = list(REQUESTS.values())
    logits = some_logits(len(requests))
    before = logits.clone()
    made = sampler_of(requests)
    made.sample(logits, made.rows(range(len(requests))), torch.arange(len(requests)))
    assert torch.equal(logits, before)


# The noise.


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("place", [0, 1, 4095, 2**31 - 1])
def test_noise_is_the_hash_that_it_is_said_to_be(place):
    key = stream_key(-5, 2)
    noise = gumbel(token_hashes(VOCAB, CPU), torch.tensor([key], dtype=torch.int32), torch.tensor([place]))[0]
    first, second = (number % 2**32 for number in key)
    of_place = _mix((first + place * 0x9E3779B9) % 2**32)
    for token in range(VOCAB):
        x = _mix(token * 0x9E3779B9 % 2**32) ^ of_place
        bits = _mix(x * (second | 1) % 2**32) % 2**31
        assert noise[token].item() == pytest.approx(-math.log(-math.log1p(-(bits + 0.5) / 2**31)), rel=1e-5, abs=1e-5)


def test_large_noise_which_decides_has_all_digits_of_its_own():
    hashes, key = token_hashes(200_000, CPU), torch.tensor([[0, 0]], dtype=torch.int32)
    noise = gumbel(hashes, key, torch.tensor([0]))[0]
    largest = noise.topk(100).indices.tolist()
    for token in largest:  # with this key a token's bits are its hash, mixed
        uniform = (_mix(int(hashes[token]) % 2**32) % 2**31 + 0.5) / 2**31
        assert noise[token].item() == pytest.approx(-math.log(-math.log1p(-uniform)), abs=2e-6)
    assert len(set(noise[largest].tolist())) == 100


def test_noise_is_finite_whatever_the_hash_is():
    every_end = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    keys = torch.tensor([stream_key(seed, 0) for seed in range(2000)], dtype=torch.int32)
    noise = gumbel(torch.cat([every_end, token_hashes(60, CPU)]), keys, torch.arange(2000))
    assert noise.isfinite().all()
    assert noise.min() > -2.9
    assert noise.max() < 22.2


def test_streams_differ_by_seed_and_by_sample():
    keys = [stream_key(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(20)]
    assert len(set(keys)) == len(keys)


def test_equal_seeds_give_equal_draws_and_none_gives_others():
    logits, places = some_logits(60), torch.arange(60)

    def drawn(params: SamplingParams, index: int = 0) -> list[int]:
        made = sampler_of([params], seed=draw_seed(params), index=index)
        return made.sample(logits, made.rows([0] * 60), places).tokens.tolist()

    assert drawn(SamplingParams(seed=5)) == drawn(SamplingParams(seed=5))
    assert drawn(SamplingParams(seed=5)) != drawn(SamplingParams(seed=-5))
    assert drawn(SamplingParams(seed=5)) != drawn(SamplingParams(seed=5), index=1)
    assert drawn(SamplingParams()) != drawn(SamplingParams())


# A row's draw depends on the row alone.


def _copied(made: Sampler, logits: Tensor, rows: list[int], places: list[int]) -> list[tuple[int, object]]:
    tokens, logprobs = made.sample(logits, made.rows(rows), torch.tensor(places)).start_copy().wait()
    return list(zip(tokens, logprobs, strict=True))


def test_a_draw_is_the_same_alone_and_in_any_batch_bit_for_bit():
    requests = list(REQUESTS.values())
    everyone = list(range(len(requests)))
    logits = some_logits(len(requests), seed=5)
    places = [4 + 3 * row for row in everyone]
    together = _copied(sampler_of(requests), logits, everyone, places)
    for row in everyone:
        assert _copied(sampler_of(requests), logits[row, None], [row], [places[row]]) == [together[row]]
    for seed in range(6):
        chosen = random.Random(seed).sample(everyone, 11)
        made = sampler_of(requests)
        found = _copied(made, logits[[*chosen, 0]], [*chosen, -1], [*(places[row] for row in chosen), 0])
        assert found[:-1] == [together[row] for row in chosen]


@pytest.mark.parametrize("vocab_size", [7, 64, 1000, 4099])
def test_a_draw_is_the_same_whatever_the_sizes(vocab_size, monkeypatch):
    requests = [params for params in REQUESTS.values() if not params.logit_bias] * 3
    logits = some_logits(len(requests), vocab_size, seed=6)
    rows, places = list(range(len(requests))), list(range(len(requests)))
    together = _copied(sampler_of(requests, vocab_size), logits, rows, places)
    monkeypatch.setattr(sampler, "MAX_LOGITS", 2 * vocab_size)
    made = sampler_of(requests, vocab_size)
    assert max(len(part.batch) for part in made.rows(rows).parts) == 2
    assert _copied(made, logits, rows, places) == together


@pytest.mark.parametrize(
    "params",
    [
        REQUESTS["penalised"],
        SamplingParams(temperature=0, repetition_penalty=1.9),
        SamplingParams(temperature=0, frequency_penalty=1.1),
        SamplingParams(temperature=0, presence_penalty=2.0),
    ],
    ids=["sampled", "repetition", "frequency", "presence"],
)
def test_a_draw_is_the_same_in_any_row_and_after_a_preemption(params):
    logits = some_logits(1, seed=8).expand(12, -1)  # so that what came before decides

    def rest(row: int, first: list[int]) -> list[int]:
        """The tokens from there on, of a sample that is put into a row with what it has."""
        made, output = Sampler(VOCAB, CPU, 4), list(first)
        made.join(row, params, seed=3, prompt=[1, 2], output=output)
        rows = made.rows([row])
        for place in range(len(first), 12):
            output.append(int(made.sample(logits[place, None], rows, torch.tensor([2 + place])).tokens))
        return output

    whole = rest(0, [])
    assert rest(3, whole[:5]) == whole
    assert rest(1, whole[:11]) == whole


def test_neighbours_that_come_and_go_change_nothing():
    requests = list(REQUESTS.values())
    logits = some_logits(20, seed=9)

    def tokens(disturbed: bool) -> list[int]:
        made, dice, found = sampler_of([REQUESTS["penalised"]]), random.Random(1), []
        for place in range(20):
            others = list(range(1, dice.randint(1, 8))) if disturbed else []
            for row in others:
                made.join(row, dice.choice(requests), seed=dice.randint(0, 99), prompt=[place])
            dice.shuffle(others)
            batch = logits[place].expand(len(others) + 1, -1)
            drawn = made.sample(batch, made.rows([*others, 0]), torch.full((len(batch),), 4 + place))
            found.append(int(drawn.tokens[-1]))
            for row in others[::2]:
                made.leave(row)
        return found

    assert tokens(disturbed=True) == tokens(disturbed=False)


def test_rows_with_broken_logits_leave_others_alone():
    requests = list(REQUESTS.values())
    logits = some_logits(len(requests), seed=10)
    everyone = list(range(len(requests)))
    expected = _copied(sampler_of(requests), logits, everyone, everyone)
    for broken, value in ((1, math.nan), (3, -math.inf), (7, math.inf)):
        spoilt = logits.clone()
        spoilt[broken] = value
        found = _copied(sampler_of(requests), spoilt, everyone, everyone)
        assert [one for row, one in enumerate(found) if row != broken] == [
            one for row, one in enumerate(expected) if row != broken
        ]
        assert found[broken][0] == NO_TOKEN


# Penalties, biases, min_tokens.


def penalised(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """A slow reference."""
    counts, result = Counter(output), list(logits)
    for token in {*prompt, *output}:
        r = params.repetition_penalty
        result[token] = result[token] / r if result[token] > 0 else result[token] * r
    for token, count in counts.items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"presence_penalty": -0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_penalties_are_those_of_a_slow_reference(settings):
    params = SamplingParams(temperature=0, **settings)
    prompt = [1, 2, 2, 9]
    logits = some_logits(40, vocab_size=12, scale=1.5)
    made, output = Sampler(12, CPU, 3), []
    made.join(2, params, seed=0, prompt=prompt)
    rows = made.rows([2])
    for place in range(40):
        reference = penalised(logits[place].tolist(), params, prompt, output)
        output.append(int(made.sample(logits[place, None], rows, torch.tensor([4 + place])).tokens))
        assert output[-1] == reference.index(max(reference))
    assert output != logits.argmax(-1).tolist()


def test_counts_are_kept_for_penalised_rows_alone_and_their_memory_is_used_again():
    made = Sampler(VOCAB, CPU, max_rows=64)
    for row in range(60):
        made.join(row, SamplingParams(), seed=0, prompt=[1])
    assert len(made._seen.counts) == 0
    for _ in range(30):
        for row in (60, 61, 62):
            made.join(row, REQUESTS["penalised"], seed=0, prompt=[1])
        made.leave(61)
        made.leave(61)
    assert len(made._seen.counts) == 4


def test_a_row_that_joins_again_has_no_memory_of_its_last_request():
    made = sampler_of([REQUESTS["penalised"]])
    logits = some_logits(1)
    first = made.sample(logits, made.rows([0]), torch.tensor([4])).tokens
    made.sample(logits, made.rows([0]), torch.tensor([5]))
    made.join(0, REQUESTS["penalised"], seed=100, prompt=[1, 2, 1, 3])
    assert torch.equal(made.sample(logits, made.rows([0]), torch.tensor([4])).tokens, first)


def test_logit_bias_is_added():
    logits = torch.zeros(3, VOCAB)
    made = sampler_of(
        [
            SamplingParams(temperature=0, logit_bias={40: 3.0, 41: 2.9}),
            SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(VOCAB - 1), -100.0)),
            GREEDY,
        ]
    )
    assert made.sample(logits, made.rows([0, 1, 2]), torch.zeros(3).long()).tokens.tolist() == [40, VOCAB - 1, 0]


def test_a_longer_list_of_biases_leaves_those_of_other_rows():
    made = sampler_of([SamplingParams(temperature=0, logit_bias={50: 1.0})])
    made.join(1, SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(20, 60), 2.0)), seed=0, prompt=[1])
    made.join(2, SamplingParams(temperature=0, logit_bias={33: 1.0}), seed=0, prompt=[1])
    tokens = made.sample(torch.zeros(3, VOCAB), made.rows([0, 1, 2]), torch.zeros(3).long()).tokens
    assert tokens.tolist() == [50, 20, 33]


def test_ends_are_not_drawn_before_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, :6] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    ends = {"stop_token_ids": (2,), "min_tokens": 3, "temperature": 0}

    def tokens(**settings: object) -> list[int]:
        made = sampler_of([SamplingParams(**ends, **settings)], eos_token_ids=[0, 1], prompt=[5] * 10)
        rows = made.rows([0])
        return [int(made.sample(logits, rows, torch.tensor([10 + count])).tokens) for count in range(5)]

    assert tokens() == [3, 3, 3, 0, 0]
    assert tokens(ignore_eos=True) == [0] * 5
    assert tokens(logit_bias={0: -50.0, 1: -50.0, 3: 90.0}) == [3] * 5
    assert tokens(logit_bias={0: 90.0}) == [3, 3, 3, 0, 0]


def test_an_end_that_the_model_has_no_logit_for_is_of_no_account():
    made = sampler_of([SamplingParams(min_tokens=3, temperature=0)], eos_token_ids=[VOCAB, 5])
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    assert int(made.sample(logits, made.rows([0]), torch.tensor([4])).tokens) == 0


# Windows.


def model_logits(tokens: list[int], vocab_size: int = VOCAB) -> Tensor:
    """``[V]``: a model whose text repeats itself, so that drafts can be right."""
    return some_logits(1, vocab_size, seed=hash(tuple(tokens[-2:])) % 1000, scale=2.5)[0]


def decode(params: SamplingParams, count: int, prompt: list[int]) -> tuple[list[int], list[TokenLogprobs]]:
    made, tokens, scores = Sampler(VOCAB, CPU, 2), list(prompt), []
    made.join(1, params, seed=11, prompt=prompt, eos_token_ids=[0])
    rows = made.rows([1])
    for _ in range(count):
        drawn = made.sample(model_logits(tokens)[None], rows, torch.tensor([len(tokens)]))
        (token,), (score,) = drawn.start_copy().wait()
        tokens.append(token)
        scores += [score] if score else []
    return tokens[len(prompt) :], scores


def test_windows_give_the_tokens_of_decoding_one_by_one_whatever_is_drafted():
    """All kinds of requests in one batch, with right and wrong drafts, and rows without any or without a window."""
    count, prompt = 25, [1, 2, 1, 3]
    requests = list(REQUESTS.values())
    expected = [decode(params, count + 20, prompt) for params in requests]
    made, dice = Sampler(VOCAB, CPU, len(requests)), random.Random(2)
    for row, params in enumerate(requests):
        made.join(row, params, seed=11, prompt=prompt, eos_token_ids=[0])
    rows = made.rows(range(len(requests)))
    tokens = [list(prompt) for _ in requests]
    scores: list[list[TokenLogprobs]] = [[] for _ in requests]
    accepted = 0
    while min(map(len, tokens)) < count + len(prompt):
        width = dice.randint(1, 5)
        window, logits = torch.zeros(len(requests), width, dtype=torch.int64), some_logits(len(requests) * width)
        logits = logits.view(len(requests), width, VOCAB)
        num_tokens = torch.tensor([dice.randint(0, width) for _ in requests], dtype=torch.int32)
        for row, text in enumerate(tokens):
            right = expected[row][0][len(text) - len(prompt) :]
            drafts = [token if dice.random() < 0.8 else dice.randrange(VOCAB) for token in right[: width - 1]]
            for place in range(int(num_tokens[row])):
                window[row, place] = [text[-1], *drafts][place]
                logits[row, place] = model_logits([*text, *drafts[:place]])
        places = torch.tensor([len(text) for text in tokens])
        verified = made.verify_window(logits, rows, places, window, num_tokens)
        new, found = verified.start_copy().wait()
        assert [len(one) for one in new] == verified.num_accepted.tolist()
        assert verified.num_accepted.dtype == torch.int32
        for row, count_of_row in enumerate(num_tokens.tolist()):
            assert (len(new[row]) > 0) == (count_of_row > 0)
            assert len(new[row]) <= count_of_row
            if new[row]:
                assert int(verified.last[row]) == new[row][-1]
            tokens[row] += new[row]
            scores[row] += found[row]
            accepted += max(0, len(new[row]) - 1)
    assert accepted > 100
    for row, text in enumerate(tokens):
        new_tokens = text[len(prompt) :]
        assert new_tokens == expected[row][0][: len(new_tokens)]
        assert scores[row] == expected[row][1][: len(scores[row])]
        assert len(scores[row]) == (0 if requests[row].logprobs is None else len(new_tokens))


def test_greedy_windows_take_the_likeliest_tokens():
    made = sampler_of([GREEDY, GREEDY])
    logits = some_logits(6).view(2, 3, VOCAB)
    best = logits.argmax(-1)
    window = torch.stack([torch.tensor([5, int(best[0, 0]), 96]), torch.tensor([5, int(best[1, 0]), int(best[1, 1])])])
    verified = made.verify_window(logits, made.rows([0, 1]), torch.zeros(2).long(), window, torch.tensor([3, 3]).int())
    assert verified.num_accepted.tolist() == [2, 3]
    assert verified.start_copy().wait()[0] == [best[0, :2].tolist(), best[1].tolist()]


# Log-probabilities.


def test_logprobs_are_those_of_the_model():
    requests = [
        SamplingParams(logprobs=4, temperature=0.3, top_k=5, logit_bias={3: 50.0}, repetition_penalty=2.0),
        SamplingParams(),
        SamplingParams(logprobs=0, temperature=0),
        SamplingParams(logprobs=20, min_p=0.3),
    ]
    logits = some_logits(4, scale=4.0)
    reference = logits.double().log_softmax(-1)
    made = sampler_of(requests)
    tokens, found = made.sample(logits, made.rows(range(4)), torch.arange(4)).start_copy().wait()
    assert tokens[0] == 3
    for row, params in enumerate(requests):
        one = found[row]
        if params.logprobs is None:
            assert one is None
            continue
        assert one.token == tokens[row]
        assert one.logprob == pytest.approx(float(reference[row, tokens[row]]), abs=2e-6)
        best = reference[row].topk(params.logprobs)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [score for _, score in one.top] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_of_equally_likely_tokens_the_lower_id_comes_first():
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]])
    made = sampler_of([SamplingParams(logprobs=4)], 5)
    _, (one,) = made.sample(logits, made.rows([0]), torch.tensor([4])).start_copy().wait()
    assert [token for token, _ in one.top] == [1, 2, 4, 0]


def test_the_normaliser_is_that_of_a_large_vocabulary():
    logits = some_logits(3, vocab_size=150_000, scale=3.0)
    found = distribution.log_normaliser(logits)
    assert torch.allclose(found.double(), logits.double().logsumexp(-1), atol=2e-6, rtol=0)


def test_a_copy_is_not_changed_by_the_next_step():
    made = sampler_of([GREEDY])
    drawn = made.sample(some_logits(1), made.rows([0]), torch.tensor([4]))
    copy, expected = drawn.start_copy(), int(drawn.tokens)
    drawn.tokens.fill_(-7)
    assert copy.wait() == ([expected], [None])


# Use.


def test_wrong_shapes_are_refused():
    made = sampler_of([GREEDY, SamplingParams(regex="a")])
    with pytest.raises(ValueError, match=r"logits are \(2, 97\): \(1, 97\) is wanted"):
        made.sample(some_logits(2), made.rows([0]), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"masks are None: \(1, 4\) is wanted"):
        made.sample(some_logits(2), made.rows([0, 1]), torch.tensor([4, 4]))
    with pytest.raises(ValueError, match=r"masks are \(1, 4\): None is wanted"):
        made.sample(some_logits(1), made.rows([0]), torch.tensor([4]), torch.zeros(1, 4, dtype=torch.int32))


def test_it_never_holds_more_than_it_says():
    made, most = Sampler(VOCAB, CPU, max_rows=16), Sampler.max_bytes(VOCAB, 16)
    biases = dict.fromkeys(range(VOCAB), 1.0)
    for row in range(16):
        made.join(row, replace(REQUESTS["penalised"], logit_bias=biases), seed=0, prompt=[1])
    tables = [made._hashes, made._numbers, made._integers, made._seen.counts, *made._edits.tables]
    assert sum(table.nbytes for table in tables if isinstance(table, Tensor)) < most
    per_row = Sampler.max_bytes(150_000, 257) - Sampler.max_bytes(150_000, 256)
    assert per_row < 10 * 150_000, "temporary memory must not grow with the rows"


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    device, requests = torch.device("cuda"), list(REQUESTS.values())
    count = len(requests)
    logits, places = some_logits(count).to(device), torch.arange(count, device=device)
    window = torch.zeros(count, 3, dtype=torch.int64, device=device)
    num_tokens = torch.full((count,), 3, dtype=torch.int32, device=device)
    windows = logits[:, None].expand(-1, 3, -1).contiguous()
    made = Sampler(VOCAB, device, count)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            for row, params in enumerate(requests):
                made.join(row, params, seed=100 + row, prompt=[1, 2, 1, 3], output=[4], eos_token_ids=[0])
            rows = made.rows(range(count))
            copies = [
                made.sample(logits, rows, places).start_copy(),
                made.verify_window(windows, rows, places, window, num_tokens).start_copy(),
            ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(copy.wait()[0]) == count for copy in copies)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", [("greedy",), tuple(REQUESTS)], ids=["greedy", "all"])
def test_a_gpu_tells_broken_logits_and_leaves_other_rows_alone(names, dtype):
    requests = [REQUESTS[name] for name in names] * 2
    count, places = len(requests), torch.arange(len(requests)).cuda()
    logits, window = some_logits(count).cuda().to(dtype), torch.zeros(count, 1, dtype=torch.int64).cuda()

    def drawn(logits: Tensor) -> list[list[int]]:
        """By a step, and by a window of one token."""
        found = []
        for way in ("step", "window"):
            made = Sampler(VOCAB, "cuda", count)
            for row, params in enumerate(requests):
                made.join(row, params, seed=100 + row, prompt=[1, 2, 1, 3], eos_token_ids=[0])
            rows = made.rows(range(count))
            if way == "step":
                found.append(made.sample(logits, rows, places).start_copy().wait()[0])
            else:
                ones = torch.ones_like(places).int()
                verified = made.verify_window(logits[:, None], rows, places, window, ones)
                found.append([ids[0] for ids in verified.start_copy().wait()[0]])
        return found

    expected = drawn(logits)
    for value in (math.nan, math.inf, -math.inf):
        spoilt = logits.clone()
        spoilt[::2] = value
        for found, sound in zip(drawn(spoilt), expected, strict=True):
            assert found[::2] == [NO_TOKEN] * len(found[::2])
            assert found[1::2] == sound[1::2]


@pytest.mark.gpu
def test_a_gpu_draws_the_tokens_of_a_cpu():
    requests = list(REQUESTS.values())
    logits, everyone = some_logits(len(requests)), list(range(len(requests)))
    on_gpu = Sampler(VOCAB, "cuda", len(requests))
    for row, params in enumerate(requests):
        on_gpu.join(row, params, seed=100 + row, prompt=[1, 2, 1, 3], eos_token_ids=[0])
    drawn = on_gpu.sample(logits.cuda(), on_gpu.rows(everyone), torch.arange(len(requests)).cuda())
    expected = _copied(sampler_of(requests), logits, everyone, everyone)
    assert drawn.tokens.tolist() == [token for token, _ in expected]
    assert isinstance(drawn.logprobs, Logprobs)


# One kernel for all rows.

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)


def both(requests: list[SamplingParams]) -> list[Sampler]:
    """By PyTorch's functions and by the kernel."""
    made = [Sampler(VOCAB, CPU, max_rows=len(requests), fused=fused) for fused in (False, True)]
    for one in made:
        for row, params in enumerate(requests):
            one.join(row, params, seed=100 + row, prompt=[1, 2, 1, 3], output=[4, 4, 7], eos_token_ids=[0])
    return made


def quantised(logits: Tensor) -> Tensor:
    """With many equal ones."""
    return (logits * 2).round() / 2


@INTERPRETED
@pytest.mark.parametrize("steps", [1, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("change", [lambda x: x, quantised, lambda x: 30 * x], ids=["smooth", "ties", "steep"])
def test_the_kernel_draws_the_tokens_of_torch(change, steps):
    requests = list(REQUESTS.values())
    torch_sampler, kernel = both(requests)
    order = [*range(len(requests)), -1]
    for step in range(steps):
        logits, places = change(some_logits(len(order), seed=step)), torch.arange(len(order)) + 5 * step
        drawn = [one.sample(logits, one.rows(order), places).tokens for one in (torch_sampler, kernel)]
        assert torch.equal(*(tokens[:-1] for tokens in drawn))
    assert torch.equal(torch_sampler._seen.counts, kernel._seen.counts)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=INTERPRETED)])
def test_logits_of_16_bits_give_the_tokens_of_the_same_ones_in_float32(fused):
    requests = [REQUESTS[name] for name in ("greedy", "sampled", "all of them")]
    made = both(requests)[fused]
    logits, places = some_logits(3).bfloat16(), torch.arange(3)
    drawn = [made.sample(x, made.rows(range(3)), places).tokens for x in (logits, logits.float())]
    assert torch.equal(*drawn)


@INTERPRETED
def test_the_kernel_goes_over_a_vocabulary_in_chunks(monkeypatch):
    from replayssm.backends.triton import draw

    monkeypatch.setattr(draw, "BLOCK", 32)
    names = ("sampled", "all of them", "top-p", "more than there are", "greedy, penalised", "biased")
    torch_sampler, kernel = both([REQUESTS[name] for name in names])
    logits, places = some_logits(len(names), seed=9), torch.arange(len(names))
    assert torch.equal(*(one.sample(logits, one.rows(range(6)), places).tokens for one in (torch_sampler, kernel)))


@INTERPRETED
@pytest.mark.parametrize("left", [40, 1])
def test_the_kernel_keeps_to_masks(left):
    constrained = [replace(REQUESTS[name], regex="x") for name in ("sampled", "all of them", "top-k", "greedy")]
    torch_sampler, kernel = both([*constrained, REQUESTS["sampled"]])
    dice = random.Random(left)
    allowed_tokens = [dice.sample(range(VOCAB), left) for _ in constrained]
    masks = torch.zeros(4, -(-VOCAB // 32), dtype=torch.int32)
    for mask, tokens in zip(masks, allowed_tokens, strict=True):
        for token in tokens:
            mask[token // 32] |= torch.tensor(1 << token % 32).int()
    logits, places = some_logits(5), torch.arange(5)
    drawn = [one.sample(logits, one.rows(range(5)), places, masks).tokens for one in (torch_sampler, kernel)]
    assert torch.equal(*drawn)
    assert all(token in tokens for token, tokens in zip(drawn[1].tolist(), allowed_tokens, strict=False))


@INTERPRETED
@pytest.mark.parametrize("penalised", [False, True])
def test_the_kernel_draws_the_windows_of_torch(penalised):
    requests = [REQUESTS[name] for name in ("greedy", "all of them")]
    requests += [REQUESTS["penalised"]] if penalised else []
    samplers, count = both(requests), len(requests)
    logits = some_logits(3 * count).view(count, 3, VOCAB)
    places = torch.arange(count) + 7
    num_tokens = torch.tensor([3, 2, 3, 3][:count], dtype=torch.int32)
    drafts = torch.full((count, 3), 4)
    for _ in range(2):
        found = [one.verify_window(logits, one.rows(range(count)), places, drafts, num_tokens) for one in samplers]
        for name in ("tokens", "num_accepted", "last"):
            assert torch.equal(*(getattr(one, name) for one in found)), name
        drafts = torch.cat([drafts[:, :1], found[0].tokens[:, :2]], 1)  # so that all are accepted
    assert torch.equal(*(one._seen.counts for one in samplers))
    assert int(found[0].num_accepted.max()) == 3


@INTERPRETED
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_kernel_tells_broken_logits_and_leaves_other_rows_alone(value):
    requests = [REQUESTS[name] for name in ("all of them", "sampled", "top-p", "top-k", "greedy", "penalised")]
    torch_sampler, kernel = both(requests)
    logits, places = some_logits(6), torch.arange(6)
    broken = logits.clone()
    broken[::2] = value
    expected = torch_sampler.sample(logits, torch_sampler.rows(range(6)), places)
    drawn = kernel.sample(broken, kernel.rows(range(6)), places)
    assert torch.equal(drawn.tokens[1::2], expected.tokens[1::2])
    assert torch.equal(drawn.scores[1::2], expected.scores[1::2])
    assert bool(((drawn.tokens >= 0) & (drawn.tokens < VOCAB)).all()), "the next step takes them as its input"
    assert drawn.start_copy().wait()[0][::2] == [NO_TOKEN] * 3


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=INTERPRETED)])
def test_one_nan_among_the_logits_is_told_wherever_it_stands(fused, monkeypatch):
    if fused:
        from replayssm.backends.triton import draw

        monkeypatch.setattr(draw, "BLOCK", 32)
    names = ("greedy", "sampled", "top-k and top-p", "greedy, penalised", "biased")
    made = both([REQUESTS[name] for name in names])[fused]
    for place in (0, 40, VOCAB - 1):
        logits = some_logits(5)
        logits[:, place] = math.nan
        found = made.sample(logits, made.rows(range(5)), torch.arange(5)).start_copy().wait()[0]
        assert found == [NO_TOKEN] * 5


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=INTERPRETED)])
@pytest.mark.parametrize("names", [("greedy", "greedy"), ("top-k", "greedy")])
def test_a_window_gives_the_tokens_before_its_logits_break(names, fused):
    made = both([REQUESTS[name] for name in names])[fused]
    rows, places = made.rows(range(2)), torch.arange(2)
    num_tokens = torch.tensor([3, 2], dtype=torch.int32)
    logits = some_logits(6).view(2, 3, VOCAB)
    logits[0, 2] = logits[1, 2] = math.nan  # the second of these isn't in its row's window
    drafts = torch.full((2, 3), 4)
    for _ in range(2):
        drawn = made.verify_window(logits, rows, places, drafts, num_tokens)
        drafts = torch.cat([drafts[:, :1], drawn.tokens[:, :2]], 1)
    tokens, _ = made.verify_window(logits, rows, places, drafts, num_tokens).start_copy().wait()
    assert tokens == [[*drafts[0, 1:].tolist(), NO_TOKEN], drafts[1, 1:].tolist()]


@pytest.mark.gpu
def test_the_kernel_draws_the_tokens_of_torch_from_a_large_vocabulary():
    device, vocab_size, requests = torch.device("cuda"), 151_936, [*REQUESTS.values()]
    count = len(requests)
    samplers = [Sampler(vocab_size, device, max_rows=count, fused=fused) for fused in (False, True)]
    for made in samplers:
        for row, params in enumerate(requests):
            made.join(row, params, seed=100 + row, prompt=[1, 2, 1, 3], output=[4, 4, 7], eos_token_ids=[0])
    for step in range(8):
        logits = some_logits(count, vocab_size, seed=step).to(device, torch.bfloat16)  # with many equal ones
        places = torch.arange(count, device=device) + step
        drawn = [made.sample(logits, made.rows(range(count)), places).tokens.tolist() for made in samplers]
        assert drawn[0] == drawn[1]
