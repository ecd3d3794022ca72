"""`replayssm chat`: a conversation with a model in the terminal, through the engine and its prefix cache."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from replayssm.cli.early import check_backend, check_drafter
from replayssm.cli.values import INTEGER, MODEL, NAMES, NUMBER, with_option_names
from replayssm.engine.options import SPECULATE, EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.errors import InputError, one_line
from replayssm.loading.folder import check_model, find_model
from replayssm.options import DEVICES, DTYPES, LoadOptions, check_prompt

if TYPE_CHECKING:
    from replayssm.engine import Engine

HELP = "/new begins a new chat, /exit or Ctrl-D ends; Ctrl-C ends an answer"
Message = dict[str, str]


def chat(
    model: Annotated[str, MODEL] = NAMES[0],
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(**INTEGER, help="Of an answer, at most.")] = 512,
    temperature: Annotated[float, typer.Option(**NUMBER, help="0 is greedy, above it samples.")] = 0.7,
    top_p: Annotated[float, typer.Option(**NUMBER, help="Sample from the smallest set with this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(**INTEGER, help="Sample from the k most likely tokens; 0 takes all.")] = 0,
    seed: Annotated[int | None, typer.Option(**INTEGER, help="Makes sampling repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the model: {', '.join(DTYPES)}; auto on a CPU: float32.")] = "auto",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "auto",
    ring_len: Annotated[int, typer.Option(**INTEGER, help="L: the state is written once in L steps.")] = 16,
    backend: Annotated[str, typer.Option(help="auto, cpu, torch, triton or cuda (Hopper and newer).")] = "auto",
    speculate: Annotated[str | None, typer.Option(help=f"Draft tokens ahead by {', '.join(SPECULATE)}.")] = None,
) -> None:
    """Talk with a model.

    Where standard input isn't a terminal, each of its lines is a message, and the answers are printed. Exit with 2 then
    if one was refused.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    options = EngineOptions(
        ring_len=ring_len,
        backend=backend,
        max_rows=1,
        speculate=speculate,  # type: ignore[arg-type]  # checked by EngineOptions
    )
    load_options = LoadOptions(dtype=dtype, device=device)
    if sys.stdin is None:
        raise InputError("messages are to be read from standard input, which is closed")
    begun = [{"role": "system", "content": system}] if system else []
    if system:
        check_prompt(system, "system")
    check_model(model)
    check_backend(backend, device)
    check_drafter(model, speculate)

    from replayssm.engine import Engine
    from replayssm.loading import load_model, use_fitting_threads

    with Console(stderr=True).status(f"loading {model} ..."):
        tokenizer = _check_chat(model, begun)
        loaded = load_model(model, load_options, tokenizer)
        use_fitting_threads(loaded)
        engine = Engine(loaded, options)
    with engine:
        answered_all = _converse(engine, params, begun)
    if not answered_all and not sys.stdin.isatty():  # a person was told, a script looks at this
        raise typer.Exit(2)


def _check_chat(model: str, begun: list[Message]) -> Any:
    """Refuse a model, or what its chats begin with, where no message could be answered. Gives its tokenizer."""
    from replayssm.loading import context_of, load_config, load_tokenizer, quiet_libraries

    folder = find_model(model)
    with quiet_libraries():
        most, tokenizer = context_of(load_config(folder)), load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise InputError(f"model {model!r} has no chat template: `replayssm generate` continues text")
    if begun:
        count = len(_tokens(tokenizer, [*begun, {"role": "user", "content": "?"}]))
        if most is not None and count >= most:
            raise InputError(f"system and one character beside it have {count} tokens: {model} was made for {most}")
    return tokenizer


def _converse(engine: Engine, params: SamplingParams, begun: list[Message]) -> bool:
    """Read messages and answer them until there are no more. `begun`: what every chat begins with.

    Returns:
        Whether each had an answer.
    """
    told = Console(stderr=True, highlight=False)
    if sys.stdin.isatty():
        told.print(f"{engine.loaded.name}: {HELP}", style="dim")
    messages, answered_all = list(begun), True
    for text in _lines():
        if text in ("/exit", "/quit"):
            break
        if text == "/new":
            messages = list(begun)
            continue
        if re.fullmatch(r"/\w*", text):  # a mistyped command; a path or a comment is a message
            told.print(HELP, style="dim")
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            check_prompt(text, "the message")
            answer = _answer(engine, params, asked, told)
        except InputError as error:  # most likely, the chat has outgrown the context; or the model gave no token
            again = ": /new begins a new chat" if messages != begun else ""
            told.print(f"{with_option_names(one_line(error))}{again}", style="red", markup=False, soft_wrap=True)
            answered_all = False
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]
    return answered_all


def _lines() -> Iterator[str]:
    """Messages, one a line, without empty ones."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        if not line and not sys.stdin.isatty():
            return
        if line.strip():
            yield line.strip()


def _answer(engine: Engine, params: SamplingParams, messages: list[Message], told: Console) -> str:
    """Print an answer as it comes, and return it. Ctrl-C ends it, and what has come of it counts."""
    start, tokens, cached, pieces = time.perf_counter(), 0, 0, list[str]()
    prompt = _tokens(engine.loaded.tokenizer, messages)
    room = max(1, engine.max_context - len(prompt))  # without any, add() says so
    request = engine.add(prompt, replace(params, max_tokens=min(params.max_tokens, room)))
    with _interrupts() as interrupted:
        while engine.has_work:
            if interrupted:
                engine.cancel(request)
                interrupted.clear()
            for update in engine.step():
                pieces.append(update.text)
                tokens += len(update.token_ids)
                cached += update.cached_tokens or 0
                sys.stdout.write(update.text)
                sys.stdout.flush()
                if update.finish_reason == "error":
                    raise InputError(update.message)
    seconds = time.perf_counter() - start
    typer.echo("")
    told.print(
        f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s), {cached} of {len(prompt)} prompt "
        "tokens from the prefix cache",
        style="dim",
        soft_wrap=True,
    )
    return "".join(pieces)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Keeps Ctrl-C in a list, to be looked at between steps: a step that is broken off loses what the engine holds."""
    kept: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: kept.append(number))
    try:
        yield kept
    finally:
        signal.signal(signal.SIGINT, before)


def _tokens(tokenizer: Any, messages: list[Message]) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is code of the model folder, and may raise anything
        raise InputError(f"the model's chat template refuses these messages: {one_line(error)}") from error
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens
