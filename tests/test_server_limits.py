"""What the server refuses: with which status, in OpenAI's form of errors, and before it costs anything."""

import asyncio
import http.client
import json
import socket
import time

import pytest

from replayssm.errors import InputError
from replayssm.server.limits import Guard
from replayssm.server.options import ServerOptions
from replayssm.server.run import Server, bind
from replayssm.server.service import make_service
from tests.serving import MODEL, FakeEngine, Running, fake_text, loaded_tokenizer, wait_until

KEY = "sk-one-two-three"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server():
    with Running(max_tokens=4096, max_body_bytes=100_000, body_seconds=0.3) as running:
        yield running


def ask(server, body, path="/v1/completions", method="POST", headers=JSON):
    """Status, headers and the error of an answer to a raw body."""
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    told = json.loads(answer.read() or b"{}")
    connection.close()
    return answer.status, answer.headers, told.get("error", {})


def chat(**fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields


def completion(**fields):
    return {"model": MODEL, "prompt": "hi", "max_tokens": 2} | fields


def test_an_error_has_openais_form(server):
    status, headers, error = ask(server, completion(temperature=-1))
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert len(headers["x-request-id"]) == 32
    assert error == {
        "message": "temperature is -1.0: it must be from 0 to 10000",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": None,
    }


def test_the_client_raises_its_own_errors(server):
    import openai

    client = server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="hi", top_p=7)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


# --- bodies

MALFORMED = {
    "empty": b"",
    "cut": b'{"model": "m", "prompt": ',
    "text": b"model=m&prompt=p",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800"}',
    "an array": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "deep": b"[" * 50_000,
    "deep object": b'{"prompt":' * 9_000,
    "NaN": b'{"model": "m", "prompt": "p", "temperature": NaN}',
    "huge number": b'{"model": "m", "prompt": "p", "n": ' + b"9" * 5000 + b"}",
    "zeros": bytes(100),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_malformed_body_is_refused(server, path, body):
    status, _, error = ask(server, body, path)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"]
    assert len(error["message"]) < 500


IMPOSSIBLE = {
    "model missing": ({"prompt": "a"}, "model"),
    "prompt missing": ({"model": MODEL}, "prompt"),
    "prompt null": (completion(prompt=None), "prompt"),
    "prompt empty": (completion(prompt=""), "prompt"),
    "one prompt empty": (completion(prompt=["a", ""]), "prompt"),
    "no prompts": (completion(prompt=[]), "prompt"),
    "no tokens": (completion(prompt=[[]]), "prompt"),
    "echo of a token below all": (completion(prompt=[-1], echo=True), "prompt"),
    "echo of a token above all": (completion(prompt=[2**40], echo=True), "prompt"),
    "prompt of numbers": (completion(prompt=[1.5]), "prompt"),
    "prompt of truths": (completion(prompt=[True, False]), "prompt"),
    "prompt mixed": (completion(prompt=["a", 1]), "prompt"),
    "prompt an object": (completion(prompt={"a": 1}), "prompt"),
    "unknown field": (completion(tempature=0.5), "tempature"),
    "text for a number": (completion(temperature="0.5"), "temperature"),
    "truth for a number": (completion(n=True), "n"),
    "fraction of a token": (completion(max_tokens=1.5), "max_tokens"),
    "no tokens wanted": (completion(max_tokens=0), "max_tokens"),
    "fewer than none": (completion(max_tokens=-1), "max_tokens"),
    "over the server's limit": (completion(max_tokens=4097), "max_tokens"),
    "n zero": (completion(n=0), "n"),
    "top_p zero": (completion(top_p=0), "top_p"),
    "top_p above one": (completion(top_p=1.01), "top_p"),
    "top_k below zero": (completion(top_k=-2), "top_k"),
    "too hot": (completion(temperature=1e9), "temperature"),
    "penalty": (completion(presence_penalty=2.5), "presence_penalty"),
    "repetition penalty zero": (completion(repetition_penalty=0), "repetition_penalty"),
    "seed beyond 64 bits": (completion(seed=2**70), "seed"),
    "stop empty": (completion(stop=""), "stop"),
    "stop of numbers": (completion(stop=[1]), "stop"),
    "too many stops": (completion(stop=["a"] * 65), "stop"),
    "bias of a word": (completion(logit_bias={"hello": 1}), "logit_bias.hello"),
    "bias out of range": (completion(logit_bias={"1": 101}), "logit_bias"),
    "bias beyond the vocabulary": (completion(logit_bias={"99999": 1}), "logit_bias"),
    "logprobs": (completion(logprobs=21), "logprobs"),
    "echoed logprobs": (completion(logprobs=1, echo=True), "echo"),
    "best of more": (completion(best_of=3), "best_of"),
    "suffix": (completion(suffix="end"), "suffix"),
    "stream options alone": (completion(stream_options={"include_usage": True}), "stream_options"),
    "stream a word": (completion(stream="yes"), "stream"),
    "format unknown": (completion(response_format={"type": "xml"}), "response_format.type"),
    "schema missing": (completion(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
    "schema and regex": (completion(response_format={"type": "json_object"}, regex="a"), "response_format"),
    "messages missing": ({"model": MODEL}, "messages"),
    "no messages": (chat(messages=[]), "messages"),
    "messages of words": (chat(messages=["hi"]), "messages[0]"),
    "unknown role": (chat(messages=[{"role": "wizard", "content": "hi"}]), "messages[0].role"),
    "image": (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
    "content a number": (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    "two lengths": (chat(max_tokens=1, max_completion_tokens=2), "max_tokens"),
    "too long": (chat(max_completion_tokens=5000), "max_tokens"),
    "top logprobs alone": (chat(top_logprobs=2), "top_logprobs"),
    "too many top logprobs": (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "nothing asked": (chat(messages=[{"role": "user"}]), "messages[0].content"),
    "null asked": (chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    "logprobs a number": (chat(logprobs=2), "logprobs"),
    "tool of no name": (chat(tools=[{"type": "function", "function": {}}]), "tools[0]"),
    "tool required": (chat(tool_choice="required"), "tool_choice"),
    "tool chosen": (chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
    "audio": (chat(modalities=["audio"]), "modalities[0]"),
    "prompt in a chat": (chat(prompt="a"), "prompt"),
}


@pytest.mark.parametrize(("body", "param"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_request_is_refused_by_the_name_of_its_field(server, body, param):
    before = len(server.engine.requests)
    is_chat = "messages" in body or param == "messages"
    status, _, error = ask(server, body, "/v1/chat/completions" if is_chat else "/v1/completions")
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert error["message"]
    assert len(server.engine.requests) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_stream_is_an_error_not_a_stream(server, stream):
    status, headers, error = ask(server, completion(logit_bias={"99999": 1}, stream=stream))
    assert (status, headers["content-type"]) == (400, "application/json")
    assert "vocab" in error["message"] or "token id" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion(prompt="x" * 9000)),
        ("/v1/completions", completion(prompt=["fits", [7] * 8192])),
        ("/v1/completions", completion(prompt="x" * 8000, max_tokens=300)),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "x" * 8192}])),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "x" * 8000}], max_tokens=300)),
    ],
    ids=["prompt", "one of two", "prompt and answer", "chat", "chat and answer"],
)
def test_what_does_not_fit_the_context_is_refused_with_its_count(server, path, body):
    status, _, error = ask(server, body, path)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "8192" in error["message"]
    assert not server.engine.running


def test_a_model_without_a_template_does_not_chat(server, monkeypatch):
    monkeypatch.setattr(server.service.reader._tokenizer, "chat_template", None)
    status, _, error = ask(server, chat(), "/v1/chat/completions")
    assert (status, error["param"]) == (400, "model")
    assert "chat template" in error["message"]


def test_a_template_that_fails_is_the_requests_fault(server, monkeypatch):
    monkeypatch.setattr(
        server.service.reader._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}"
    )
    status, _, error = ask(server, chat(), "/v1/chat/completions")
    assert (status, error["param"]) == (400, "messages")
    assert "roles must alternate" in error["message"]


def test_half_a_character_that_a_template_writes_is_the_requests_fault(server, monkeypatch):
    template = "{{ messages[1].tool_calls[0].function.arguments.a }}"
    monkeypatch.setattr(server.service.reader._tokenizer, "chat_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    status, _, error = ask(server, chat(messages=messages), "/v1/chat/completions")
    assert (status, error["param"]) == (400, "messages")
    assert "can't be tokenized" in error["message"]


# --- size, time, type and place


@pytest.mark.parametrize("size", [100_001, 3_000_000])
def test_an_oversized_body_is_refused_though_it_is_sent_whole(server, size):
    body = completion(prompt="x" * size)
    status, headers, error = ask(server, body)
    assert (status, error["code"], headers["connection"]) == (413, "body_too_large", "close")
    assert "100000" in error["message"]


def test_an_oversized_body_of_unknown_length_is_refused(server):
    def pieces():
        for _ in range(40):
            yield b"x" * 5000

    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.request("POST", "/v1/completions", pieces(), JSON, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_at_the_limit_is_read(server):
    body = json.dumps(completion(prompt="hi", user="")).encode()
    full = body.replace(b'"user": ""', b'"user": "' + b"x" * (100_000 - len(body)) + b'"')
    assert len(full) == 100_000
    assert ask(server, full)[0] == 200


def test_a_body_that_never_comes_is_not_waited_for(server):
    with socket.create_connection(server.address, timeout=10) as client:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
        )
        start = time.monotonic()
        client.sendall(head.encode())
        answer = client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert 0.25 < time.monotonic() - start < 8


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_only_json_is_taken_so_that_no_web_page_can_ask(server, kind):
    status, _, error = ask(server, completion(), headers={"content-type": kind} if kind else {})
    assert (status, error["code"]) == (415, "unsupported_media_type")


def test_a_content_type_may_name_its_charset(server):
    assert ask(server, completion(), headers={"content-type": "application/json; charset=utf-8"})[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
    ],
)
def test_what_is_not_there_is_an_error_of_the_same_form(server, method, path, wanted):
    status, _, error = ask(server, {}, path, method)
    assert (status, error["type"]) == (wanted, "invalid_request_error")
    assert path in error["message"]


# --- keys


@pytest.fixture(scope="module")
def locked():
    with Running(api_keys=(KEY, "sk-other")) as running:
        yield running


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xff\xfe"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics", "/nothing"])
def test_a_wrong_key_opens_nothing(locked, path, value):
    headers = JSON if value is None else JSON | {"authorization": value.encode("latin-1")}
    method = "POST" if path == "/v1/completions" else "GET"
    status, told, error = ask(locked, completion(), path, method, headers)
    assert (status, error["code"], told["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert not locked.engine.requests


@pytest.mark.parametrize("key", [KEY, "sk-other"])
def test_each_of_the_keys_opens(locked, key):
    import openai

    assert locked.client(api_key=key).completions.create(model=MODEL, prompt="a", max_tokens=3).choices[0].text
    with pytest.raises(openai.AuthenticationError):
        locked.client().models.list()
    locked.engine.requests.clear()


def test_a_wrong_key_is_told_before_a_body_is_judged(locked):
    assert ask(locked, b"not json")[0] == 401


def test_health_needs_no_key(locked):
    connection = http.client.HTTPConnection(*locked.address)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_keys_are_compared_as_digests_and_all_of_them(monkeypatch):
    """Neither a key's length nor a good beginning, nor which key was near, shows in the time it takes."""
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    guard = Guard(None, ServerOptions(api_keys=("a", "bcd", "long" * 9)), asyncio.Event())
    guard._check_key({"authorization": "Bearer a"})
    assert len(compared) == 3
    assert {len(side) for pair in compared for side in pair} == {32}


# --- how many at once


def test_more_than_the_server_has_room_for_is_turned_away_for_now():
    import openai

    with Running(max_requests=3) as running:
        running.engine.hold = True
        client = running.client()
        stream = client.completions.create(model=MODEL, prompt="a", max_tokens=2, n=2, stream=True)
        wait_until(lambda: running.service.gate.inside == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="b", n=2)
        assert caught.value.code == "server_busy"
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="4 samples"):
            client.completions.create(model=MODEL, prompt="b", n=4)
        running.engine.hold = False
        assert len(list(stream)) == 4
        wait_until(lambda: running.service.gate.inside == 0)
        assert client.completions.create(model=MODEL, prompt="b", n=3, max_tokens=1).choices


@pytest.mark.parametrize("n", [513, 10**9])
def test_more_samples_than_there_is_room_for_cost_nothing(server, n):
    before = len(server.engine.requests)
    status, _, error = ask(server, completion(n=n))
    assert status == 400
    assert f"{n} samples" in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "n")
    assert len(server.engine.requests) == before


def test_more_prompts_than_there_is_room_for_are_named():
    with Running(max_requests=2) as running:
        status, _, error = ask(running, completion(prompt=["a", "b", "c"]))
    assert (status, error["param"]) == (400, "prompt")


def test_an_empty_chat_is_told_in_words(server):
    _, _, error = ask(server, chat(messages=[]), "/v1/chat/completions")
    assert (error["message"], error["param"]) == ("messages is empty: at least one is wanted", "messages")


def test_a_server_with_a_small_limit_gives_less_to_who_does_not_say():
    with Running(max_tokens=5) as running:
        client = running.client()
        assert client.completions.create(model=MODEL, prompt="a").usage.completion_tokens == 5
        messages = [{"role": "user", "content": "hi"}]
        assert client.chat.completions.create(model=MODEL, messages=messages).usage.completion_tokens == 5


def test_a_full_queue_of_the_engine_is_the_same_answer():
    with Running(FakeEngine(max_queue=0)) as running:
        status, _, error = ask(running, completion())
        assert (status, error["code"], error["type"]) == (429, "server_busy", "rate_limit_error")


def test_when_one_of_several_prompts_is_refused_none_runs():
    with Running(FakeEngine(max_queue=1)) as running:
        running.engine.hold = True
        assert ask(running, completion(prompt=["a", "b"]))[0] == 429
        assert [request.cancelled for request in running.engine.requests] == [True]
        assert running.service.gate.inside == 0


def test_prompts_that_wait_to_be_read_are_counted():
    with Running(max_requests=1) as running:
        running.service.reader._waiting = 1
        assert ask(running, completion())[0] == 429


# --- options


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1}, {"port": 65536}, {"host": ""}, {"max_body_bytes": 0}, {"max_requests": 0}, {"max_requests": 5000},
        {"max_tokens": 0}, {"default_max_tokens": 0}, {"request_seconds": 0}, {"request_seconds": float("nan")},
        {"body_seconds": -1}, {"drain_seconds": -0.1}, {"drain_seconds": float("inf")}, {"log_format": "xml"},
        {"served_name": " "}, {"api_keys": ("",)}, {"api_keys": ("two words",)}, {"api_keys": ("schlüssel",)},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_out_of_its_range_is_named_and_a_key_is_not_shown(wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=name.replace("_", "-").removesuffix("-bytes").removesuffix("s")) as caught:
        ServerOptions(**wrong)
    assert "schlüssel" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_known(host, inside):
    assert ServerOptions(host=host).on_loopback is inside


def test_the_default_is_loopback():
    assert ServerOptions().on_loopback


def test_a_taken_port_is_told_at_once():
    with bind(ServerOptions(port=0)) as taken:
        taken.listen()
        with pytest.raises(InputError, match=r"cannot listen on 127.0.0.1:\d+"):
            bind(ServerOptions(port=taken.getsockname()[1]))


def test_of_two_servers_that_start_at_once_the_slower_is_told():
    with bind(ServerOptions(port=0)) as first, bind(ServerOptions(port=first.getsockname()[1])) as second:
        first.listen()
        server = Server(make_service(FakeEngine(), loaded_tokenizer(), 64, ServerOptions()))
        with pytest.raises(InputError, match=r"cannot listen on http://127.0.0.1:\d+"):
            asyncio.run(server.serve(second))


def test_an_address_of_another_machine_is_told_at_once():
    with pytest.raises(InputError, match="cannot listen on"):
        bind(ServerOptions(host="192.0.2.1", port=0))


def test_two_answers_on_one_connection(server):
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    for prompt in ("a", "b"):
        connection.request("POST", "/v1/completions", json.dumps(completion(prompt=prompt)), JSON)
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == fake_text(prompt, 2)
    connection.close()
