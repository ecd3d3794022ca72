"""The sum of a layer's input and output, made by the kernel of the norm that reads it.

A model's layers write ``x + f(norm(x))`` in their own code. The engine lets the embedding return a :class:`Stream`:
adding to one gives another whose sum isn't made yet; our norms make it and normalise it in one kernel; anything else
that looks at it makes it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.models.fused.check import Forward, own_forward

_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_SHAPES = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")}
_SHAPES |= {Tensor.size, Tensor.dim}


class Stream(Tensor):
    """``x + delta``, two tensors of one shape and dtype; its own elements are those of x, and nobody sees them.

    Attributes:
        x: the one.
        delta: the other; None once the sum is made, which is x then.
    """

    x: Tensor
    delta: Tensor | None

    @staticmethod
    def of(x: Tensor, delta: Tensor | None = None) -> Stream:
        """A stream; of a sum if there is a delta."""
        stream = x.as_subclass(Stream)
        stream.x, stream.delta = x, delta
        return stream

    def settle(self, total: Tensor) -> Tensor:
        """Somebody made the sum."""
        self.x, self.delta = total, None
        return total

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls in the place of its functions when one of their arguments is a stream."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SHAPES:
                return func(*args, **(kwargs or {}))
            if func in _ADDITIONS and not kwargs and len(args) == 2 and all(isinstance(a, Tensor) for a in args):
                stream, delta = map(plain, args)
                if stream.shape == delta.shape and stream.dtype == delta.dtype and stream.device == delta.device:
                    return Stream.of(stream, delta)
            args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
            return func(*args, **kwargs)


def plain(x: Any) -> Any:
    """A stream's sum as a tensor; anything else as it is."""
    if not isinstance(x, Stream):
        return x
    return x.x if x.delta is None else x.settle(x.x + x.delta)


def streamed_embedding(model: Any, _dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """The input embedding, with a forward that begins a stream."""
    module = model.get_input_embeddings()
    own = own_forward(module)
    if own is not None:
        yield module, lambda *args, **kwargs: Stream.of(own(*args, **kwargs))
