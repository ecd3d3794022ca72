"""The memory plan: what a budget is divided into, what it says, what it refuses; and the options' own checks."""

import logging

import pytest

from replayssm.engine import memory, setup
from replayssm.engine.engine import Engine
from replayssm.engine.memory import CPU_BYTES, Costs, budget_bytes, plan_memory, step_tokens
from replayssm.engine.options import EngineOptions
from replayssm.errors import InputError
from tests.test_engine import engine_with
from tests.token_model import TokenRunner, token_model

MIB = 2**20
COSTS = Costs(slot=2 * MIB, page=MIB // 4, work=lambda rows: 8 * MIB + rows * MIB // 8)


def plan(options=None, budget=1024 * MIB, costs=COSTS, context=4096, rows=32):
    return plan_memory(options or EngineOptions(), costs, budget, context, rows)


@pytest.mark.parametrize("budget", [64 * MIB, 100 * MIB, 1024 * MIB, 10240 * MIB])
def test_a_plan_keeps_within_its_budget_and_uses_it(budget):
    made = plan(budget=budget)
    assert made.nbytes <= budget
    full = made.num_pages == 2 * made.max_rows * made.max_pages_per_row
    assert full or made.nbytes + COSTS.page > budget


def test_a_plan_has_rows_for_typical_requests_and_the_share_of_snapshots():
    made = plan()
    assert made.max_rows == 32
    assert made.snapshots == int((1024 - 8 - 4) * 0.3 / 2)
    assert made.fitting(1024) == min(32, made.num_pages // 64) == 32
    assert made.fitting(4096) == made.num_pages // 256 == 10
    assert plan(budget=200 * MIB).max_rows == 7  # of 2 MiB, and 64 pages for 1,024 tokens, in seven tenths


def test_without_a_prefix_cache_no_slot_is_kept_for_snapshots():
    made = plan(EngineOptions(prefix_cache=False))
    assert made.snapshots == 0
    assert made.num_slots == made.max_rows


def test_without_attention_pages_cost_nothing_and_the_context_is_whole():
    made = plan(costs=Costs(2 * MIB, 0, COSTS.work), budget=100 * MIB)
    assert made.max_context == 4096
    assert made.num_pages == 2 * made.max_rows * 256


def test_the_context_is_what_fits_unless_it_is_asked_for():
    assert plan(EngineOptions(max_rows=2), budget=40 * MIB).max_context < 4096
    with pytest.raises(InputError, match=r"memory of 40.0 MiB is too small: 2 rows, 4 snapshots and 4096 tokens"):
        plan(EngineOptions(max_rows=2, max_context=4096), budget=40 * MIB)


@pytest.mark.parametrize("rows", [1, 64])
def test_a_budget_without_room_for_what_is_asked_says_what_is_wanted(rows):
    with pytest.raises(InputError, match=rf"memory of 8.0 MiB is too small: {rows} rows"):
        plan(EngineOptions(max_rows=rows), budget=8 * MIB)


def test_rows_leave_a_step_room_for_a_prompt():
    assert plan(EngineOptions(max_step_tokens=48), rows=256).max_rows == 32
    assert plan(EngineOptions(max_step_tokens=48, speculate="ngram"), rows=256).max_rows == 8


@pytest.mark.parametrize(
    ("options", "device", "budget", "tokens"),
    [
        ({}, "cpu", 2**40, 2048),
        ({}, "cuda", 80 * 1024 * MIB, 8192),
        ({}, "cuda", 60 * 1024 * MIB, 4096),
        ({}, "cuda", 20 * 1024 * MIB, 2048),
        ({"max_step_tokens": 100}, "cuda", 80 * 1024 * MIB, 100),
        ({"max_rows": 700, "speculate": "ngram"}, "cpu", 2**40, 2816),
    ],
)
def test_a_step_has_as_many_tokens_as_a_tenth_of_the_memory_takes(options, device, budget, tokens):
    assert step_tokens(EngineOptions(**options), device, budget, lambda tokens: tokens * MIB) == tokens


def test_a_cpu_takes_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 * MIB)
    assert budget_bytes(EngineOptions(), "cpu") == 25 * MIB
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**40)
    assert budget_bytes(EngineOptions(), "cpu") == CPU_BYTES
    assert budget_bytes(EngineOptions(memory_bytes=5), "cpu") == 5


def test_a_container_bounds_what_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    free = memory.available_bytes()
    assert free > 10 * MIB
    (tmp_path / "memory.max").write_text(f"{5 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * MIB}\n")
    assert memory.available_bytes() == 2 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 10 * MIB


def test_an_engine_says_in_the_log_how_many_requests_fit(caplog):
    with caplog.at_level(logging.INFO, logger="replayssm"):
        engine = engine_with()
    (record,) = caplog.records
    said = record.getMessage()
    assert f"{engine.plan.max_rows} rows and {engine.plan.snapshots} snapshots of 9.54 MiB" in said
    assert "requests that fit at once: 6 of 512 tokens" in said


def test_pages_and_slots_are_as_many_as_planned():
    engine = engine_with()
    assert engine.pages.num_pages == engine.plan.num_pages
    assert engine.runner.pool.num_slots == engine.plan.num_slots


@pytest.mark.parametrize(("context", "warns"), [(512, False), (513, True)])
def test_an_engine_warns_of_contexts_that_the_model_was_not_made_for(caplog, context, warns):
    engine_with(max_context=context)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [f"may have {context} tokens: " in line and "was made for 512," in line for line in told] == [True] * warns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ring_len": 0}, "ring_len is 0: it must be from 1 to 4096"),
        ({"state_dtype": "int8"}, "state_dtype is 'int8': it must be one of float32"),
        ({"max_rows": 0}, "max_rows is 0: it must be at least 1"),
        ({"chunk_tokens": 100}, "chunk_tokens is 100: a multiple of page_size = 16 is wanted"),
        ({"snapshot_every": 8}, "snapshot_every is 8: it must be at least 16"),
        ({"snapshot_share": 1.0}, "snapshot_share is 1.0: it must be at least 0 and below 1"),
        ({"speculate": "magic"}, "speculate is 'magic': it must be one of ngram, mtp"),
        ({"speculate": "ngram", "replay": False}, "speculate and replay=False were both given"),
        ({"num_draft": 16}, "num_draft is 16: it must be from 1 to 15"),
        (
            {"max_rows": 100, "max_step_tokens": 100},
            "max_step_tokens is 100: it must be at least 116 for max_rows = 100",
        ),
        ({"graphs": "no"}, "graphs is 'no': it must be one of auto, True, False"),
        ({"page_size": True}, "page_size is True: a whole number is wanted"),
    ],
)
def test_an_option_out_of_its_range_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        EngineOptions(**options)


def test_more_memory_than_there_is_is_refused_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * 2**20)
    options = EngineOptions(memory_bytes=2**60, max_context=2**40, max_rows=1)
    with pytest.raises(InputError, match=r"1 rows of up to \d+ tokens want [\d,]+ MiB of memory, and 3 MiB are free"):
        Engine(token_model(), options, runner=TokenRunner)


def test_a_runner_that_refuses_is_told_as_the_users_input():
    class Picky(TokenRunner):
        def __init__(self, *args, **settings):
            raise ValueError("no such layers here")

    with pytest.raises(InputError, match="the engine can't be set up: no such layers here"):
        Engine(token_model(), runner=Picky)


def test_what_fails_behind_the_runner_gives_the_model_back(monkeypatch):
    made = []

    class Noted(TokenRunner):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.append(self)

    monkeypatch.setattr(setup, "Sampler", lambda *_: 1 / 0)
    monkeypatch.setattr(setup.Sampler, "max_bytes", lambda *_: 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        Engine(token_model(), runner=Noted)
    assert made[0].closed
