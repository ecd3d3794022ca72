"""Load a server: `python -m tests.load_server [--clients 200] [--seconds 120] [--model NAME]`.

Starts `replayssm serve`, and lets many clients stream at once: most read to the end, some leave in the middle, some
send nonsense. Every status must be the right one, every text that was read to its end must be what the same prompt gave
alone, the server's memory must stay flat, and nothing may be left behind when all is quiet. Then it is told to stop in
the middle of streams, which must end cleanly. Exits with 1 and says what was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-load"
MAX_BODY = 64 << 10
PROMPTS = [f"def function_{i}({', '.join('abcdefgh'[: i % 7])}):" for i in range(24)]
TOKENS = (4, 48)  # of an answer, from and to
DRAIN = 1.0  # seconds, at the stop
PATIENCE = 120.0  # seconds for one answer
MIB = 1 << 20


@dataclass
class Answer:
    """What a client got; status 0 if it left before any came."""

    status: int = 0
    text: str = ""
    finished: bool = False  # a stream that said [DONE], or a whole body
    error: str | None = None  # an error's code, or its type


async def post(address, body, *, path="/v1/completions", method="POST", leave_after=None, headers=None) -> Answer:
    """Ask on a connection of its own. `leave_after`: drop it after so many events."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "load", "content-type": "application/json", "authorization": f"Bearer {KEY}"} | (headers or {})
    lines |= {"content-length": str(len(data)), "connection": "close"}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection(*address)
    answer = Answer()
    try:
        writer.write(head.encode() + b"\r\n" + data)
        with contextlib.suppress(ConnectionError):  # a body that is refused may not be read to its end
            await writer.drain()
        if leave_after == 0:
            return answer
        answer.status = int((await reader.readline()).split()[1])
        streamed = False
        while (line := await reader.readline()).strip():
            streamed |= line.lower().startswith(b"content-type: text/event-stream")
        if streamed:
            await read_events(reader, answer, leave_after)
        else:
            told = json.loads(await reader.read())
            answer.finished = True
            read_error(answer, told)
            if "choices" in told:
                answer.text = told["choices"][0]["text"]
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answer


async def read_events(reader: asyncio.StreamReader, answer: Answer, leave_after: int | None) -> None:
    events = 0
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue  # a chunk's size, or the empty line behind an event
        if line.startswith(b"data: [DONE]"):
            answer.finished = True
            return
        told = json.loads(line[6:])
        read_error(answer, told)
        answer.text += "".join(choice["text"] for choice in told.get("choices", ()))
        events += 1
        if events == leave_after:
            return


def read_error(answer: Answer, told: dict) -> None:
    if "error" in told:
        assert told["error"].keys() == {"message", "type", "param", "code"}, told
        answer.error = told["error"]["code"] or told["error"]["type"]


def asking(model: str, prompt: str, tokens: int, **fields) -> dict:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | fields


# Requests that must be refused: body, how they are sent, the status that is right.
WRONG = {
    "malformed": (b'{"model": ', {}, 400),
    "binary": (bytes(range(256)) * 8, {}, 400),
    "deep": (b"[" * 20_000, {}, 400),
    "oversized": (b"x" * (3 * MAX_BODY), {}, 413),
    "wrong key": ({}, {"headers": {"authorization": "Bearer sk-wrong"}}, 401),
    "no key": ({}, {"headers": {"authorization": ""}}, 401),
    "no such model": (asking("gpt", "a", 1), {}, 404),
    "no such path": ({}, {"path": "/v1/embeddings"}, 404),
    "wrong method": (b"", {"method": "PUT"}, 405),
    "not json": ({}, {"headers": {"content-type": "text/plain"}}, 415),
    "impossible": ({"temperature": -1}, {}, 400),
    "too long": ({"max_tokens": 10_000_000}, {}, 400),
    "unknown field": ({"tempature": 1}, {}, 400),
    "bad schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, {}, 400),
}
KINDS = {"stream": 60, "whole": 12, "drop": 13, "leave": 3, "nonsense": 12}


@dataclass
class Load:
    """One run: what was seen, and what was wrong."""

    address: tuple[str, int]
    model: str
    chance: random.Random
    prompts: list[str]
    alone: dict[str, str] = field(default_factory=dict)
    seen: collections.Counter = field(default_factory=collections.Counter)
    wrong: collections.Counter = field(default_factory=collections.Counter)

    async def learn(self) -> None:
        """What each prompt gives alone; shorter answers are its beginnings."""
        for prompt in self.prompts:
            answer = await post(self.address, asking(self.model, prompt, TOKENS[1]))
            assert answer.status == 200, answer
            self.alone[prompt] = answer.text

    async def client(self, until: float) -> None:
        while time.monotonic() < until:
            kind = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                async with asyncio.timeout(PATIENCE):
                    await getattr(self, kind)()
            except Exception as error:
                self.wrong[f"{kind}: {type(error).__name__}: {error}"] += 1
                await asyncio.sleep(0.1)
            self.seen[kind] += 1

    async def stream(self) -> None:
        await self._read_whole(stream=True)

    async def whole(self) -> None:
        await self._read_whole()

    async def _read_whole(self, **fields) -> None:
        prompt, tokens = self._choose()
        answer = await post(self.address, asking(self.model, prompt, tokens, **fields))
        self.expect(answer.status == 200, f"status {answer.status} ({answer.error}) instead of 200")
        self.expect(answer.finished and not answer.error, f"an answer ended early: {answer.error}")
        # Text may be held back for a character's last byte, or be a replacement where an answer is cut inside one.
        text, told = answer.text.rstrip("\ufffd"), self.alone[prompt]
        self.expect(told.startswith(text) and len(text) > tokens // 4, f"not the text that {prompt!r} gives alone")

    async def drop(self) -> None:
        prompt, tokens = self._choose()
        events = self.chance.randint(1, tokens)
        answer = await post(self.address, asking(self.model, prompt, 4 * tokens, stream=True), leave_after=events)
        self.expect(answer.status == 200, f"status {answer.status} ({answer.error}) instead of 200")

    async def leave(self) -> None:
        prompt, tokens = self._choose()
        stream = self.chance.random() < 0.5
        await post(self.address, asking(self.model, prompt, tokens, stream=stream), leave_after=0)

    async def nonsense(self) -> None:
        name = self.chance.choice(list(WRONG))
        body, how, status = WRONG[name]
        if isinstance(body, dict):
            body = asking(self.model, "a", 1) | body
        answer = await post(self.address, body, **how)
        self.expect(answer.status == status, f"{name}: status {answer.status} instead of {status}")
        self.expect(answer.error, f"{name}: no error in the body")

    def expect(self, true, what: str) -> None:
        if not true:
            self.wrong[what] += 1

    def _choose(self) -> tuple[str, int]:
        return self.chance.choice(self.prompts), self.chance.randint(*TOKENS)


class Server:
    """`replayssm serve` in a process of its own."""

    def __init__(self, log: IO[str], model: str, *options: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "replayssm", "serve", "--model", model, "--port", "0", "--log-format", "json"]
        environment = os.environ | {"REPLAYSSM_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, *options], cwd=ROOT, env=environment, stderr=log)

    def wait(self) -> tuple[str, int]:
        """Its address, once it answers."""
        for _ in range(1200):
            for line in self.lines():
                if line["event"] == "listening":
                    host, port = re.fullmatch(r"http://(.*):(\d+)/v1", line["url"]).groups()
                    return host, int(port)
            assert self.process.poll() is None, self.text()
            time.sleep(0.1)
        raise TimeoutError("the server does not start")

    def text(self) -> str:
        return os.pread(self._log.fileno(), 1 << 30, 0).decode()

    def lines(self) -> list[dict]:
        """The log, without a last line that isn't whole yet."""
        return [json.loads(line) for line in self.text().rpartition("\n")[0].splitlines()]

    def memory(self) -> float:
        """Resident MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


async def metrics(address) -> dict[str, float]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(
        f"GET /metrics HTTP/1.1\r\nhost: load\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n".encode()
    )
    text = (await reader.read()).decode()
    writer.close()
    return {name: float(value) for name, value in re.findall(r"^(replayssm_[a-z_]+) (\S+)\s*$", text, re.MULTILINE)}


async def watch(server: Server, samples: list[float]) -> None:
    while True:
        samples.append(server.memory())
        await asyncio.sleep(0.5)


async def until_quiet(load: Load) -> None:
    """When nobody asks any more, nothing may run, and what the engine holds must be prefixes alone."""
    told: dict[str, float] = {}
    for _ in range(100):
        told = await metrics(load.address)
        busy = [told[f"replayssm_{name}"] for name in ("samples_in_flight", "requests_running", "requests_queued")]
        if not any(busy):
            break
        await asyncio.sleep(0.1)
    load.expect(not any(busy), f"left running: {busy}")
    held = told["replayssm_slots"] - told["replayssm_slots_free"]
    load.expect(held == told["replayssm_snapshots"], f"{held} slots held by {told['replayssm_snapshots']} snapshots")


async def stop(server: Server, load: Load, clients: int) -> None:
    """SIGTERM in the middle of streams: the short ones finish, the others are told, the process ends well."""
    streams = [
        asyncio.create_task(
            post(load.address, asking(load.model, load.prompts[i % len(load.prompts)], tokens, stream=True))
        )
        for i in range(clients)
        for tokens in ((TOKENS[0], 4000)[i % 2],)
    ]
    await asyncio.sleep(1.0)
    server.process.send_signal(signal.SIGTERM)
    answers = await asyncio.gather(*streams, return_exceptions=True)
    for answer in answers:
        if not isinstance(answer, Answer):
            load.wrong[f"a stream broke off at the stop: {answer!r}"] += 1
        elif not answer.finished or answer.error not in (None, "shutting_down"):
            load.wrong[f"a stream ended badly at the stop: status {answer.status}, {answer.error}"] += 1
    told = sum(isinstance(answer, Answer) and answer.error == "shutting_down" for answer in answers)
    load.expect(told >= clients // 2, f"{told} of {clients // 2} long streams were told of the stop")
    code = await asyncio.to_thread(server.process.wait, 60)
    load.expect(code == 0, f"the server ended with {code}")


def judge_memory(load: Load, samples: list[float], slack: float) -> str:
    """Flat: the last quarter's median is the second quarter's, but for `slack` MiB."""
    quarter = max(1, len(samples) // 4)
    early, late = median(samples[quarter : 2 * quarter] or samples), median(samples[-quarter:])
    told = f"memory {early:.0f} MiB early, {late:.0f} MiB late, {max(samples):.0f} MiB at most"
    load.expect(late - early <= slack, f"memory grows: {told}")
    return told


async def run(server: Server, given: argparse.Namespace) -> Load:
    address = await asyncio.to_thread(server.wait)
    load = Load(address, given.model, random.Random(given.seed), PROMPTS[: given.prompts])
    await load.learn()
    samples: list[float] = []
    watching = asyncio.create_task(watch(server, samples))
    start = time.monotonic()
    await asyncio.gather(*(load.client(start + given.seconds) for _ in range(given.clients)))
    seconds = time.monotonic() - start
    watching.cancel()
    await until_quiet(load)
    told = await metrics(address)
    print(f"{sum(load.seen.values())} requests of {given.clients} clients in {seconds:.0f} s: {dict(load.seen)}")
    print(
        f"{told['replayssm_generated_tokens_total'] / seconds:.0f} tokens/s, {judge_memory(load, samples, given.slack)}"
    )
    await stop(server, load, min(given.clients, 50))
    for line in server.lines():
        load.expect(line["level"] == "info", f"logged: {line}")
    return load


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Load a server.")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many different ones")
    parser.add_argument("--model", default="qwen3_5-tiny")
    parser.add_argument("--memory", default="512MiB", help="of the engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack", type=float, default=32, help="MiB that the server's memory may grow by")
    given = parser.parse_args(args)
    with tempfile.TemporaryFile("w+") as log:
        limits = ("--max-body", str(MAX_BODY), "--drain-seconds", str(DRAIN), "--memory", given.memory)
        server = Server(log, given.model, *limits)
        try:
            load = asyncio.run(run(server, given))
        finally:
            server.close()
    for what, count in load.wrong.most_common(20):
        print(f"wrong, {count} times: {what}")
    print("failed" if load.wrong else "all was right")
    return 1 if load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
