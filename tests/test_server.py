"""The server's answers, asked for with OpenAI's own client, over an engine whose tokens depend on the prompt alone."""

import asyncio
import json
import re
import urllib.error
import urllib.request

import pytest

from replayssm.engine.params import SamplingParams
from replayssm.server import logs
from replayssm.server.bodies import ChatBody, CompletionBody
from replayssm.server.tokens import TokenTexts
from tests.serving import MODEL, FakeEngine, Running, fake_text, fake_tokens, kept_log, tokenizer, wait_until

HELLO = [{"role": "user", "content": "hello"}]
HELLO_TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server():
    with Running() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def asked(server) -> SamplingParams:
    """The parameters that the engine had for the last request."""
    return server.engine.requests[-1].params


# --- completions


def test_a_completion_is_the_engines_text_with_its_usage(client):
    answer = client.completions.create(model=MODEL, prompt="def f(x):", max_tokens=12)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, fake_text("def f(x):", 12), "length")
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 12, 21)
    assert usage.prompt_tokens_details.cached_tokens == 8


def test_a_streamed_completion_is_the_same_text(client):
    chunks = list(client.completions.create(model=MODEL, prompt="def f(x):", max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == fake_text("def f(x):", 12)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(client):
    options = {"include_usage": True}
    *chunks, last = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=4, stream=True, stream_options=options
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (3, 4, 7)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_samples_are_numbered_prompt_by_prompt(client, stream):
    asking = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 5}
    if stream:
        texts = ["", "", "", ""]
        for chunk in client.completions.create(**asking, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = client.completions.create(**asking)
        assert answer.usage.completion_tokens == 20
        texts = [choice.text for choice in answer.choices]
    assert texts == [fake_text(prompt, 5, index=i) for prompt in ("one", "two") for i in (0, 1)]


def test_prompts_may_be_token_ids(client):
    ids = [100, 101, 32]
    assert client.completions.create(model=MODEL, prompt=ids, max_tokens=5).choices[0].text == fake_text(ids, 5)
    answer = client.completions.create(model=MODEL, prompt=[ids, [7]], max_tokens=5)
    assert [choice.text for choice in answer.choices] == [fake_text(ids, 5), fake_text([7], 5)]


@pytest.mark.parametrize("prompt", ["hey ", [104, 101, 121]], ids=["text", "tokens"])
def test_echo_puts_the_prompt_in_front(client, prompt):
    told = prompt if isinstance(prompt, str) else "hey"
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, echo=True)
    assert answer.choices[0].text == told + fake_text(prompt, 4)
    chunks = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == told + fake_text(prompt, 4)


def test_a_completion_that_names_no_length_gets_sixteen_tokens(server, client):
    assert client.completions.create(model=MODEL, prompt="a").usage.completion_tokens == 16
    assert asked(server) == SamplingParams(max_tokens=16)


def test_a_stop_ends_the_text(server, client):
    text = fake_text("stop here", 64)
    stop = text[20]
    answer = client.completions.create(model=MODEL, prompt="stop here", max_tokens=64, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]
    assert asked(server).stop == (stop,)


# --- chat


def test_a_chat_goes_through_the_models_template(server, client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=9)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", fake_text(HELLO_TEXT, 9))
    assert choice.finish_reason == "length"
    assert tokenizer().decode(server.engine.requests[-1].prompt) == HELLO_TEXT


def test_a_streamed_chat_begins_with_the_role_of_each_choice(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, n=2, stream=True))
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    opening = [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in chunks[:2]]
    assert opening == [(0, "assistant"), (1, "assistant")]
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == fake_text(HELLO_TEXT, 6, index=index)
        assert [choice.finish_reason for choice in own] == [None] * 6 + ["length"]


def test_a_chat_that_names_no_length_may_go_on_to_the_servers_default_or_the_context(server, client):
    client.chat.completions.create(model=MODEL, messages=HELLO)
    assert asked(server).max_tokens == 1024
    long = [{"role": "user", "content": "x" * 8000}]
    used = client.chat.completions.create(model=MODEL, messages=long).usage
    assert used.total_tokens == 8192


def test_parts_of_text_are_put_together_and_developers_speak_as_system(server, client):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    told = tokenizer().decode(server.engine.requests[-1].prompt)
    assert told == "<|im_start|>system\nbe brief<|im_end|>\n" + HELLO_TEXT


def test_an_answer_can_be_sent_back_as_it_came(server, client):
    message = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3).choices[0].message
    again = [*HELLO, message.model_dump(), {"role": "user", "content": "go on"}]
    client.chat.completions.create(model=MODEL, messages=again, max_tokens=1)
    told = tokenizer().decode(server.engine.requests[-1].prompt)
    assert told.startswith(HELLO_TEXT + message.content + "<|im_end|>\n<|im_start|>user\ngo on")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ mood }}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.a }}>{% endfor %};{% endfor %}"
)


@pytest.fixture
def tool_template(server, monkeypatch):
    monkeypatch.setattr(server.service.reader._tokenizer, "chat_template", TOOL_TEMPLATE)


def test_tools_and_their_calls_reach_the_template(server, client, tool_template):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    asking = {"model": MODEL, "messages": messages, "max_tokens": 1, "tools": [TOOL]}
    client.chat.completions.create(**asking)
    told = tokenizer().decode(server.engine.requests[-1].prompt)
    assert told == "[add]user:2+2;assistant:<add 2>;tool:4;"
    client.chat.completions.create(**asking, tool_choice="none")
    assert tokenizer().decode(server.engine.requests[-1].prompt).startswith("user:2+2")


def test_a_chat_template_takes_variables_but_is_not_replaced(server, client, tool_template):
    from openai import BadRequestError

    extra = {"chat_template_kwargs": {"mood": "calm "}}
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, extra_body=extra)
    assert tokenizer().decode(server.engine.requests[-1].prompt) == "calm user:hello;"
    for taken in ("chat_template", "messages", "tokenize"):
        with pytest.raises(BadRequestError, match=taken):
            client.chat.completions.create(
                model=MODEL, messages=HELLO, extra_body={"chat_template_kwargs": {taken: "x"}}
            )


# --- parameters


def test_every_sampling_parameter_reaches_the_engine(server, client):
    client.completions.create(
        model=MODEL, prompt="p", max_tokens=7, n=1, temperature=0.5, top_p=0.9, seed=-3, stop=["\x00", "\x01"],
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"65": -10, "66": 4.5}, logprobs=2,
        extra_body={
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9],
            "ignore_eos": True, "include_stop": True, "skip_special_tokens": False,
        },
        user="someone",
    )  # fmt: skip
    assert asked(server) == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, seed=-3, stop=("\x00", "\x01"), presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={65: -10.0, 66: 4.5}, logprobs=2, top_k=5, min_p=0.1,
        repetition_penalty=1.1, min_tokens=2, stop_token_ids=(9,), ignore_eos=True, include_stop=True,
        skip_special_tokens=False,
    )  # fmt: skip


def test_the_bodies_have_every_sampling_parameter():
    beside = {"max_tokens", "logprobs", "json_schema"}  # max_tokens is checked, the others have forms of their own
    for name in SamplingParams.__dataclass_fields__.keys() - beside:
        assert name in CompletionBody.model_fields, name
        assert name in ChatBody.model_fields, name


def test_null_is_as_good_as_nothing(server, client):
    client.completions.create(model=MODEL, prompt="p", temperature=None, stop=None, logit_bias=None, n=None, seed=None)
    assert asked(server) == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}}},
            {"type": "integer"},
        ),
    ],
    ids=["text", "json_object", "json_schema"],
)
def test_a_response_format_becomes_a_schema(server, client, response_format, schema):
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, response_format=response_format)
    given = asked(server).json_schema
    assert (given and json.loads(given)) == schema


# --- logprobs


def test_completion_logprobs_are_lists_side_by_side(client):
    answer = client.completions.create(model=MODEL, prompt="lp", max_tokens=4, logprobs=2)
    text, got = fake_text("lp", 4), answer.choices[0].logprobs
    assert got.tokens == list(text)
    assert got.token_logprobs == [-0.5] * 4
    assert got.text_offset == [0, 1, 2, 3]
    for token, top in zip(text, got.top_logprobs, strict=True):
        assert top == {token: -0.5, chr(32 + (ord(token) - 31) % 95): -1.5}


def test_streamed_completion_logprobs_are_the_same(client):
    asking = {"model": MODEL, "prompt": "lp", "max_tokens": 4, "logprobs": 1}
    whole = client.completions.create(**asking).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**asking, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces for value in getattr(piece, name)] == getattr(whole, name)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_are_an_object_a_token(client, stream):
    asking = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = client.chat.completions.create(**asking, stream=True)
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        content = [entry for part in parts if part for entry in part.content]
    else:
        content = client.chat.completions.create(**asking).choices[0].logprobs.content
    text = fake_text(HELLO_TEXT, 3)
    assert [(entry.token, entry.bytes, entry.logprob) for entry in content] == [(c, [ord(c)], -0.5) for c in text]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-0.5, -1.5]] * 3


def test_tokens_that_are_parts_of_characters_keep_their_bytes():
    texts = TokenTexts(tokenizer())
    first, second = tokenizer()("é")["input_ids"]
    assert texts[first] == ("bytes:\\xc3", [0xC3])
    assert texts[second] == ("bytes:\\xa9", [0xA9])
    assert texts[ord("\n")] == ("\n", [10])
    special = tokenizer().convert_ids_to_tokens(258)
    assert texts[258] == (special, list(special.encode()))


def test_tokens_of_other_vocabularies_are_read_too():
    class Pieces:
        all_special_ids = (3,)
        pieces = ("▁the", "<0x0A>", "ing", "</s>")

        def convert_ids_to_tokens(self, token):
            return self.pieces[token] if token < 4 else None

        def decode(self, tokens):
            return self.pieces[tokens[0]].strip("▁")

    texts = TokenTexts(Pieces())
    assert [texts[i][0] for i in range(5)] == [" the", "\n", "ing", "</s>", "<4>"]


# --- all at once, and what the server tells of itself


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_32_requests_at_once_gets_what_it_gets_alone(stream):
    async def ask(client, i):
        asking = {"model": MODEL, "prompt": f"number {i}", "max_tokens": 24}
        if not stream:
            return (await client.completions.create(**asking)).choices[0].text
        chunks = await client.completions.create(**asking, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def ask_all(running):
        async with running.async_client() as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    with Running(FakeEngine(seconds=0.001)) as running:
        assert asyncio.run(ask_all(running)) == [fake_text(f"number {i}", 24) for i in range(32)]
        wait_until(lambda: running.service.gate.inside == 0)
        assert not running.engine.running


def test_the_one_model_is_listed_and_found(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == (MODEL, "model", "replayssm", 8192)
    assert client.models.retrieve(MODEL) == model


def test_a_model_can_have_another_name():
    with Running(served_name="org/other") as running:
        client = running.client()
        assert client.models.retrieve("org/other").id == "org/other"
        assert client.completions.create(model="org/other", prompt="a", max_tokens=1).model == "org/other"


def get(server, path):
    with urllib.request.urlopen(server.url + path) as answer:
        return answer.read().decode()


def metric(text: str, name: str) -> float:
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_health_is_ok(server):
    assert json.loads(get(server, "/health")) == {"status": "ok"}


def test_metrics_count_tokens_requests_and_times():
    with Running() as running:
        client = running.client()
        client.completions.create(model=MODEL, prompt="abcd", max_tokens=5, n=2)
        list(client.completions.create(model=MODEL, prompt="ab", max_tokens=3, stream=True))
        with pytest.raises(Exception, match="no model"):
            client.completions.create(model="other", prompt="abcd")
        wait_until(lambda: 'status="404"' in get(running, "/metrics"))
        text = get(running, "/metrics")
    assert metric(text, "replayssm_prompt_tokens_total") == 6
    assert metric(text, "replayssm_generated_tokens_total") == 13
    assert metric(text, "replayssm_finished_requests_total") == 2
    assert metric(text, 'replayssm_http_requests_total{path="/v1/completions",status="200"}') == 2
    assert metric(text, 'replayssm_http_requests_total{path="/v1/completions",status="404"}') == 1
    assert metric(text, "replayssm_request_seconds_count") == 2
    assert metric(text, "replayssm_time_to_first_token_seconds_count") == 2
    assert metric(text, "replayssm_time_per_output_token_seconds_count") == 2
    assert metric(text, "replayssm_samples_in_flight") == 0


def test_metrics_tell_what_replay_and_speculation_were_worth(server):
    text = get(server, "/metrics")
    told = {
        "replayssm_batch_size": 3,
        "replayssm_requests_queued": 0,
        "replayssm_prefix_cache_tokens_total": 160,
        "replayssm_prefix_cache_hits_total": 10,
        "replayssm_flushes_total": 5 + 2,
        "replayssm_state_bytes_saved_total": 16000 - 1000,
        "replayssm_acceptance_length": (20 + 10) / 10,
    }
    assert {name: metric(text, name) for name in told} == told


def test_a_path_that_a_client_invents_gets_no_label_of_its_own():
    with Running() as running:
        for path in ("/one", "/two"):
            with pytest.raises(urllib.error.HTTPError):
                get(running, path)
        text = get(running, "/metrics")
    assert metric(text, 'replayssm_http_requests_total{path="other",status="404"}') == 2
    assert "/one" not in text


# --- the log


@pytest.fixture
def lines():
    """What the server logs as JSON."""
    with kept_log(logs.JsonLines()) as kept:
        yield kept


def test_a_request_is_one_json_line_without_its_texts(server, client, lines):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "secret words"}], max_tokens=5
    )
    wait_until(lambda: lines)
    (text,) = lines
    line = json.loads(text)
    assert line["event"] == "request"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (31, 5, 16)
    assert (line["stream"], line["finish_reasons"], line["client"]) == (False, ["length"], "127.0.0.1")
    assert 0 <= line["ttft_seconds"] <= line["seconds"]
    assert answer.id.endswith(line["id"])
    assert "secret" not in text
    assert json.dumps(fake_text(server.engine.requests[-1].prompt, 5))[1:-1] not in text


def test_a_refused_request_is_logged_without_what_it_held(client, lines):
    with pytest.raises(Exception, match="secret"):
        client.completions.create(model=MODEL, prompt="a", extra_body={"a secret": 1})
    with pytest.raises(Exception, match="temperature"):
        client.completions.create(model=MODEL, prompt="secret", temperature=-1)
    wait_until(lambda: len(lines) == 2)
    assert [json.loads(line)["status"] for line in lines] == [400, 400]
    assert not any("secret" in line for line in lines)
    assert json.loads(lines[1])["param"] == "temperature"


def test_an_event_is_a_name_and_its_words_are_the_message(lines):
    with Running(drain_seconds=7):
        pass
    told = {line["event"]: line for line in map(json.loads, lines)}
    assert told["stopping"]["message"] == "stopping: requests have 7 s to finish"
    assert told["stopping"]["drain_seconds"] == 7


def test_watching_the_server_does_not_fill_its_log(server, lines):
    get(server, "/health")
    get(server, "/metrics")
    get(server, "/v1/models")
    wait_until(lambda: lines)
    assert [json.loads(line)["path"] for line in lines] == ["/v1/models"]


def test_a_path_cannot_begin_a_line_of_its_own(server):
    with kept_log(logs.TextLines()) as records:
        with pytest.raises(urllib.error.HTTPError):
            get(server, "/nothing%0Ahere")
        wait_until(lambda: records)
    assert "404 GET /nothing\\nhere" in records[0]
    assert "\n" not in records[0]


def test_the_fake_engines_tokens_depend_on_the_prompt_alone():
    assert fake_tokens([1, 2], 4) == fake_tokens([1, 2], 8)[:4] != fake_tokens([2, 1], 4)
