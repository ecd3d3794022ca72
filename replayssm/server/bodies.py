"""Request bodies: what OpenAI's API has, and the sampling parameters that the engine has beyond it.

An unknown field is an error, as an answer that ignores it would not be what was asked for.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from replayssm.engine.params import MAX_TOP_LOGPROBS, SamplingParams
from replayssm.errors import InputError
from replayssm.server.errors import bad_request, from_input_error

# Body fields that SamplingParams has under the same name.
SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop", "logit_bias", "regex",
    "skip_special_tokens",
)  # fmt: skip

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several: texts or token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise ValueError("a text, a list of token ids, or a list of either is wanted, none of them empty")
    if not all(prompts):
        raise ValueError("a prompt is empty: at least one character or token is wanted")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _stops(value: Any) -> tuple[str, ...] | None:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("a text or a list of texts is wanted")
    return tuple(stops)


def _content(value: Any) -> str | None:
    """A message's text; parts are put together."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("a text or a list of parts is wanted")
    for part in value:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('every part must be {"type": "text", "text": ...}: the model takes text alone')
    return "".join(part["text"] for part in value)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers of encrypted streams: never sent


class Message(BaseModel):
    """One message of a chat. Fields that aren't named here reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_content)] = None
    tool_calls: list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: no nulls, `system` for `developer`, tool arguments as objects."""
        message = {name: value for name, value in self.model_dump().items() if value is not None}
        message["content"] = self.content or ""
        if self.role == "developer":
            message["role"] = "system"
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # a model may have written anything
    return call | {"function": function | {"arguments": arguments}}


class Body(BaseModel):
    """What both endpoints take. None is the default of each field, so that null means "not given"."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = None

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...] | None, PlainValidator(_stops)] = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    logit_bias: dict[int, float] | None = None
    regex: str | None = None
    skip_special_tokens: bool | None = None

    # Known fields that say nothing about the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options was given without stream, which it is for", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's parameters.

        Raises:
            ApiError: 400, one of them is out of its range.
        """
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        try:
            return SamplingParams(
                max_tokens=max_tokens, logprobs=logprobs, json_schema=_json_schema(self.response_format), **given
            )
        except InputError as error:
            raise from_input_error(error, type(self).model_fields) from error


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_what_is_not_there(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of must equal n: every sample is sent", param="best_of")
        if self.suffix:
            raise bad_request("suffix is not supported: the text is continued at its end", param="suffix")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo and logprobs were both given: a prompt's logprobs are not computed", param="echo")
        return self


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            message = "max_tokens and max_completion_tokens were both given, and differ: give the second alone"
            raise bad_request(message, param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs was given without logprobs: true, which it is for", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            wanted = f"it must be from 0 to {MAX_TOP_LOGPROBS}"
            raise bad_request(f"top_logprobs is {self.top_logprobs}: {wanted}", param="top_logprobs")
        if self.tool_choice not in (None, "auto", "none"):
            message = 'tool_choice must be "auto" or "none": a model is not made to call a tool'
            raise bad_request(message, param="tool_choice")
        for i, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or "name" not in function:
                message = f'tools[{i}] must be {{"type": "function", "function": {{"name": ..., ...}}}}'
                raise bad_request(message, param=f"tools[{i}]")
        return self

    @model_validator(mode="after")
    def _check_messages(self) -> "ChatBody":
        for i, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":  # whose answer may be calls of tools alone
                param = f"messages[{i}].content"
                raise bad_request(f"{param} is missing", param=param, code="missing_required_parameter")
        return self

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return self.tools if self.tools and self.tool_choice != "none" else None


def _json_schema(response_format: dict[str, Any] | None) -> str | None:
    """The text of the JSON schema that a `response_format` asks for."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if kind != "json_schema":
        message = "response_format.type must be text, json_object or json_schema"
        raise bad_request(message, param="response_format.type")
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        message = "response_format.json_schema.schema is missing: an object, the JSON schema, is wanted"
        raise bad_request(message, param="response_format.json_schema.schema")
    return json.dumps(schema)
