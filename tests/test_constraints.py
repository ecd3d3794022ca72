"""JSON schemas and regular expressions: what comes out is valid, speculation changes nothing, errors are for people."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from typing import Any

import pytest
import torch
from running import loaded
from torch import Tensor

from replayssm import bundled
from replayssm.engine import Engine, EngineOptions
from replayssm.engine.constraints import KEPT_MATCHERS, Constraint, Constraints
from replayssm.engine.params import SamplingParams
from replayssm.engine.sampler import Sampler
from replayssm.errors import InputError

pytest.importorskip("llguidance")

VOCAB = 300  # more than the tokenizer has, as padded models do
EOS = (256, 258)
CPU = torch.device("cpu")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["gdn", "kda", "mamba"]},
            "dims": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "size", "kind", "dims"],
        "additionalProperties": False,
    }
)
PATTERNS = {
    "digits": r"[1-9][0-9]{0,5}",
    "several bytes for a character": r"[aé]{2,6}(漢|字|🎉){1,3}!",
    "two ways": r"(yes|no)( (yes|no)){0,4}",
    "one text": r"exactly this",
}


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled.path(bundled.names()[0]))


@cache
def shared() -> Constraints:
    return Constraints(tokenizer(), VOCAB, EOS)


def logits_after(tokens: list[int], seed: int) -> Tensor:
    """``[V]``: any model; ends and spaces are rare in it, and it never repeats itself for long."""
    generator = torch.Generator().manual_seed(hash((*tokens[-3:], len(tokens), seed)) % 2**31)
    logits = 2 * torch.randn(VOCAB, generator=generator)
    logits[list(b" \t\r\n")] -= 4.0
    return logits


def one_by_one(params: SamplingParams, seed: int, most: int = 300) -> list[int]:
    sampler, constraint = Sampler(VOCAB, CPU, 1), shared().start(params)
    sampler.join(0, params, seed=seed, prompt=[1])
    rows, tokens = sampler.rows([0]), [1]
    while not constraint.finished and len(tokens) < most:
        masks = shared().masks([constraint], CPU)
        drawn = sampler.sample(logits_after(tokens, seed)[None], rows, torch.tensor([len(tokens)]), masks)
        tokens.append(int(drawn.tokens))
        constraint.advance(tokens[-1:])
    assert constraint.finished
    assert constraint.error is None
    return tokens[1:]


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] in EOS
    return bytes(tokens[:-1]).decode()


def allowed(mask: Tensor) -> list[int]:
    return [token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1]


@pytest.mark.parametrize("temperature", [0, 1.5], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_output_matches_its_regular_expression(pattern, temperature):
    found = {text_of(one_by_one(SamplingParams(regex=pattern, temperature=temperature), seed)) for seed in range(6)}
    assert all(re.fullmatch(pattern, text) for text in found)
    if pattern != PATTERNS["one text"]:
        assert len(found) > 1


@pytest.mark.parametrize("seed", range(4))
def test_output_keeps_to_its_json_schema(seed):
    found = json.loads(text_of(one_by_one(SamplingParams(json_schema=SCHEMA, top_p=0.95), seed)))
    assert found.keys() == {"name", "size", "kind", "dims"}
    assert len(found["name"]) <= 4
    assert found["size"] in range(100)
    assert found["kind"] in ("gdn", "kda", "mamba")
    assert 1 <= len(found["dims"]) <= 3
    assert all(isinstance(one, bool) for one in found["dims"])


def test_speculation_gives_the_same_tokens_whatever_is_drafted():
    """Rows with and without constraints, sampled, greedy and penalised, with right, wrong and forbidden drafts."""
    requests = [
        SamplingParams(json_schema=SCHEMA),
        SamplingParams(temperature=0, regex=PATTERNS["several bytes for a character"]),
        SamplingParams(),
        SamplingParams(regex=PATTERNS["two ways"], frequency_penalty=0.8, repetition_penalty=1.2),
    ]
    expected = [one_by_one(params, seed) if params.constrained else [] for seed, params in enumerate(requests)]
    sampler, dice, accepted = Sampler(VOCAB, CPU, 4), random.Random(4), 0
    constraints = [shared().start(params) for params in requests]
    texts = [[1] for _ in requests]
    for seed, params in enumerate(requests):
        sampler.join(seed, params, seed=seed, prompt=[1])
    rows = sampler.rows(range(4))
    while not all(constraint.finished for constraint in constraints if constraint):
        width = dice.randint(1, 5)
        drafts: list[list[int]] = []
        for right, text in zip(expected, texts, strict=True):
            rest = right[len(text) - 1 :][: width - 1]
            drafts.append([token if dice.random() < 0.8 else dice.randrange(VOCAB) for token in rest])
        working = [constraint is None or not constraint.finished for constraint in constraints]
        counts = [(1 + len(row)) * at_work for row, at_work in zip(drafts, working, strict=True)]
        window = torch.tensor(
            [[text[-1], *row] + [0] * (width - 1 - len(row)) for text, row in zip(texts, drafts, strict=True)]
        )
        logits = torch.stack(
            [
                torch.stack([logits_after([*text, *row[:place]], seed) for place in range(width)])
                for seed, (text, row) in enumerate(zip(texts, drafts, strict=True))
            ]
        )
        held = [(constraint, row) for constraint, row in zip(constraints, drafts, strict=True) if constraint]
        masks = shared().window_masks([one for one, _ in held], [row for _, row in held], width, CPU)
        verified = sampler.verify_window(
            logits, rows, torch.tensor([len(text) for text in texts]), window, torch.tensor(counts).int(), masks
        )
        for text, new, constraint in zip(texts, verified.start_copy().wait()[0], constraints, strict=True):
            end = next((place for place, token in enumerate(new, 1) if token in EOS), len(new))
            text += new[:end] if constraint else new
            accepted += max(0, len(new) - 1)
            if constraint:
                constraint.advance(new[:end])
    assert accepted > 20
    for text, right, constraint in zip(texts, expected, constraints, strict=True):
        if constraint:
            assert text[1:] == right


def test_masks_of_a_window_are_those_of_its_tokens_and_leave_no_trace():
    constraint = shared().start(SamplingParams(regex="ab*c"))
    before = shared().masks([constraint], CPU)
    masks = shared().window_masks([constraint], [list(b"abbc")], 6, CPU)[0]
    assert [allowed(mask) for mask in masks[:5]] == [[97], [98, 99], [98, 99], [98, 99], list(EOS)]
    assert masks.shape == (6, 10)
    assert torch.equal(shared().masks([constraint], CPU), before)
    assert masks.dtype == torch.int32


@pytest.mark.parametrize("drafts", [[120], [97, 120, 98], [97, 256], [97, 99, 258, 97]], ids=str)
def test_drafts_behind_one_that_is_not_allowed_change_nothing(drafts):
    constraint = shared().start(SamplingParams(regex="ab*c"))
    shared().window_masks([constraint], [drafts], 6, CPU)
    constraint.advance([97, 98])
    assert allowed(shared().masks([constraint], CPU)[0]) == [98, 99]


def test_any_end_of_sequence_ends_a_text_that_is_complete_and_no_other():
    for end in EOS:
        constraint = shared().start(SamplingParams(regex="ab*"))
        assert set(allowed(shared().masks([constraint], CPU)[0])).isdisjoint(EOS)
        constraint.advance([97])
        assert allowed(shared().masks([constraint], CPU)[0]) == [98, *EOS]
        constraint.advance([end])
        assert constraint.finished


def test_samples_go_their_own_ways():
    first = shared().start(SamplingParams(regex="ab|cd"))
    second = first.copy()
    first.advance([97])
    second.advance([99])
    masks = shared().masks([first, second], CPU)
    assert [allowed(mask) for mask in masks] == [[98], [100]]
    third = first.copy()
    third.advance([98])
    assert allowed(shared().masks([first], CPU)[0]) == [98]


def test_rows_without_constraints_need_no_masks():
    assert shared().start(SamplingParams()) is None
    assert shared().masks([], CPU) is None
    assert shared().window_masks([], [], 3, CPU) is None


def test_a_token_that_breaks_the_constraint_is_an_error_of_the_program():
    constraint = shared().start(SamplingParams(regex="ab"))
    with pytest.raises(RuntimeError, match="token 120 breaks its constraint"):
        constraint.advance([97, 120])
    assert constraint.error
    assert "\n" not in constraint.error
    assert allowed(shared().masks([constraint], CPU)[0]) == []
    ended = shared().start(SamplingParams(regex="a"))
    with pytest.raises(RuntimeError, match="token 97 came after the end"):
        ended.advance([97, 256, 97])


TOO_LARGE = "(a|b){3}((a{900}){900}){900}"  # which compiles, and gives up at the first a behind three letters
GAVE_UP = "regex can't go on: lexer error: too many expressions constructed"


def test_a_matcher_that_gives_up_says_so_and_lets_nothing_come():
    constraint = Constraints(tokenizer(), VOCAB, EOS).start(SamplingParams(regex=TOO_LARGE))
    for token in b"bbbaaaa":
        shared().masks([constraint], CPU)
        constraint.advance([token])
    assert constraint.error == GAVE_UP
    assert not shared().window_masks([constraint], [list(b"aa")], 4, CPU).any()
    assert constraint.copy().error == GAVE_UP


def test_behind_a_draft_at_which_the_matcher_gives_up_nothing_may_come():
    constraint = Constraints(tokenizer(), VOCAB, EOS).start(SamplingParams(regex=TOO_LARGE))
    masks = shared().window_masks([constraint], [list(b"abaaaa")], 7, CPU)[0]
    assert [allowed(mask) for mask in masks[:4]] == [[97, 98]] * 3 + [[97]]
    assert not masks[4:].any()
    assert constraint.error is None
    constraint.advance(list(b"bb"))  # the drafts were wrong


def test_where_one_text_made_the_matcher_give_up_the_next_request_starts_anew():
    constraints, params = Constraints(tokenizer(), VOCAB, EOS), SamplingParams(regex=TOO_LARGE)
    for _ in range(3):
        constraint = constraints.start(params)
        masks = constraints.window_masks([constraint], [list(b"bbbaa")], 6, CPU)[0]
        assert [bool(mask.any()) for mask in masks] == [True, True, True, True, False, False]


DRAFTS = {"speculate": "ngram", "num_draft": 3, "fixed_draft": True}
ANSWERS = {TOO_LARGE: "bbba", "((a{900}){900}){900}": ""}  # given up at a token, and at a mask


@pytest.mark.parametrize("options", [{}, DRAFTS], ids=["in step", "drafts"])
def test_patterns_that_are_too_large_end_their_own_requests_alone(options):
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bound = [SamplingParams(temperature=0, max_tokens=40, regex=regex, logit_bias={98: 50.0}) for regex in ANSWERS]
    with Engine(loaded(bundled.names()[0]), EngineOptions(max_rows=3, max_context=64, **options)) as engine:
        (alone,) = engine.generate(["import os\n"], free)
        outputs = engine.generate(["import os\n", "bbbaaaabbbaaaa", "aaaaaaaa"], [free, *bound])
        beside, *ended = (output.completions[0] for output in outputs)
    assert beside == alone.completions[0]
    assert {(one.finish_reason, one.message) for one in ended} == {("error", GAVE_UP)}
    assert [one.text for one in ended] == [*ANSWERS.values()]
    assert [bytes(one.token_ids).decode() for one in ended] == [*ANSWERS.values()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": '{"type": '}, "json_schema does not compile: "),
        ({"json_schema": "[]"}, "json_schema does not compile: schema must be an object or boolean"),
        ({"json_schema": '{"type": "objec"}'}, "json_schema does not compile: Invalid type: objec"),
        ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "json_schema does not compile: Unsat"),
        ({"json_schema": '{"$ref": "http://localhost/x"}'}, "json_schema does not compile: "),
        ({"json_schema": '{"type": "string", "pattern": "("}'}, "json_schema does not compile: regex parse error"),
        ({"regex": "a("}, "regex does not compile: "),
        ({"regex": "(?=a)b"}, "regex does not compile: "),
    ],
    ids=str,
)
def test_a_constraint_that_does_not_compile_is_refused_in_one_line(settings, message):
    with pytest.raises(InputError) as raised:
        shared().start(SamplingParams(**settings))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_json_may_be_indented_but_blanks_come_to_an_end():
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"const": 1}}}}})
    params = SamplingParams(json_schema=schema)
    indented = json.dumps({"a": {"b": 1}}, indent=4)
    shared().start(params).advance(list(indented.encode()))
    blanks = shared().start(params)
    blanks.advance([ord("{")])
    with pytest.raises(RuntimeError, match="breaks its constraint"):
        blanks.advance([ord(" ")] * 100)


@pytest.mark.parametrize(
    "settings", [{"regex": r"[^\s\S]"}, {"regex": r"a[^\s\S]"}, {"json_schema": '{"$ref": "#"}'}], ids=str
)
def test_a_constraint_that_nothing_keeps_to_is_refused(settings):
    with pytest.raises(InputError, match="^(regex|json_schema) allows no output at all"):
        shared().start(SamplingParams(**settings))


def test_without_llguidance_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    constraints = Constraints(tokenizer(), VOCAB, EOS)
    assert constraints.start(SamplingParams()) is None
    with pytest.raises(InputError, match=r"need llguidance, which is not installed: pip install 'replayssm\[serve\]'"):
        constraints.start(SamplingParams(regex="a"))


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "eos", "message"),
    [
        ("the model's", VOCAB, (), "need a model with an end-of-sequence token: this one has none"),
        ("the model's", 100, EOS, "llguidance cannot use this model's tokenizer: vocab size too small"),
        ("none", VOCAB, EOS, "llguidance cannot use this model's tokenizer: "),
    ],
    ids=["no end", "small vocabulary", "slow tokenizer"],
)
def test_a_model_that_cannot_be_constrained_is_said_so(tokens, vocab_size, eos, message):
    constraints = Constraints(tokenizer() if tokens == "the model's" else object(), vocab_size, eos)
    with pytest.raises(InputError, match=re.escape(message)):
        constraints.start(SamplingParams(regex="a"))


def test_a_schema_is_compiled_once_and_old_ones_are_forgotten():
    constraints = Constraints(tokenizer(), VOCAB, EOS)
    compiled: list[str] = []
    compile_one = constraints._compile
    constraints._compile = lambda params: compiled.append(params.regex) or compile_one(params)
    for number in [*range(KEPT_MATCHERS), 0, 1, KEPT_MATCHERS, 1, 0]:
        assert isinstance(constraints.start(SamplingParams(regex=f"a{{{number + 1}}}")), Constraint)
    assert compiled == [f"a{{{number + 1}}}" for number in [*range(KEPT_MATCHERS + 1), 0]]
