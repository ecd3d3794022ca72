"""Taking sessions out of an engine, and into one."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from replayssm.engine import session as files
from replayssm.engine.contents import gather, scatter
from replayssm.engine.request import Saved
from replayssm.errors import InputError, one_line

if TYPE_CHECKING:
    from replayssm.engine.engine import Engine


class Imported(NamedTuple):
    """What a session file brought.

    Attributes:
        tokens: all that it holds.
        request_id: of the request that goes on; None for a prefix, which waits in the cache.
    """

    tokens: list[int]
    request_id: str | None


def export_prefix(engine: Engine, tokens: Sequence_[int], path: str | Path) -> int:
    """Write the longest prefix of some tokens that the cache has; gives its length."""
    if engine.cache is None:
        raise InputError("a prefix was to be exported, but the engine has no prefix cache")
    hit = engine.cache.find(tokens, len(tokens))
    if hit.node is None or hit.node.snapshot is None:
        raise InputError("the prefix cache has no prefix of these tokens")
    header = files.Header(model=engine.fingerprint, page_size=engine.runner.page_size, done=hit.length)
    tensors = gather(engine.runner, hit.node.snapshot, hit.pages)
    files.save(path, files.Session(header, list(tokens[: hit.length]), tensors))
    return hit.length


def export_request(engine: Engine, request_id: str, path: str | Path) -> int:
    """Write a request as it is now; gives the number of its tokens, new ones included."""
    request = engine.requests.get(request_id)
    if request is None or request.finished:  # its end was read, and isn't told yet
        raise InputError(f"request {request_id!r} is not there, or done: one that isn't finished is wanted")
    if request.params.n != 1:
        raise InputError(f"request {request_id!r} has {request.params.n} samples: a session holds one")
    (sequence,) = request.sequences
    asked = files.request_header(request)
    size, done = engine.runner.page_size, sequence.done
    header = files.Header(model=engine.fingerprint, page_size=size, done=done, request=asked)
    tensors = gather(engine.runner, sequence.slot, sequence.pages[: -(-done // size)]) if done else {}
    files.save(path, files.Session(header, list(sequence.tokens), tensors))
    return len(sequence.tokens)


def import_session(engine: Engine, path: str | Path, request_id: str | None) -> Imported:
    """Take a session in. Nothing is changed unless all of it can be used."""
    session = files.load(path, engine.runner, engine.fingerprint)
    tokens = engine.intake.tokens(session.tokens)
    if session.header.request is None:
        _take_prefix(engine, session)
        return Imported(tokens, None)
    return Imported(tokens, _take_request(engine, session, session.header.request, request_id))


def _take_prefix(engine: Engine, session: files.Session) -> None:
    """Give the cache a prefix, if it hasn't got it."""
    cache, tokens, done = engine.cache, session.tokens, session.header.done
    if cache is None:
        raise InputError("the session is a prefix, but the engine has no prefix cache")
    size = engine.runner.page_size
    if not done or done != len(tokens) or done % size:
        raise InputError(f"the session has {len(tokens)} tokens, {done} done: whole pages of {size} are wanted")
    if cache.holds(tokens, done):
        return
    count = done // size
    # Not even what is cached goes for a prefix that would not fit without it.
    if engine.pages.num_available < count or not cache.free_pages(count) or not cache.free_slot():
        raise InputError(f"the session wants {count} pages and two slots, and there is no room for them now")
    pool = engine.runner.pool
    (slot,) = pool.alloc()
    pages = engine.pages.take(count)  # are there, and taking them asks no device
    try:
        scatter(engine.runner, slot, pages, session.tensors)
        if not cache.free_slot():
            raise InputError("the session wants two slots, and there is room for one now")
        cache.insert(tokens, done, pages, pool.snapshot(slot))
    finally:
        pool.free(slot)
        engine.pages.release(pages)


def _take_request(engine: Engine, session: files.Session, asked: files.RequestHeader, request_id: str | None) -> str:
    """Queue a request that goes on behind the tokens that it has."""
    prompt, new = session.tokens[: asked.num_prompt], session.tokens[asked.num_prompt :]
    request = engine.prepare(prompt, asked.sampling_params(), request_id, asked.priority)
    if request.params.n != 1:
        raise InputError(f"the session's request has {request.params.n} samples: one is wanted")
    request.seed = asked.seed
    (sequence,) = request.sequences
    if new and sequence.text.append(new).finish_reason is not None:
        raise InputError("the session's request is done: nothing is left to go on with")
    if sequence.constraint is not None:
        try:
            sequence.constraint.advance(new)
        except RuntimeError as error:
            raise InputError(f"the session's tokens break its own constraint: {one_line(error)}") from error
    sequence.tokens = list(session.tokens)
    if session.header.done:
        sequence.saved = Saved(session.header.done, session.tensors)
    engine.enqueue(request)
    return request.id
