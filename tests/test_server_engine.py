"""The server over the real engine and a bundled model, asked with OpenAI's client; the commands `serve` and `chat`."""

import asyncio
import dataclasses
import io
import json
import re
import socket
from pathlib import Path

import openai
import pytest
import typer

from replayssm import cli
from replayssm.cli.app import app
from replayssm.cli.values import PARAMETERS, with_option_names
from replayssm.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
from replayssm.loading import load_model
from tests import load_server
from tests.serving import MODEL, Running, wait_until

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The list methods make it very easy to "
WORDS = ("string", "module", "the following", "return", "an iterator", "exceptions", "because", "it is not")


@pytest.fixture(scope="module")
def server():
    engine = Engine(load_model(MODEL), EngineOptions(max_rows=32, max_context=1024, memory_bytes=96 << 20))
    with Running(AsyncEngine(engine), engine.loaded, engine.max_context) as running:
        yield running
    assert engine.closed


@pytest.fixture(scope="module")
def client(server):
    return server.client(timeout=60)


def complete(client, prompt=PROMPT, **fields):
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0} | fields)


def test_each_of_32_requests_at_once_gets_what_it_gets_alone(server):
    """Greedy and sampled ones, streamed and whole ones, with prompts that share beginnings, in one batch."""

    def asking(i):
        sampling = {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i, "top_p": 0.9}
        prompt = f"{PROMPT * (i % 3)}{WORDS[i % 8]} {WORDS[i // 8]} "
        return {"model": MODEL, "prompt": prompt, "max_tokens": 4 + i % 5, "stream": i % 4 < 2, **sampling}

    async def ask(client, i):
        answer = await client.completions.create(**asking(i))
        if not asking(i)["stream"]:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all():
        async with server.async_client(timeout=60) as client:
            together = await asyncio.gather(*(ask(client, i) for i in range(32)))
            return together, [await ask(client, i) for i in range(32)]

    together, alone = asyncio.run(ask_all())
    assert together == alone
    assert len(set(alone)) > 16
    assert server.engine.stats().batch == 1
    assert server.engine.stats().cache_hits > 0


def test_a_chat_goes_on_from_its_cached_beginning(client):
    messages = [{"role": "user", "content": "What is a list comprehension, and when is it better than a loop?"}]
    asking = {"model": MODEL, "max_tokens": 20, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **asking)
    messages += [first.choices[0].message, {"role": "user", "content": "And a set?"}]
    second = client.chat.completions.create(messages=messages, **asking)
    assert second.usage.prompt_tokens_details.cached_tokens >= 64
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_stop_string_ends_the_text_wherever_tokens_end(client):
    text = complete(client).choices[0].text
    stop = text[7:11]
    answer = complete(client, stop=[stop, "\x00never"]).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    streamed = complete(client, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.text


def test_samples_of_one_prompt_differ_and_come_again_with_their_seed(client):
    first, second = (complete(client, n=3, temperature=1.0, seed=5) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in second.choices]


SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "kind": {"enum": ["list", "set"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}


def test_an_answer_keeps_to_its_schema(client):
    pytest.importorskip("llguidance")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a list of three"}],
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        max_tokens=200,
        temperature=0,
        logit_bias={str(ord(letter)): -100 for letter in "012456789 \t\r\n"},  # of which it would never have enough
    )
    told = json.loads(answer.choices[0].message.content)
    assert told.keys() == {"size", "kind"}
    assert told["kind"] in ("list", "set")
    assert answer.choices[0].finish_reason == "stop"


def test_a_schema_that_does_not_compile_is_the_requests_fault(client):
    pytest.importorskip("llguidance")
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"response_format": wrong})
    assert caught.value.param == "response_format"


TOO_LARGE = "b((a{900}){900}){900}"
CONSTRAINTS = {
    "regex": {"regex": TOO_LARGE},
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "string", "pattern": f"^{TOO_LARGE}$"}},
        }
    },
}


@pytest.mark.parametrize(("param", "stream"), [("regex", False), ("response_format", True)])
def test_a_constraint_that_turns_out_too_large_is_the_requests_fault_and_not_asked_again(server, client, stream, param):
    pytest.importorskip("llguidance")
    asked = server.engine.stats().prompt_tokens
    with pytest.raises(openai.APIError, match="can't go on: lexer error: too many expressions") as caught:
        list(complete(client.with_options(max_retries=3), prompt="b", stream=stream, extra_body=CONSTRAINTS[param]))
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert isinstance(caught.value, openai.BadRequestError) or stream
    assert server.engine.stats().prompt_tokens == asked + 1


@pytest.mark.parametrize("token", [-1, 300, 2**40])
def test_a_token_id_that_is_none_of_the_models_is_named_with_the_prompt(client, token):
    with pytest.raises(openai.BadRequestError, match=f"token id {token}: the model's are from 0 to") as caught:
        complete(client, prompt=[1, token])
    assert caught.value.param == "prompt"


def test_logprobs_are_those_of_the_text(client):
    got = complete(client, logprobs=3, max_tokens=8)
    told = got.choices[0].logprobs
    assert "".join(told.tokens) == got.choices[0].text
    assert all(top[token] == max(top.values()) for token, top in zip(told.tokens, told.top_logprobs, strict=True))
    assert told.token_logprobs == [top[token] for token, top in zip(told.tokens, told.top_logprobs, strict=True)]


def test_a_bias_keeps_a_token_out(client):
    text = complete(client).choices[0].text
    without = complete(client, logit_bias={str(ord(text[0])): -100}).choices[0].text
    assert text[0] not in without


def test_a_client_that_leaves_frees_its_row_and_slot(server, client):
    engine = server.engine.engine
    with complete(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        assert engine.requests
    wait_until(lambda: not engine.requests)
    stats = server.engine.stats()
    assert stats.running == stats.queued == 0
    assert stats.slots_total - stats.slots_free == stats.snapshots


def test_metrics_are_the_engines(server, client):
    complete(client, max_tokens=40, extra_body={"ignore_eos": True})
    text = server.service.metrics.text().decode()
    told = {name: float(value) for name, value in re.findall(r"^(replayssm_\w+) (\S+)$", text, re.MULTILINE)}
    stats = server.engine.stats()
    assert told["replayssm_generated_tokens_total"] == stats.generated_tokens >= 40
    assert told["replayssm_flushes_total"] > 0
    assert told["replayssm_state_bytes_saved_total"] > 5 * told["replayssm_state_bytes_written_total"]


def test_the_documents_example_works(server, monkeypatch, capsys):
    text = (ROOT / "docs" / "server.md").read_text()
    (example,) = re.findall(
        r"^((?: {4}.*\n|\n)*? {4}client = openai\.OpenAI\(.*\n(?: {4}.*\n|\n)*)", text, re.MULTILINE
    )
    assert "http://127.0.0.1:8000/v1" in example
    code = "\n".join(line.removeprefix("    ") for line in example.splitlines())
    exec(compile(code.replace("http://127.0.0.1:8000/v1", f"{server.url}/v1"), "docs/server.md", "exec"), {})
    assert capsys.readouterr().out.strip()


# --- the commands


@pytest.fixture
def replayssm(capfd):
    def run(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([str(arg) for arg in args])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def nothing_loads(monkeypatch):
    """A model that loads is a failure."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("replayssm.loading.load_model", load)


def test_serve_says_what_to_install_before_a_model_loads(replayssm, nothing_loads, monkeypatch):
    monkeypatch.setattr("replayssm.cli.serve.find_spec", lambda name: None if name == "uvicorn" else object())
    code, _, err = replayssm("serve")
    assert code == 2
    assert err == (
        "replayssm: error: serve needs uvicorn, not installed here: pip install 'replayssm[serve]' brings all of it\n"
    )


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--port", "70000"), "port is 70000"),
        (("--port", "x"), "'x' was given, a whole number is wanted"),
        (("--max-body", "much"), "'much' was given, bytes are wanted"),
        (("--max-body", "0"), "max-body is 0"),
        (("--log-format", "xml"), "log-format is 'xml'"),
        (("--api-key", "two words"), "api-key"),
        (("--host", "203.0.113.9", "--port", "0"), "cannot listen on 203.0.113.9:0"),
        (("--host", "no such host"), "cannot listen on"),
        (("--speculate", "magic"), "speculate is 'magic'"),
        (("--ring-len", "0"), "ring-len is 0"),
        (("--max-context", "1"), "max-context is 1"),
        (("--memory", "0"), "memory is 0"),
        (("--max-rows", "0"), "max-rows is 0"),
        (("--max-rows", "99", "--max-step-tokens", "100"), "max-step-tokens is 100: it must be at least 115 for max-r"),
        (("--speculate", "ngram", "--no-replay"), "speculate and no-replay were both given"),
        (("--dtype", "int4"), "dtype is 'int4'"),
        (("--model", "no-such-folder"), "model 'no-such-folder'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_serve_refuses_what_it_cannot_do_before_a_model_loads(replayssm, nothing_loads, args, told):
    code, out, err = replayssm("serve", *args)
    assert (code, out) == (2, "")
    assert err.startswith("replayssm: error: ")
    assert told in err
    assert err.count("\n") == 1


def test_a_taken_port_is_told_before_a_model_loads(replayssm, nothing_loads):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = replayssm("serve", "--port", taken.getsockname()[1])
    assert code == 2
    assert "cannot listen on 127.0.0.1:" in err


def test_an_empty_key_in_the_environment_does_not_leave_the_door_open(replayssm, nothing_loads, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_API_KEY", "")
    code, _, err = replayssm("serve")
    assert code == 2
    assert "REPLAYSSM_API_KEY is empty" in err


@pytest.mark.parametrize(
    ("text", "size"), [("4MiB", 4 << 20), ("1.5G", 3 << 29), ("512", 512), ("2 kb", 2048), ("1B", 1)]
)
def test_sizes_are_read(text, size):
    from replayssm.cli.values import SIZE

    assert SIZE["parser"](text) == size


def test_messages_of_the_engine_name_its_parameters_as_options():
    of_engine = {field.name for kind in (EngineOptions, SamplingParams) for field in dataclasses.fields(kind)}
    commands = typer.main.get_command(app).commands
    shared = {param.name for name in ("serve", "chat") for param in commands[name].params} & of_engine
    assert {name for name in shared if "_" in name} <= PARAMETERS.keys()
    for message, told in (
        ("max_context is 1, top_k = 2", "max-context is 1, top-k = 2"),
        (
            "the prompt has 9 tokens and max_tokens is 1: 'a', it can't",
            "the prompt has 9 tokens and max-tokens is 1: 'a', it can't",
        ),
        ("min_tokens is 3: max_tokens allows 2", "min_tokens is 3: max-tokens allows 2"),
        ("speculate and replay=False were both given", "speculate and no-replay were both given"),
        ("speculate and batch_invariant were both given", "speculate and batch-invariant were both given"),
    ):
        assert with_option_names(message) == told


@pytest.mark.parametrize(
    "message",
    [
        "/models/max_rows has no num_draft.json",
        "max_rows has no config.json: a transformers model folder needs one",
        "my max_rows folder has no config.json",
        "model 'a max_rows is b' is neither a folder nor a bundled model",
    ],
)
def test_what_a_user_named_like_a_parameter_keeps_its_name(message):
    assert with_option_names(message) == message
    assert with_option_names(f"the engine can't begin: max_rows is 'x y' beside {message}").endswith(message)


def test_chat_answers_each_line_of_its_input(replayssm, monkeypatch):
    lines = "hello\n\n/new\nhello\nand then?\n/help\n/exit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, out, err = replayssm("chat", "--max-tokens", "12", "--temperature", "0", "--system", "be brief")
    assert code == 0, err
    told = re.findall(r"(\d+) tokens in .*, (\d+) of (\d+) prompt tokens", err)
    assert len(told) == 3
    (_, _, first), (_, cached, again), (_, more, longer) = told
    assert first == again
    assert int(longer) > int(again)
    assert int(cached) > 0 or int(more) > 0
    assert "/new begins a new chat" in err
    assert out.strip()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--max-tokens", "0"), "max-tokens is 0"),
        (("--top-p", "3"), "top-p is 3"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--model", "no-such-folder"), "model 'no-such-folder'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_chat_refuses_what_it_cannot_do_before_a_model_loads(replayssm, nothing_loads, args, told):
    code, _, err = replayssm("chat", *args)
    assert code == 2
    assert told in err


@pytest.mark.slow
def test_a_small_load_leaves_everything_in_order(capfd):
    code = load_server.main(["--clients", "8", "--seconds", "1.5", "--prompts", "2", "--memory", "96MiB"])
    assert code == 0, capfd.readouterr().out
