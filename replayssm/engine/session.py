"""Sessions: the state, keys and values of some tokens in a safetensors file, to go on from in another process.

A file holds the tokens; of each recurrent layer the folded state in float32 and the convolution's inputs; of each
attention layer the pages. If it is of a request, it holds what was asked, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Request
from replayssm.errors import InputError, one_line
from replayssm.folders import is_special
from replayssm.loading import LoadedModel

FORMAT = "replayssm-session"
VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
SAMPLED_VALUES = 8  # of each weight, for a model's fingerprint


class RequestHeader(BaseModel):
    """What a request asked for; its output is what follows `num_prompt` tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_prompt: int = Field(ge=1)
    seed: int = Field(ge=-(2**63), lt=2**63)
    priority: int
    params: dict[str, Any]

    def sampling_params(self) -> SamplingParams:
        """Checked as if they were given anew."""
        given = dict(self.params)
        given["logit_bias"] = {int(token): bias for token, bias in given.get("logit_bias", {}).items()}
        return SamplingParams(**given)


class Header(BaseModel):
    """What a session file says of itself.

    Attributes:
        model: the model's fingerprint.
        page_size: tokens of a page.
        done: tokens that are in states and pages; the file may have more, which aren't computed yet.
        request: None for a prefix.
        checksum: of all tensors, and of the rest of the header.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    model: str
    page_size: int
    done: int = Field(ge=0)
    request: RequestHeader | None = None
    checksum: int = 0


class Session(NamedTuple):
    """A session file's content, checked against an engine's model.

    Attributes:
        tokens: all of them.
        tensors: by name, see :func:`replayssm.engine.contents.gather`.
    """

    header: Header
    tokens: list[int]
    tensors: dict[str, Tensor]


def request_header(request: Request) -> RequestHeader:
    """A request's part of a header."""
    params = json.loads(json.dumps(asdict(request.params)))
    return RequestHeader(num_prompt=len(request.prompt), seed=request.seed, priority=request.priority, params=params)


def save(path: str | Path, session: Session) -> None:
    """Write a session file; one that is there is replaced once the new one is whole.

    Raises:
        InputError: the file can't be written.
    """
    given = Path(path)
    if is_special(given):
        raise InputError(f"the session can't be written to {given}: a file is wanted, it is a device or a pipe")
    path = given.resolve()  # where a link leads
    if not path.parent.is_dir():
        raise InputError(f"the session can't be written to {given}: there is no folder {given.parent}")
    tensors = {"tokens": torch.tensor(session.tokens, dtype=torch.int64), **session.tensors}
    header = session.header.model_copy(update={"checksum": _checksum(session.header, tensors)})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            save_file(tensors, partial, {FORMAT: header.model_dump_json()})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        why = one_line(error).replace(str(partial), str(given))
        raise InputError(f"the session can't be written to {given}: {why}") from error


def load(path: str | Path, runner: Any, model: str) -> Session:
    """Read a session file and check it.

    Args:
        path: of the file.
        runner: whose states and pages it is for.
        model: the model's fingerprint.

    Raises:
        InputError: it is no session file, not whole, or of another model or engine; the message says what is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is not there: a session file is wanted")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path} is cut off or no session file: {one_line(error)}") from error
    header = _header(path, metadata.get(FORMAT))
    if header.model != model:
        raise InputError(f"the session in {path} is of another model, or of other weights of it")
    if header.page_size != runner.page_size:
        raise InputError(
            f"the session in {path} has pages of {header.page_size} tokens, the engine of {runner.page_size}: "
            f"page_size={header.page_size} is wanted"
        )
    tokens = _tokens(path, header, tensors)
    _check_tensors(path, _wanted(runner, header.done), tensors)
    if _checksum(header, {"tokens": torch.tensor(tokens), **tensors}) != header.checksum:
        raise InputError(f"the session in {path} is damaged: its checksum isn't that of its content")
    return Session(header, tokens, tensors)


def fingerprint(loaded: LoadedModel) -> str:
    """What tells a model from others: its configuration, and some values of each weight."""
    config = {name: value for name, value in loaded.model.config.to_dict().items() if name not in VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(loaded.model.named_parameters()):
        values = weight.detach().flatten()
        some = values[:: max(1, len(values) // SAMPLED_VALUES)][:SAMPLED_VALUES].double().tolist()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {some}".encode())
    return digest.hexdigest()


def _header(path: Path, text: str | None) -> Header:
    if text is None:
        raise InputError(f"{path} is a safetensors file, but no session")
    try:
        header = Header.model_validate_json(text)
        if header.request is not None:
            header.request.sampling_params()
    except (ValidationError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the session in {path} has a header that can't be used: {one_line(error)}") from error
    return header


def _tokens(path: Path, header: Header, tensors: dict[str, Tensor]) -> list[int]:
    tokens = tensors.pop("tokens", None)
    if tokens is None or tokens.dtype != torch.int64 or tokens.dim() != 1 or len(tokens) < max(1, header.done):
        raise InputError(f"the session in {path} has no list of at least {max(1, header.done)} tokens")
    if header.request is not None and header.request.num_prompt > len(tokens):
        raise InputError(f"the session in {path} has {len(tokens)} tokens, its prompt {header.request.num_prompt}")
    if header.request is not None and header.done == len(tokens):
        raise InputError(
            f"the session in {path} has all of its {len(tokens)} tokens done: one more is wanted, to go on with"
        )
    found: list[int] = tokens.tolist()
    return found


def _wanted(runner: Any, done: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a session of so many tokens."""
    if not done:
        return {}
    pool, pages = runner.pool, -(-done // runner.page_size)
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for layer, spec in enumerate(pool.layers):
        conv = pool.conv_state(layer)
        wanted[f"states.{layer}"] = (spec.checkpoint_shape, torch.float32)
        wanted[f"convs.{layer}"] = (tuple(conv.shape[1:]), conv.dtype)
    for name, tensor in runner.page_tensors().items():
        wanted[f"pages.{name}"] = ((pages, *tensor.shape[1:]), tensor.dtype)
    return wanted


def _check_tensors(
    path: Path, wanted: dict[str, tuple[tuple[int, ...], torch.dtype]], tensors: dict[str, Tensor]
) -> None:
    if wanted.keys() != tensors.keys():
        odd = sorted(wanted.keys() ^ tensors.keys())
        raise InputError(f"the session in {path} has other tensors than this model: {', '.join(odd[:3])}")
    for name, (shape, dtype) in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise InputError(
                f"the session in {path} has {name} of {tuple(tensor.shape)} {tensor.dtype}: {shape} {dtype} is wanted"
            )


def _checksum(header: Header, tensors: dict[str, Tensor]) -> int:
    crc = zlib.crc32(header.model_copy(update={"checksum": 0}).model_dump_json().encode())
    for name in sorted(tensors):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data, crc)
    return crc
