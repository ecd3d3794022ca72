"""`replayssm generate --speculate`: the same tokens, what it reports, and what it refuses."""

from __future__ import annotations

import json

import pytest

from replayssm import cli, ops, options

PROMPT = ("--prompt", "import os\nimport sys\n", "--max-new-tokens", "48", "--ignore-eos")


@pytest.fixture
def generated(capfd):
    """The JSON object of one `generate`."""

    def run(*args: str) -> dict:
        capfd.readouterr()
        code = cli.run(["generate", *PROMPT, *args, "--json"])
        out, err = capfd.readouterr()
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "args"),
    [
        ("qwen3_5-tiny", ("ngram", "--num-draft", "7")),
        ("qwen3_5-tiny", ("mtp",)),
        ("qwen3_5-tiny", ("mtp", "--tree", "2", "--fixed-draft", "--ring-len", "4")),
        ("kimi_linear-tiny", ("ngram", "--tree", "3")),
        ("granite_hybrid-tiny", ("draft", "--draft-model", "qwen3_5-tiny", "--fixed-draft")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_speculation_gives_the_plain_tokens_and_reports_itself(generated, model, args):
    plain = generated("--model", model, "--no-replay")
    told = generated("--model", model, "--speculate", *args)
    assert told["token_ids"] == plain["token_ids"]
    assert told["text"] == plain["text"]
    speculation = told["speculation"]
    assert plain["speculation"] is None
    assert speculation["drafter"] == args[0]
    assert 0 < speculation["accepted"] <= speculation["drafted"]
    assert speculation["acceptance_length"] > 1
    assert speculation["tokens_per_step"] == pytest.approx(47 / speculation["steps"], rel=0.15)
    assert told["decode_steps"] == speculation["steps"]
    assert told["state_bytes_written"] < told["state_bytes_written_stepwise"]


@pytest.mark.parametrize("drafter", ["ngram", "mtp"])
def test_a_seed_draws_the_same_tokens_with_drafts_and_without(generated, drafter):
    args = ("--temperature", "0.9", "--top-p", "0.9", "--seed", "5")
    told = generated(*args, "--speculate", drafter)
    assert told["speculation"]["drafted"] > 0
    assert told["token_ids"] == generated(*args)["token_ids"]


@pytest.mark.parametrize("tree", [(), ("--tree", "2")], ids=["engine", "tree"])
def test_a_seed_makes_sampled_speculation_repeatable(generated, tree):
    args = ("--speculate", "ngram", *tree, "--temperature", "0.9", "--top-p", "0.9", "--seed", "5")
    assert generated(*args)["token_ids"] == generated(*args)["token_ids"]


@pytest.mark.parametrize("args", [("ngram",), ("ngram", "--tree", "2")], ids=["engine", "tree"])
def test_streamed_text_is_the_text_with_drafts_too(capfd, args):
    texts = []
    for stream in ([], ["--stream"]):
        capfd.readouterr()
        assert cli.run(["generate", *PROMPT, "--speculate", *args, *stream]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != "\n"


def test_the_longest_draft_fills_a_window():
    assert options.MAX_DRAFT == ops.MAX_WINDOW - 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--speculate", "lucky"), "speculate is 'lucky': it must be one of ngram, mtp, draft"),
        (("--speculate", "draft"), "speculate is 'draft': --draft-model, a model folder or a bundled name, is wanted"),
        (("--speculate", "ngram", "--draft-model", "qwen3_5-tiny"), "draft-model was given without --speculate draft"),
        (("--draft-model", "qwen3_5-tiny"), "draft-model was given without --speculate draft"),
        (("--speculate", "draft", "--draft-model", "no-such"), "draft-model 'no-such' is neither a folder nor"),
        (("--speculate", "ngram", "--num-draft", "0"), "num-draft is 0: it must be from 1 to 15"),
        (("--speculate", "ngram", "--num-draft", "16"), "num-draft is 16: it must be from 1 to 15"),
        (("--speculate", "ngram", "--tree", "0"), "tree is 0: it must be from 1 (a chain)"),
        (("--speculate", "ngram", "--no-replay"), "speculate and no-replay were both given"),
        (("--num-draft", "5"), "num-draft was given without --speculate, which it is for"),
        (("--tree", "2"), "tree was given without --speculate, which it is for"),
        (("--fixed-draft",), "fixed-draft was given without --speculate, which it is for"),
        (("--model", "kimi_linear-tiny", "--speculate", "mtp"), "has no MTP head"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_2(capfd, args, message):
    assert cli.run(["generate", *PROMPT, *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err
