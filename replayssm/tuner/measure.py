"""Times of steps on the GPU, taken as `replayssm bench decode` does: CUDA graphs over more memory than it caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from replayssm.backends.cuda import blocks, cuts, decode
from replayssm.backends.cuda.blocks import Block
from replayssm.bench.check import LARGEST_ERROR, first_step_errors
from replayssm.bench.contenders import Ours, Prepared
from replayssm.bench.decode import LEAST_CALLS
from replayssm.bench.measure import WORKING_SET
from replayssm.bench.timing import Walk, make_room, recorded, time_in_turns, unused_bytes
from replayssm.bench.workload import Workload, num_calls
from replayssm.ops import known
from replayssm.state import StateDtypes, layer_bytes
from replayssm.tuner.ahead import Compilers, usual_block
from replayssm.tuner.search import Call

SHARE = 0.5  # of the GPU's memory that one walk may take, at most


@dataclass(frozen=True)
class GpuTimer:
    """Measures with the cuda backend, on one GPU.

    Args:
        device: the GPU.
        compilers: for its kernels.
        replays: of each walk.
    """

    device: torch.device
    compilers: Compilers
    replays: int

    def cuts(self, call: Call) -> list[Block]:
        about = self.compilers.about
        usual = usual_block(call, about)
        found = blocks.candidates(call.shape, call.activation_dtype, about.shared_bytes)
        return [block for block in found if block != usual]

    def expect(self, asked: Iterable[tuple[Call, Sequence[Block | None]]]) -> None:
        self.compilers.compile(asked)

    def microseconds(self, call: Call, cuts: Sequence[Block | None]) -> list[float | None]:
        make_room(self.device)
        walks: dict[int, Walk] = {}
        with torch.inference_mode():
            workload = self._workload(call)
            prepared = Ours("cuda", ring_dtype=call.ring_dtype).prepare(workload)
            for i, block in enumerate(cuts):
                walk = self._walk(workload, prepared, block)
                if walk is not None:
                    walks[i] = walk
            seconds = dict(zip(walks, time_in_turns([*walks.values()], self.replays, self.device), strict=True))
        each = {i: 1e6 * median(taken) / workload.calls for i, taken in seconds.items()}
        return [round(each[i], 2) if i in each else None for i in range(len(cuts))]

    def _walk(self, workload: Workload, prepared: Prepared, block: Block | None) -> Walk | None:
        """None for a cut that fails or is wrong."""
        with cut_as(block):
            try:
                errors = first_step_errors(workload, prepared)
                is_right = max(errors) <= LARGEST_ERROR and all(plan.launch for plan in decode._plans.values())
                return recorded(prepared.walk, self.device) if is_right else None
            except RuntimeError:  # the GPU refuses it
                return None

    def _workload(self, call: Call) -> Workload:
        """As many calls as fill the working set, if there is the memory."""
        dtypes = StateDtypes.choose(call.state_dtype, call.activation_dtype, call.ring_dtype)
        size = layer_bytes(call.spec, dtypes, call.ring_len)
        state = size.checkpoint * call.batch
        room = SHARE * free_bytes(self.device) / (size.total * call.batch)
        wanted = min(max(WORKING_SET[self.device.type], LEAST_CALLS * state), room * state)
        calls = num_calls(call.batch, (call.ring_len,), state, wanted)
        dtype = call.activation_dtype
        return Workload(call.kind, call.spec, call.batch, call.state_dtype, call.ring_len, dtype, self.device, calls)


def free_bytes(device: torch.device) -> int:
    """What new tensors can have: memory that is free, or that PyTorch keeps unused."""
    return torch.cuda.mem_get_info(device)[0] + unused_bytes(device)


@contextmanager
def cut_as(block: Block | None) -> Iterator[None]:
    """Steps inside are cut so, and as ever with None; what was planned before is planned anew after."""
    _forget()
    with cuts.cut_as(block):
        yield
    _forget()


def _forget() -> None:
    decode._plans.clear()
    known.forget()
