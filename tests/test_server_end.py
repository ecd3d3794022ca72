"""How requests end before their time: clients that leave, limits of time, engines that fail, servers that stop."""

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest

from replayssm.server import answer, limits, logs, run
from tests.serving import MODEL, FakeEngine, Running, fake_text, kept_log, wait_until

ROOT = Path(__file__).resolve().parent.parent
SLOW = 0.01  # seconds a token
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def stream_text(stream) -> tuple[str, openai.APIError | None]:
    """A stream's text, and the error that ended it."""
    text = ""
    try:
        for chunk in stream:
            text += chunk.choices[0].text
    except openai.APIError as error:
        return text, error
    return text, None


def raw_request(running, **fields) -> socket.socket:
    """A connection on which a request was sent."""
    body = json.dumps({"model": MODEL, "prompt": "raw", "max_tokens": 5000} | fields)
    connection = socket.create_connection(running.address, timeout=10)
    connection.sendall(f"{HEAD}content-length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def left(running) -> float:
    """Clients that left before their answers were whole, as the metrics count them."""
    told = re.findall(r'^replayssm_http_requests_total{.*status="499"} (\S+)$', metrics(running), re.MULTILINE)
    return sum(map(float, told))


def metrics(running) -> str:
    return running.service.metrics.text().decode()


# --- clients that leave


@pytest.fixture(scope="module")
def slow():
    """A server that takes its time, and is the same after each test."""
    with Running(FakeEngine(SLOW)) as running:
        yield running
        assert not running.engine.running
        assert running.service.gate.inside == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]], ids=["prompt", "prompts"])
def test_a_client_that_drops_its_connection_cancels_its_request(slow, stream, prompt):
    slow.engine.requests.clear()
    gone = left(slow)
    connection = raw_request(slow, stream=stream, prompt=prompt)
    samples = len(prompt) if isinstance(prompt, list) else 1
    wait_until(lambda: len(slow.engine.requests) == samples and all(request.sent for request in slow.engine.requests))
    connection.close()
    wait_until(lambda: not slow.engine.running)
    assert all(request.cancelled and request.sent < 5000 for request in slow.engine.requests)
    wait_until(lambda: slow.service.gate.inside == 0)
    wait_until(lambda: left(slow) == gone + 1)


def test_a_client_that_leaves_its_loop_cancels_its_request(slow):
    with slow.client().completions.create(model=MODEL, prompt="a", max_tokens=5000, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: not slow.engine.running)
    assert slow.engine.requests[-1].cancelled


def test_a_client_that_leaves_while_it_waits_for_its_turn_is_noticed():
    with Running() as running:
        running.engine.hold = True
        connection = raw_request(running, stream=False)
        wait_until(lambda: running.engine.running)
        connection.close()
        wait_until(lambda: not running.engine.running)
        assert running.engine.requests[0].sent == 0


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing():
    with Running() as running:
        connection = socket.create_connection(running.address)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        connection.close()
        wait_until(lambda: not running.server._uvicorn.server_state.tasks)
        assert not running.engine.requests


# --- time


def test_a_request_that_takes_too_long_is_told_so_and_not_repeated():
    with Running(FakeEngine(SLOW), request_seconds=0.1) as running:
        with pytest.raises(openai.InternalServerError) as caught:
            running.client(max_retries=3).completions.create(model=MODEL, prompt="a", max_tokens=5000)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        assert len(running.engine.requests) == 1
        assert not running.engine.running


def test_a_stream_that_takes_too_long_ends_with_an_error():
    with Running(FakeEngine(SLOW), request_seconds=0.2) as running:
        stream = running.client().completions.create(model=MODEL, prompt="a", max_tokens=5000, stream=True)
        text, error = stream_text(stream)
        assert text
        assert fake_text("a", 5000).startswith(text)
        assert (error.code, error.body["type"]) == ("timeout", "server_error")
        assert not running.engine.running


def test_a_silent_stream_is_kept_alive(monkeypatch):
    monkeypatch.setattr(answer, "KEEP_ALIVE_SECONDS", 0.05)
    with Running() as running:
        running.engine.hold = True
        with raw_request(running, stream=True, max_tokens=2) as connection:
            got = b""
            while got.count(b": nothing new\n\n") < 2:
                got += connection.recv(4096)
            running.engine.hold = False
            while b"[DONE]" not in got:
                got += connection.recv(4096)
        assert b"data: " in got


# --- the engine fails


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_engine_is_an_error_of_the_server(slow, stream):
    client = slow.client()
    slow.engine.failing = True
    with pytest.raises(openai.APIError, match="told to fail") as caught:
        list(client.completions.create(model=MODEL, prompt="a", stream=stream))
    assert caught.value.code == "engine_failed"
    slow.engine.failing = False
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_says_which_request_the_engine_failed_and_why(slow, stream):
    slow.engine.failing = True
    with kept_log(logs.JsonLines()) as objects, kept_log(logs.TextLines()) as texts:
        with pytest.raises(openai.APIError, match="told to fail"):
            list(slow.client().completions.create(model=MODEL, prompt="a", stream=stream))
        wait_until(lambda: any("engine_failed" in text for text in texts))
    slow.engine.failing = False
    (line,) = (json.loads(text) for text in objects if "engine_failed" in text)
    (text,) = (text for text in texts if "engine_failed" in text)
    assert (line["event"], line["level"], line["error"]) == ("request", "error", "engine_failed")
    assert "told to fail" in line["error_message"]
    assert line["id"] in text
    assert f"engine_failed: {line['error_message']}" in text


def test_an_engine_that_gave_up_shows_in_health():
    with Running() as running:
        running.engine.failed, running.engine.closed = "no more steps", True
        with pytest.raises(openai.InternalServerError, match="no more steps"):
            running.client().completions.create(model=MODEL, prompt="a")
        assert health(running) == (503, {"status": "failed"})


def health(running) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(*running.address, timeout=10)
    connection.request("GET", "/health")
    response = connection.getresponse()
    told = response.status, json.loads(response.read())
    connection.close()
    return told


@pytest.mark.parametrize("where", ["engine", "reader"])
def test_a_fault_of_the_server_is_a_500_that_tells_nothing(where, monkeypatch):
    async def broken(*args, **kwargs):
        raise RuntimeError("a secret of the inside")

    with Running() as running:
        if where == "engine":
            monkeypatch.setattr(running.engine, "start", broken)
        else:
            monkeypatch.setattr(running.service.reader, "tokens", broken)
        with kept_log(logs.JsonLines()) as lines:
            with pytest.raises(openai.InternalServerError) as caught:
                running.client().completions.create(model=MODEL, prompt="a")
            wait_until(lambda: "internal_error" in [json.loads(line)["event"] for line in lines])
        assert (caught.value.status_code, caught.value.code) == (500, "internal_error")
        assert "secret" not in caught.value.message
        assert running.client().models.list().data


# --- the server stops


def test_a_stop_lets_requests_finish_and_takes_no_more():
    with Running(FakeEngine(SLOW), drain_seconds=20) as running:
        got = []
        asking = {"model": MODEL, "prompt": "last", "max_tokens": 60}
        whole = threading.Thread(
            target=lambda: got.append(running.client().completions.create(**asking).choices[0].text)
        )
        whole.start()
        stream = running.client().completions.create(**asking, stream=True)
        keep = running.client()
        keep.models.list()  # a connection that is open already
        wait_until(lambda: len(running.engine.running) == 2)
        running.stop()
        wait_until(lambda: running.service.draining)
        with pytest.raises(openai.InternalServerError) as caught:
            keep.completions.create(**asking)
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        assert health(running) == (503, {"status": "draining"})
        assert stream_text(stream) == (fake_text("last", 60), None)
        whole.join(10)
        assert got == [fake_text("last", 60)]
        running.join()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(running.address)


def test_a_stop_does_not_wait_for_the_rest_of_a_body(monkeypatch):
    monkeypatch.setattr(limits, "DISCARD_SECONDS", 0.1)
    with Running(drain_seconds=20) as running:
        half = socket.create_connection(running.address, timeout=10)
        half.sendall(f"{HEAD}content-length: 99\r\n\r\n{{".encode())
        wait_until(lambda: running.server._uvicorn.server_state.tasks)
        start = time.monotonic()
        running.stop()
        answer = http.client.HTTPResponse(half)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "shutting_down")
        running.join()
        assert time.monotonic() - start < 5


def test_what_does_not_finish_in_time_ends_with_an_error():
    with Running(FakeEngine(SLOW), drain_seconds=0.3) as running:
        stream = running.client().completions.create(model=MODEL, prompt="long", max_tokens=5000, stream=True)
        failed = []

        def ask():
            with pytest.raises(openai.InternalServerError) as caught:
                running.client().completions.create(model=MODEL, prompt="long", max_tokens=5000)
            failed.append(caught.value.code)

        whole = threading.Thread(target=ask)
        whole.start()
        wait_until(lambda: len(running.engine.running) == 2)
        running.stop()
        text, error = stream_text(stream)
        assert fake_text("long", 5000).startswith(text)
        assert error.code == "shutting_down"
        whole.join(10)
        assert failed == ["shutting_down"]
        running.join()
        assert not running.engine.running


def test_a_second_stop_does_not_wait():
    with Running(FakeEngine(SLOW), drain_seconds=600) as running:
        stream = running.client().completions.create(model=MODEL, prompt="long", max_tokens=5000, stream=True)
        wait_until(lambda: running.engine.running)
        running.stop()
        wait_until(lambda: running.service.draining)
        running.stop()
        assert stream_text(stream)[1].code == "shutting_down"
        running.join()


@pytest.fixture
def process(request):
    """A server in a process of its own: gives the process and its address."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.serve_fake", *request.param],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started, started.stdout.readline().strip()
    finally:
        started.kill()
        started.wait()


async def collect(client, i: int, tokens: int) -> tuple[str, str | None]:
    text = ""
    stream = await client.completions.create(model=MODEL, prompt=f"p{i}", max_tokens=tokens, stream=True)
    try:
        async for chunk in stream:
            text += chunk.choices[0].text
    except openai.APIError as error:
        return text, error.code
    return text, None


@pytest.mark.thorough  # CI has the small form of tests/load_server.py, which sends one to a real server
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("process", [("0.01", "drain_seconds=0.5")], indirect=True)
def test_a_signal_in_the_middle_of_streams_ends_each_of_them_cleanly(process, number):
    started, address = process

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            short = [asyncio.create_task(collect(client, i, 30)) for i in range(8)]
            long = [asyncio.create_task(collect(client, i, 5000)) for i in range(8)]
            await asyncio.sleep(0.25)
            started.send_signal(number)
            return await asyncio.gather(*short), await asyncio.gather(*long)

    short, long = asyncio.run(ask())
    out, err = started.communicate(timeout=20)
    assert started.returncode == 0
    assert short == [(fake_text(f"p{i}", 30), None) for i in range(8)]
    for i, (text, code) in enumerate(long):
        assert code == "shutting_down"
        assert 0 < len(text) < 5000
        assert fake_text(f"p{i}", 5000).startswith(text)
    assert out == "left running: 0\n"
    lines = [json.loads(line) for line in err.splitlines()]
    assert sum(line["event"] == "request" for line in lines) == 16
    assert all(line["level"] == "info" for line in lines), lines


@pytest.fixture
def slow_reader(monkeypatch):
    """A server with a client that reads nothing of its long stream, which has come to a halt for that."""
    monkeypatch.setattr(run, "LAST_SECONDS", 1.0)
    monkeypatch.setattr(answer, "LAST_EVENT_SECONDS", 0.1)
    with Running(drain_seconds=0.1, request_seconds=4, max_context=2_000_000) as running:
        connection = raw_request(running, stream=True, max_tokens=1_000_000, logprobs=20)
        wait_until(lambda: running.engine.requests)
        (request,) = running.engine.requests
        sent = -1
        while sent != request.sent:
            sent = request.sent
            time.sleep(0.25)
        yield running
        connection.close()


@pytest.mark.thorough
def test_a_client_that_does_not_read_is_cut_off_at_the_limit_of_time(slow_reader):
    wait_until(lambda: not slow_reader.engine.running)
    wait_until(lambda: slow_reader.service.gate.inside == 0)


def test_a_client_that_does_not_read_does_not_keep_a_server_alive(slow_reader):
    start = time.monotonic()
    slow_reader.stop()
    slow_reader.join(10)
    assert time.monotonic() - start < 5
