"""The HTTP application: its endpoints, and how bodies become jobs."""

import asyncio
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from replayssm.server.answer import Answer, Job
from replayssm.server.bodies import Body, ChatBody, CompletionBody
from replayssm.server.errors import (
    ApiError,
    bad_request,
    from_validation,
    internal_error,
    json_response,
)
from replayssm.server.formats import ChatFormat, CompletionFormat
from replayssm.server.limits import Guard
from replayssm.server.logs import Logged, note_error, request_id
from replayssm.server.service import Service

B = TypeVar("B", bound=Body)

LEGACY_MAX_TOKENS = 16  # what /v1/completions gives a request that doesn't say


def make_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    app = FastAPI(title="ReplaySSM", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = _read(CompletionBody, await request.body(), service)
        return Answer(service, await _completion_job(service, body, request))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = _read(ChatBody, await request.body(), service)
        return Answer(service, await _chat_job(service, body, request))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(name, service)
        return json_response(_model(service))

    @app.get("/health")
    async def health() -> Response:
        status = "failed" if service.engine.failed else "draining" if service.draining else "ok"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(service.metrics.text)  # the engine's counts may wait for a GPU
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return Logged(Guard(app, service.options, service.stopping), service.metrics.observe)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note_error(request.scope, error)
    return error.response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own errors: no such path, no such method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    message = f"there is no {what}" if error.status_code in (404, 405) else str(error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _on_exception(request: Request, error: Exception) -> Response:
    """A fault of the server. It is raised again after this answer, and logged by :class:`Logged`."""
    failure = internal_error()
    note_error(request.scope, failure)
    return failure.response()


def _read(kind: type[B], raw: bytes, service: Service) -> B:
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error
    _check_model(body.model, service)
    return body


def _check_model(name: str, service: Service) -> None:
    if name != service.name:
        message = f"there is no model {name[:200]!r}: this server has {service.name!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def _model(service: Service) -> dict[str, str | int]:
    shown: dict[str, str | int] = {"id": service.name, "object": "model", "created": service.created}
    return shown | {"owned_by": "replayssm", "max_model_len": service.max_context}


async def _completion_job(service: Service, body: CompletionBody, request: Request) -> Job:
    # Everything that is quick to check comes before tokenization.
    max_tokens = _default(service, LEGACY_MAX_TOKENS) if body.max_tokens is None else body.max_tokens
    params = body.sampling(max_tokens=_allowed(service, max_tokens), logprobs=body.logprobs)
    prompts = await service.reader.tokens(body.prompt)
    for tokens in prompts:
        _check_context(service, len(tokens), max_tokens, "prompt")
    echoes = [p if isinstance(p, str) else await service.reader.text(p) for p in body.prompt] if body.echo else None
    name = "cmpl-" + request_id(request.scope)
    shape = CompletionFormat(
        name,
        service.name,
        service.texts,
        logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
        echoes=echoes,
        n=params.n,
    )
    return Job(name, prompts, params, shape, bool(body.stream))


async def _chat_job(service: Service, body: ChatBody, request: Request) -> Job:
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if given is not None:  # a wrong field is told before a long chat is tokenized
        body.sampling(max_tokens=_allowed(service, given), logprobs=logprobs)
    tokens = await service.reader.chat_tokens(body)
    most = min(_default(service, service.options.default_max_tokens), service.max_context - len(tokens))
    max_tokens = max(1, most) if given is None else given
    _check_context(service, len(tokens), max_tokens, "messages")
    params = body.sampling(max_tokens=max_tokens, logprobs=logprobs)
    name = "chatcmpl-" + request_id(request.scope)
    shape = ChatFormat(
        name, service.name, service.texts, logprobs=bool(body.logprobs), include_usage=body.include_usage
    )
    return Job(name, [tokens], params, shape, bool(body.stream))


def _default(service: Service, max_tokens: int) -> int:
    """What a request may have that doesn't say how much it wants."""
    most = service.options.max_tokens
    return max_tokens if most is None else min(max_tokens, most)


def _allowed(service: Service, max_tokens: int) -> int:
    most = service.options.max_tokens
    if most is not None and max_tokens > most:
        raise bad_request(f"max_tokens is {max_tokens}: this server gives at most {most}", param="max_tokens")
    return max_tokens


def _check_context(service: Service, prompt: int, new: int, param: str) -> None:
    if prompt + new > service.max_context:
        raise bad_request(
            f"the prompt has {prompt} tokens and up to {new} new ones are wanted: "
            f"{prompt + new} are more than the context of {service.max_context}",
            param=param,
            code="context_length_exceeded",
        )
