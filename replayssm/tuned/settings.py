"""What a file of measured settings says, and its form in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from replayssm.options import STATE_DTYPES

FORMAT = "replayssm tuned settings 1"
KINDS = ("gdn", "kda", "mamba2")

T = TypeVar("T")


class TunedFileError(ValueError):
    """Not such a file; the message says where it is wrong."""


@dataclass(frozen=True)
class Shape:
    """A layer whose settings are measured: what must be the same for them to hold."""

    kind: str
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    state_dtype: str
    activation_dtype: str

    def __str__(self) -> str:
        heads, dims = f"k{self.num_k_heads} v{self.num_v_heads}", f"{self.head_v_dim}x{self.head_k_dim}"
        return f"{self.kind} {heads} {dims} {self.state_dtype}"


@dataclass(frozen=True)
class Cut:
    """How a step of so many rows is cut.

    Args:
        batch: rows.
        block: the fields of :class:`replayssm.backends.cuda.blocks.Block`; empty: the cut that is chosen without this.
        us: microseconds of a step.
        us_untuned: of a step with the cut that is chosen without this.
    """

    batch: int
    block: dict[str, int]
    us: float
    us_untuned: float


@dataclass(frozen=True)
class Ring:
    """The flush period that was fastest over the batches.

    Args:
        ring_len: L; 1 is the plain update at every step.
        ring_dtype: of the updates.
        batches: rows.
        us: microseconds of a step, of each batch, by ring length and ring dtype, ``"16 float32"``.
    """

    ring_len: int
    ring_dtype: str
    batches: list[int]
    us: dict[str, list[float]]


@dataclass(frozen=True)
class TunedLayer:
    """What was measured of one layer."""

    shape: Shape
    ring: Ring
    cuts: tuple[Cut, ...]

    def cut_for(self, batch: int) -> Cut | None:
        """The cut of this batch, or of the batches around it if they agree, or of one within a factor of two."""
        below = max((cut for cut in self.cuts if cut.batch <= batch), key=_batch, default=None)
        above = min((cut for cut in self.cuts if cut.batch >= batch), key=_batch, default=None)
        if below is not None and above is not None:
            return below if below.block == above.block else None
        nearest = below or above
        return nearest if nearest is not None and nearest.batch <= 2 * batch <= 4 * nearest.batch else None


def _batch(cut: Cut) -> int:
    return cut.batch


@dataclass(frozen=True)
class Tuned:
    """One file: the settings of one GPU.

    Args:
        gpu: its name.
        made_with: versions, and a hash of the kernels' source.
        layers: each shape once.
    """

    gpu: str
    made_with: dict[str, str]
    layers: tuple[TunedLayer, ...]


def unparse(tuned: Tuned) -> str:
    """The file's text: one line for each cut, so that changes can be read."""
    layers = []
    for layer in tuned.layers:
        cuts = ",\n".join(f"   {json.dumps(asdict(cut))}" for cut in layer.cuts)
        shape, ring = json.dumps(asdict(layer.shape)), json.dumps(asdict(layer.ring))
        layers.append(f'  {{"shape": {shape},\n   "ring": {ring},\n   "cuts": [\n{cuts}\n   ]}}')
    about = f'"gpu": {json.dumps(tuned.gpu)},\n "made_with": {json.dumps(tuned.made_with)}'
    return f'{{"format": {json.dumps(FORMAT)},\n {about},\n "layers": [\n' + ",\n".join(layers) + "\n]}\n"


def parse(text: str) -> Tuned:
    """Read a file's text.

    Raises:
        TunedFileError: it is something else, cut off, or holds impossible values.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TunedFileError(f"it is not JSON ({' '.join(str(error).split())[:80]})") from error
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise TunedFileError(f'its "format" is not {FORMAT!r}')
    layers = tuple(_layer(entry, f"layers[{i}]") for i, entry in enumerate(_value(given, "layers", list, "")))
    if len({layer.shape for layer in layers}) < len(layers):
        raise TunedFileError("layers has a shape twice")
    made_with = _value(given, "made_with", dict, "")
    return Tuned(_value(given, "gpu", str, ""), {str(k): str(v) for k, v in made_with.items()}, layers)


def _layer(given: Any, where: str) -> TunedLayer:
    entry = _object(given, where)
    cuts = _value(entry, "cuts", list, where)
    return TunedLayer(
        _shape(_value(entry, "shape", dict, where), f"{where}.shape"),
        _ring(_value(entry, "ring", dict, where), f"{where}.ring"),
        tuple(_cut(cut, f"{where}.cuts[{i}]") for i, cut in enumerate(cuts)),
    )


def _shape(given: Mapping[str, Any], where: str) -> Shape:
    texts = {"kind": KINDS, "state_dtype": STATE_DTYPES, "activation_dtype": STATE_DTYPES}
    values: dict[str, Any] = {
        field.name: _one_of(given, field.name, texts[field.name], where)
        if field.name in texts
        else _count(given, field.name, where)
        for field in fields(Shape)
    }
    return Shape(**values)


def _ring(given: Mapping[str, Any], where: str) -> Ring:
    batches = [_count({"batches": batch}, "batches", where) for batch in _value(given, "batches", list, where)]
    us = _value(given, "us", dict, where)
    for name, times in us.items():
        if not isinstance(times, list) or len(times) != len(batches) or not all(map(_is_time, times)):
            raise TunedFileError(f"{where}.us[{name!r}] is not a time for each of {len(batches)} batches")
    ring_dtype = _one_of(given, "ring_dtype", STATE_DTYPES, where)
    return Ring(_count(given, "ring_len", where), ring_dtype, batches, us)


def _cut(given: Any, where: str) -> Cut:
    entry = _object(given, where)
    block = _value(entry, "block", dict, where)
    if not all(isinstance(value, int) and 0 <= value < 2**16 for value in block.values()):
        raise TunedFileError(f"{where}.block holds something else than small whole numbers")
    if not _is_time(entry.get("us")) or not _is_time(entry.get("us_untuned")):
        raise TunedFileError(f"{where} has no times")
    return Cut(_count(entry, "batch", where), block, entry["us"], entry["us_untuned"])


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _count(given: Mapping[str, Any], name: str, where: str) -> int:
    value: int = _value(given, name, int, where)
    if isinstance(value, bool) or not 1 <= value < 2**31:
        raise TunedFileError(f"{_place(where, name)} is {value!r}")
    return value


def _one_of(given: Mapping[str, Any], name: str, choices: tuple[str, ...], where: str) -> str:
    value = _value(given, name, str, where)
    if value not in choices:
        raise TunedFileError(f"{_place(where, name)} is {value!r}, not one of {', '.join(choices)}")
    return value


def _value(given: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    value = given.get(name)
    if not isinstance(value, kind):
        raise TunedFileError(f"{_place(where, name)} is {'missing' if value is None else f'a {type(value).__name__}'}")
    return value


def _object(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise TunedFileError(f"{where} is a {type(given).__name__}")
    return given


def _place(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
