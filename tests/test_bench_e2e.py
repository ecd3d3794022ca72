"""`replayssm bench e2e`: copied contexts are true contexts, contenders do the same work, a failure stops nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import tables
from replayssm import bundled, cli
from replayssm.bench import e2e, e2e_report, engines, filled, served
from replayssm.bench.random_model import random_model
from replayssm.bench.rows import CONTENDERS, LOADS
from replayssm.bench.set_windows import set_windows
from replayssm.engine import EngineOptions, SamplingParams
from replayssm.loading import load_model

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 4096,
}
SMALL = e2e.Options(batches=(1, 5), requests=2, prompt_tokens=100, new_tokens=4, ring_len=4, rounds=1)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def small(config):
    return random_model(config, "float32", "cpu")


def options_of(rows: int, ring_len: int = 4, **others: object) -> EngineOptions:
    return EngineOptions(ring_len=ring_len, max_rows=rows, max_context=160, prefix_cache=False, **others)


@pytest.mark.parametrize("name", bundled.names())
def test_a_model_is_made_of_any_config_that_transformers_writes(name):
    """Of Mamba-2's, too, which hold an infinity."""
    made, path = random_model(bundled.path(name) / "config.json", "float32", "cpu"), bundled.path(name)
    assert made.model.config.to_dict()["model_type"] == json.loads((path / "config.json").read_text())["model_type"]
    limit = getattr(made.model.config, "time_step_limit", None)
    assert limit is None or tuple(limit) == (0.0, float("inf"))


# The filled load


@pytest.mark.parametrize("name", ["qwen3_5-tiny", "kimi_linear-tiny", "granite_hybrid-tiny"])
def test_a_copied_context_goes_on_as_a_computed_one(name):
    loaded = load_model(name)
    tokens = engines.random_tokens(256, 37, seed=3)
    with engines.engines(loaded, {"replay": options_of(3)}) as made:
        engine = made["replay"]
        context = engines.computed_context(engine, tokens)
        engines.fill(engine, context, rows=3, new_tokens=9, groups=2)
        last = [request.prompt[-1] for request in engine.requests.values()]
        found = {request.id: [] for request in engine.requests.values()}
        for request in engine.requests.values():
            found[request.id] += request.sequences[0].tokens[len(request.prompt) :]
        while engine.has_work:
            for update in engine.step():
                found[update.request_id] += update.token_ids
        outputs = engine.generate([[*tokens, token] for token in last], GREEDY)
    assert list(found.values()) == [output.completions[0].token_ids for output in outputs]


def test_rows_of_a_filled_engine_flush_at_different_steps(small):
    with engines.engines(small, {"replay": options_of(8)}) as made:
        engine = made["replay"]
        context = engines.computed_context(engine, engines.random_tokens(300, 20, seed=0))
        engines.fill(engine, context, rows=8, new_tokens=50, groups=4)
        slots = [sequence.slot for sequence in engine.scheduler.running]
        positions = engine.runner.pool.write_pos[slots].tolist()
    assert len(set(slots)) == 8
    assert sorted(positions) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rows_of_a_filled_engine_share_no_pages(small):
    with engines.engines(small, {"replay": options_of(5)}) as made:
        engine = made["replay"]
        context = engines.computed_context(engine, engines.random_tokens(300, 40, seed=0))
        engines.fill(engine, context, rows=5, new_tokens=50, groups=4)
        pages = [page for sequence in engine.scheduler.running for page in sequence.pages]
    assert len(pages) == len(set(pages)) == 5 * 3


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_windows_keep_as_many_tokens_as_is_set(small, kept):
    with engines.engines(small, {"speculate": options_of(3, speculate="ngram", fixed_draft=True)}) as made:
        engine = made["speculate"]
        context = engines.computed_context(engine, engines.random_tokens(300, 20, seed=0))
        set_windows(engine, kept)
        engines.fill(engine, context, rows=3, new_tokens=100, groups=3)
        turn = filled._turn(engine, steps=6)
        stats = engine.stats()
    assert turn.tokens == 6 * 3 * kept
    assert stats.drafted == 3 * stats.windows
    assert stats.accepted == (kept - 1) * stats.windows


def test_engines_of_one_model_share_its_weights_and_serve_in_turn(small):
    prompts = [engines.random_tokens(300, 12, seed) for seed in range(2)]
    wanted = {"replay": options_of(2), "no-replay": options_of(2, replay=False)}
    with engines.engines(small, wanted) as made:
        before = [engine.generate(prompts, GREEDY) for engine in made.values()]
        weights = [{p.data_ptr() for p in engine.loaded.model.parameters()} for engine in made.values()]
        again = [engine.generate(prompts, GREEDY) for engine in made.values()]
    texts = [[output.completions[0].token_ids for output in outputs] for outputs in (*before, *again)]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert weights[0] == weights[1] == {p.data_ptr() for p in small.model.parameters()}


@pytest.mark.parametrize("rows", [1, 7])
def test_an_engine_takes_the_memory_that_its_rows_need(small, rows):
    engine = engines.make_engine(small, options_of(rows))
    engine.close()
    assert engine.plan.max_rows == rows
    assert engine.plan.num_pages == rows * 10


# The other loads


def test_prompts_of_a_round_are_new_and_share_what_they_should():
    options = replace(SMALL, requests=3)
    alone = [served._prompts(options, "no-prefix", 1000, number) for number in range(2)]
    shared = [served._prompts(options, "shared-prefix", 1000, number) for number in range(2)]
    assert len({tuple(prompt) for prompts in alone for prompt in prompts}) == 6
    assert len({tuple(prompt[:75]) for prompts in shared for prompt in prompts}) == 1
    assert len({tuple(prompt[75:]) for prompts in shared for prompt in prompts}) == 6
    assert {len(prompt) for prompts in (*alone, *shared) for prompt in prompts} == {100}


def test_shared_prefixes_come_from_the_cache(small):
    rows = served.point(small, replace(SMALL, contenders=("replay", "no-replay")), "shared-prefix")
    assert [row["cached_tokens"] for row in rows] == [64, 64]
    assert [row["ttft_ratio"] is None for row in rows] == [False, True]


def test_a_model_whose_logits_are_nan_is_reported_and_not_timed(config):
    broken = random_model(config, "float32", "cpu")
    with torch.no_grad():
        next(broken.model.base_model.parameters()).fill_(torch.nan)
    options = replace(SMALL, contenders=("replay",))
    rows = [row for point in filled.points(broken, options) for row in point]
    rows += served.point(broken, options, "no-prefix")
    assert len(rows) > 1
    assert all("logits are NaN" in row["error"] and row["tokens_per_s"] is None for row in rows)


def test_first_tokens_are_compared_within_each_round():
    def turns(*seconds):
        return [served.Served(1.0, ttft, 1.0, 0.0, None) for ttft in seconds]

    assert served._ttft_ratio(turns(1.0, 2.0, 4.0), turns(0.5, 2.0, 5.0)) == 1.0


# All of it


@pytest.fixture(scope="module")
def result(small):
    seen = []
    whole = e2e.run(small, SMALL, lambda so_far: seen.append(len(so_far["rows"])))
    assert seen == sorted(seen)
    assert len(seen) == SMALL.num_points
    return whole


def test_each_point_has_a_row_for_each_contender(result):
    found = [(row["load"], row["batch"], row["contender"]) for row in result["rows"]]
    ours = CONTENDERS[:3]
    wanted = [("filled", batch, name) for batch in (1, 5) for name in CONTENDERS]
    wanted += [(load, 2, name) for load in LOADS[1:] for name in ours] + [("no-prefix", 2, "transformers")]
    assert sorted(found) == sorted(wanted)


def test_rows_have_the_figures_of_their_load(result):
    for row in result["rows"]:
        filled_row, ours = row["load"] == "filled", row["contender"] != "transformers"
        assert row["tokens_per_s"] > 0
        assert row["tpot_ms"] > 0
        assert (row["ttft_ms"] is None) == filled_row
        assert (row["step_ms"] is None) == (not filled_row)
        for column in ("forward_ms", "host_ms"):
            assert (row[column] is None) == (not (filled_row and ours))
        assert row["context"] == ("copied" if filled_row else "computed")
        if filled_row:
            assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["tpot_ms"], rel=1e-2)


def test_tables_have_a_line_for_each_row_and_ratios_of_one_batch(result):
    made = e2e_report.tables(result["rows"])
    assert sum(len(list(table.lines())) for table in made) == len(result["rows"])
    at = {row["contender"]: row for row in result["rows"] if row["load"] == "filled" and row["batch"] == 5}
    line = next(cells for cells in made[0].lines() if cells[:2] == ["5", "replay"])
    shown = dict(zip(made[0].header, line, strict=True))
    assert shown["× no-replay"] == f"{at['replay']['tokens_per_s'] / at['no-replay']['tokens_per_s']:.2f}"
    assert all(len(cells) == len(table.header) for table in made for cells in table.lines())


def test_a_document_takes_a_table_of_the_result(result, tmp_path):
    (tmp_path / "e2e.json").write_text(json.dumps(result))
    text = tables.markdown("e2e", {"load": "filled"}, tmp_path)
    assert text.count("\n| 5 | ") == 4
    assert "requests of" not in text
    assert result["meta"]["date"] in text


def rows_of(loaded, options):
    return [row for point in e2e.points(loaded, options) for row in point]


def test_each_context_has_its_points_and_its_table(small):
    options = replace(SMALL, batches=(2,), contexts=(30, 90), contenders=("replay", "transformers"), loads=("filled",))
    rows = rows_of(small, options)
    assert len(rows) == options.num_points == 4
    found = [(row["prompt_tokens"], row["contender"]) for row in rows]
    assert found == [(90, "replay"), (30, "replay"), (90, "transformers"), (30, "transformers")]
    titles = [table.title for table in e2e_report.tables(rows)]
    assert ["contexts of 90 tokens" in title for title in titles] == [True, False]


def test_no_point_begins_when_the_time_is_up(small):
    result = e2e.run(small, replace(SMALL, contenders=("replay",), seconds=0.0))
    assert [(row["load"], row["batch"]) for row in result["rows"]] == [("filled", 1)]
    assert result["meta"]["points_left"] == 3


def test_the_operators_are_those_that_were_asked_for(small):
    options = replace(SMALL, batches=(1,), loads=LOADS[:2], contenders=("replay",), backend="torch")
    assert {row["backend"] for row in rows_of(small, options)} == {"torch"}


def test_tokens_are_drawn_if_that_was_asked_for(small):
    options = replace(SMALL, batches=(3,), loads=("filled",), contenders=("replay",), sampled=True)
    (row,) = rows_of(small, options)
    assert row["sampled"]
    assert row["tokens_per_s"] > 0


# What fails


def test_a_batch_that_fails_has_its_errors_and_the_others_their_times(small, monkeypatch):
    def fails_at_five(made, options, device):
        if any(len(engine.requests) == 5 for engine in made.values()):
            raise torch.OutOfMemoryError("no memory for so many")
        return take_turns(made, options, device)

    take_turns = filled._take_turns
    monkeypatch.setattr(filled, "_take_turns", fails_at_five)
    options = replace(SMALL, batches=(5, 1), contenders=("replay", "no-replay"), loads=("filled",))
    rows = e2e.run(small, options)["rows"]
    assert [(row["batch"], row.get("error")) for row in rows] == [
        (5, "OutOfMemoryError: no memory for so many"),
        (5, "OutOfMemoryError: no memory for so many"),
        (1, None),
        (1, None),
    ]
    (table,) = e2e_report.tables(rows)
    assert [line[0] for line in table.lines()] == ["1", "1", "5", "5"]


def test_a_batch_for_which_there_are_no_engines_is_left_out(small, monkeypatch):
    def no_more_than_three(loaded, options):
        if options.max_rows > 3:
            raise torch.OutOfMemoryError("too many")
        return make_engine(loaded, options)

    make_engine = engines.make_engine
    monkeypatch.setattr(engines, "make_engine", no_more_than_three)
    options = replace(SMALL, batches=(2, 5), contenders=("replay",), loads=("filled",))
    rows = e2e.run(small, options)["rows"]
    assert [(row["batch"], "error" in row) for row in rows] == [(5, True), (2, False)]


# The command


def test_the_command_writes_and_prints_the_result(config, tmp_path, capfd):
    path = tmp_path / "results" / "e2e.json"
    arguments = "--batch 2 --load filled,no-prefix --contender replay,transformers --requests 2 --prompt-tokens 40"
    arguments += " --new-tokens 4 --ring-len 4 --rounds 1 --json"
    assert cli.run(["bench", "e2e", "--model", str(config), "--output", str(path), *arguments.split()]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed == json.loads(path.read_text())
    assert [(row["model"], row["contender"]) for row in printed["rows"]] == [
        ("small", "replay"),
        ("small", "replay"),
        ("small", "transformers"),
        ("small", "transformers"),
    ]


def test_the_command_fails_where_one_of_ours_does(config, capfd, monkeypatch):
    def broken(made, options, device):
        raise RuntimeError("broken")

    monkeypatch.setattr(filled, "_take_turns", broken)
    arguments = "--batch 2 --load filled --contender replay --prompt-tokens 40 --new-tokens 4 --ring-len 4"
    assert cli.run(["bench", "e2e", "--model", str(config), *arguments.split()]) == 1
    assert "replay filled B=2: RuntimeError: broken" in capfd.readouterr().err


MODELS = "a folder with config.json, safetensors and a tokenizer, a config's .json file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 0", "batch is '0': whole numbers from 1 to 1024 are wanted"),
        ("--load all,filled", "load is 'all': it must be one of filled, no-prefix, shared-prefix"),
        ("--contender vllm", "contender is 'vllm': it must be one of replay, no-replay, speculate, transformers"),
        ("--kept 5", "kept is 5: a window of 3 drafts has 4 tokens"),
        ("--state-dtype float32,bfloat16", "state-dtype is 'float32,bfloat16': one of"),
        (
            "--model nowhere.json",
            f"model 'nowhere.json' is neither a folder nor a bundled model: give {MODELS}, or ",
        ),
        ("--prompt-tokens 9000", "prompt-tokens is 9000, new-tokens 64: "),
        ("--context 9000", "prompt-tokens is 128, new-tokens 64, context 9000: "),
        ("--backend fast", "backend is 'fast': it must be one of auto, cpu, torch, triton, cuda"),
        ("--load shared-prefix --contender transformers", "load is shared-prefix and contender transformers"),
        ("--seconds soon", "seconds is 'soon': whole numbers"),
        ("--device cuda", "device is 'cuda', but torch sees no GPU"),
        ("--output .", "output is '.', which is a folder"),
    ],
)
def test_bad_input_is_one_line_before_a_model_loads(arguments, message, capfd, monkeypatch):
    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("replayssm.loading.load_model", load)
    assert cli.run(["bench", "e2e", *arguments.split()]) == 2
    _, err = capfd.readouterr()
    assert err.startswith(f"replayssm: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not readable JSON"),
        ("[]", "holds a JSON list, an object is wanted"),
        ('{"model_type": "llama"}', "model type 'llama' is not supported"),
        (json.dumps(CONFIG | {"linear_num_key_heads": "many"}), "gives no model: "),
    ],
)
def test_a_config_that_gives_no_model_is_refused(text, message, tmp_path, capfd):
    path = tmp_path / "broken.json"
    path.write_text(text)
    assert cli.run(["bench", "e2e", "--model", str(path)]) == 2
    assert message in capfd.readouterr().err
