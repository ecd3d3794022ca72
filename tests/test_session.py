"""Sessions: what is exported goes on with the same tokens elsewhere; what can't be used changes nothing."""

import json
import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from replayssm.engine.params import SamplingParams
from replayssm.engine.session import FORMAT
from replayssm.errors import InputError
from tests.test_engine import GREEDY, LONG, assert_all_is_accounted_for, engine_with, run
from tests.token_model import greedy, memory_for, random_prompt

SAMPLED = SamplingParams(seed=3, temperature=0.8, frequency_penalty=0.3, stop_token_ids=(60,), **LONG)


def partly_served(params, *, steps: int, prompt=None, **options):
    """An engine whose one request has got some tokens, and these."""
    engine = engine_with(**options)
    name = engine.add(prompt or random_prompt(random.Random(0), 23), params)
    updates = [update for _ in range(steps) for update in engine.step()]
    return engine, name, [token for update in updates for token in update.token_ids]


def rest_of(engine, name) -> list[int]:
    return [token for update in run(engine)[name] for token in update.token_ids]


@pytest.mark.parametrize("run_ahead", [False, True], ids=["in-step", "ahead"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0, **LONG), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 20], ids=lambda steps: f"after-{steps}-steps")
def test_a_request_goes_on_elsewhere_with_the_tokens_it_has_here(tmp_path, params, steps, run_ahead):
    engine, name, before = partly_served(params, steps=steps, run_ahead=run_ahead, max_step_tokens=16)
    total = engine.export_session(name, tmp_path / "session")
    here = before + rest_of(engine, name)
    other = engine_with(run_ahead=run_ahead)
    tokens, restored = other.import_session(tmp_path / "session")
    assert len(tokens) == total >= 23 + len(before)
    assert here == tokens[23:] + rest_of(other, restored)
    done = other.stats().prefilled_tokens
    assert done == {0: 23, 1: 23 - 16}.get(steps, 1)  # nothing is computed twice
    assert_all_is_accounted_for(other)


@pytest.mark.parametrize(
    "options",
    [{"ring_len": 1}, {"replay": False}, {"chunk_tokens": 4}, {"prefix_cache": False}, {"speculate": "ngram"}],
    ids=str,
)
def test_a_request_without_a_seed_goes_on_with_its_draws_under_other_options(tmp_path, options):
    engine, name, before = partly_served(SamplingParams(temperature=0.8, **LONG), steps=10)
    engine.export_session(name, tmp_path / "session")
    other = engine_with(**options)
    tokens, restored = other.import_session(tmp_path / "session")
    assert tokens[23:] + rest_of(other, restored) == before + rest_of(engine, name)
    assert_all_is_accounted_for(other)


def test_a_drafter_is_told_all_tokens_of_a_restored_request(tmp_path, monkeypatch):
    engine, name, before = partly_served(GREEDY, steps=10)
    engine.export_session(name, tmp_path / "session")
    other = engine_with(speculate="ngram")
    tokens, _ = other.import_session(tmp_path / "session")
    told = []
    monkeypatch.setattr(other.launcher.drafts, "join", lambda row, tokens: told.append(list(tokens)))
    other.step()
    assert told == [tokens]
    assert tokens[23:] == before


def test_a_long_prompt_that_is_half_computed_goes_on_elsewhere(tmp_path):
    prompt = random_prompt(random.Random(1), 100)
    engine, name, _ = partly_served(GREEDY, steps=3, prompt=prompt, max_step_tokens=16)
    engine.export_session(name, tmp_path / "session")
    other = engine_with()
    _, restored = other.import_session(tmp_path / "session")
    assert rest_of(other, restored) == greedy(prompt, 24)
    assert other.stats().prefilled_tokens == 100 - 48


def test_a_restored_request_may_be_preempted(tmp_path):
    engine, name, before = partly_served(SamplingParams(temperature=0, **LONG), steps=10)
    engine.export_session(name, tmp_path / "session")
    other = engine_with(**memory_for(3, 0, 32))
    prompts = [random_prompt(random.Random(i), 20) for i in range(3)]
    neighbours = [other.add(prompt, SamplingParams(temperature=0, **LONG)) for prompt in prompts]
    tokens, restored = other.import_session(tmp_path / "session")
    updates = run(other)
    assert other.stats().preemptions > 0
    new = [token for update in updates[restored] for token in update.token_ids]
    assert tokens[23:] + new == before + rest_of(engine, name)
    assert len(neighbours) == 3
    assert_all_is_accounted_for(other)


def test_a_preempted_request_goes_on_elsewhere(tmp_path):
    engine = engine_with(**memory_for(3, 0, 34))
    prompts = [random_prompt(random.Random(i), 20) for i in range(3)]
    *_, last = [engine.add(prompt, SamplingParams(temperature=0, **LONG)) for prompt in prompts]
    while not engine.stats().preemptions:
        engine.step()
    engine.export_session(last, tmp_path / "session")
    other = engine_with()
    tokens, restored = other.import_session(tmp_path / "session")
    assert len(tokens) > 20
    whole = engine_with().generate([prompts[2]], SamplingParams(temperature=0, **LONG))[0]
    assert tokens[20:] + rest_of(other, restored) == whole.completions[0].token_ids


def test_a_prefix_is_found_elsewhere(tmp_path):
    rng = random.Random(2)
    prefix = random_prompt(rng, 60)
    engine = engine_with()
    engine.generate([[*prefix, 1]], GREEDY)
    assert engine.export_session([*prefix, 5, 6, 7], tmp_path / "session") == 60
    other = engine_with()
    assert other.import_session(tmp_path / "session") == (prefix, None)
    other.import_session(tmp_path / "session")  # what is there already is left alone
    assert other.stats().snapshots == 1
    output = other.generate([[*prefix, 9, 8]], GREEDY)[0]
    assert output.cached_tokens == 60
    assert output.completions[0].token_ids == greedy([*prefix, 9, 8], 24)
    assert_all_is_accounted_for(other)


def test_a_request_whose_last_token_is_in_flight_is_done(tmp_path):
    engine = engine_with(run_ahead=True)
    name = engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    updates = [update for _ in range(4) for update in engine.step()]
    assert updates[-1].finish_reason is None
    with pytest.raises(InputError, match="is not there, or done: one that isn't finished is wanted"):
        engine.export_session(name, tmp_path / "session")
    assert list(tmp_path.iterdir()) == []
    updates += run(engine)[name]
    assert [token for update in updates for token in update.token_ids] == greedy([1, 2, 3], 4)
    assert updates[-1].finish_reason == "length"


def test_export_refuses_what_it_has_not_got(tmp_path):
    engine = engine_with()
    with pytest.raises(InputError, match="request 'nobody' is not there, or done"):
        engine.export_session("nobody", tmp_path / "session")
    with pytest.raises(InputError, match="no prefix of these tokens"):
        engine.export_session([1, 2, 3, 4, 5], tmp_path / "session")
    with pytest.raises(InputError, match="has no prefix cache"):
        engine_with(prefix_cache=False).export_session([1], tmp_path / "session")
    name = engine.add([1, 2], SamplingParams(n=2))
    with pytest.raises(InputError, match="has 2 samples: a session holds one"):
        engine.export_session(name, tmp_path / "session")
    name = engine.add([1, 2])
    lost = tmp_path / "no folder" / "session"
    with pytest.raises(InputError, match=f"^the session can't be written to {lost}: there is no folder {lost.parent}$"):
        engine.export_session(name, lost)
    with pytest.raises(InputError, match=f"^the session can't be written to {tmp_path}: ") as error:
        engine.export_session(name, tmp_path)
    assert "partial" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="it is a device or a pipe"):
        engine.export_session(name, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.fixture
def session(tmp_path):
    """A good file of a request, 12 tokens behind its prompt."""
    engine, name, _ = partly_served(GREEDY, steps=12, prompt=[7] * 23)
    engine.export_session(name, tmp_path / "session")
    return tmp_path / "session"


def rewritten(path, change) -> None:
    """A file whose header or tensors were changed."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[FORMAT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    metadata = change(header, tensors)
    save_file(tensors, path, {FORMAT: json.dumps(header)} if metadata is None else metadata)


def without_a_tensor(header, tensors):
    del tensors["states.0"]


def with_another_shape(header, tensors):
    tensors["convs.0"] = torch.zeros(2, 2)


def with_another_content(header, tensors):
    tensors["pages.tokens"][0, 0] += 1


def with_other_tokens(header, tensors):
    tensors["tokens"][3] = 9


def with_fewer_tokens(header, tensors):
    tensors["tokens"] = tensors["tokens"][:5]


def of_another_model(header, tensors):
    header["model"] = "0" * 64


def of_another_version(header, tensors):
    header["version"] = 2


def with_impossible_params(header, tensors):
    header["request"]["params"]["temperature"] = -1


def with_unknown_params(header, tensors):
    header["request"]["params"]["warmth"] = 1


def with_nothing_left_to_compute(header, tensors):
    tensors["tokens"] = tensors["tokens"][: header["done"]]


def with_another_seed(header, tensors):
    header["request"]["seed"] += 1


def with_an_impossible_seed(header, tensors):
    header["request"]["seed"] = 2**63


def without_a_header(header, tensors):
    return {"format": "pt"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_tensor, "other tensors than this model: states.0"),
        (with_another_shape, r"convs.0 of \(2, 2\)"),
        (with_another_content, "checksum"),
        (with_other_tokens, "checksum"),
        (with_fewer_tokens, "no list of at least"),
        (of_another_model, "of another model"),
        (of_another_version, "header that can't be used"),
        (with_impossible_params, "header that can't be used: temperature is -1"),
        (with_unknown_params, "header that can't be used"),
        (with_nothing_left_to_compute, "tokens done: one more is wanted"),
        (with_another_seed, "checksum"),
        (with_an_impossible_seed, "header that can't be used"),
        (without_a_header, "is a safetensors file, but no session"),
    ],
)
def test_a_foreign_file_is_refused_and_nothing_changes(session, change, message):
    rewritten(session, change)
    engine = engine_with()
    with pytest.raises(InputError, match=message):
        engine.import_session(session)
    assert_all_is_accounted_for(engine)
    assert engine.stats().evictions == 0


def test_a_file_that_is_cut_off_anywhere_is_refused(session):
    whole = session.read_bytes()
    engine = engine_with()
    for length in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        session.write_bytes(whole[:length])
        with pytest.raises(InputError, match="is cut off or no session file"):
            engine.import_session(session)
    session.write_bytes(b"not safetensors at all, but long enough to be something")
    with pytest.raises(InputError, match="is cut off or no session file"):
        engine.import_session(session)
    session.unlink()
    with pytest.raises(InputError, match="is not there"):
        engine.import_session(session)
    assert_all_is_accounted_for(engine)


def test_a_session_of_other_pages_is_refused(session):
    engine = engine_with(page_size=8)
    with pytest.raises(InputError, match="page_size=4 is wanted"):
        engine.import_session(session)


def test_a_session_that_does_not_fit_is_refused(session):
    engine = engine_with(**memory_for(1, 0, 10))
    with pytest.raises(InputError, match="together at most 40 fit"):
        engine.import_session(session)
    assert_all_is_accounted_for(engine)


def test_a_prefix_without_room_is_refused(tmp_path):
    prefix = random_prompt(random.Random(3), 60)
    engine = engine_with()
    engine.generate([[*prefix, 1]], GREEDY)
    engine.export_session(prefix, tmp_path / "session")
    for room in (memory_for(1, 4, 10), memory_for(1, 0, 40)):
        small = engine_with(**room)
        small.generate([random_prompt(random.Random(4), 9)], GREEDY)
        with pytest.raises(InputError, match="no room for them now|room for one now"):
            small.import_session(tmp_path / "session")
        assert small.stats().evictions == 0
        assert_all_is_accounted_for(small)
