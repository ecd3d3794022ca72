"""Logit bias and `min_tokens`: short lists of tokens whose logits are changed, up to a place in the sequence.

R rows of the engine, E edits per row, n rows of a part, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.engine.params import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, SamplingParams
from replayssm.engine.transfer import to_device

ALWAYS = 2**31 - 1  # later than any place
NEVER = float("-inf")
MAX_EOS = 64  # more than any model has


class LogitEdits:
    """Lists of edits by row.

    Attributes:
        tables: ``[R, E]`` each: tokens (int64), values (fp32) and ends (int32). They are widened for the longest list.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        kinds = (torch.int64, torch.float32, torch.int32)
        self.tables = [torch.zeros(max_rows, 0, dtype=dtype, device=device) for dtype in kinds]

    @staticmethod
    def max_bytes(max_rows: int) -> int:
        """The most it holds, while it grows."""
        longest = _power_of_two(MAX_BIASED_TOKENS + MAX_STOP_TOKEN_IDS + MAX_EOS)
        return max_rows * longest * (8 + 4 + 4) * 3 // 2

    def join(self, row: int, edits: Sequence[tuple[int, float, int]]) -> None:
        """Replace a row's list of (token, value, first place that is not edited)."""
        missing = _power_of_two(len(edits)) - self.tables[0].shape[1]
        if missing > 0:
            self.tables = [F.pad(table, (0, missing)) for table in self.tables]
        # Adding 0 to token 0 changes nothing.
        padded = [*edits, *[(0, 0.0, 0)] * (self.tables[0].shape[1] - len(edits))]
        for table, column in zip(self.tables, zip(*padded, strict=True), strict=True):
            table[row].copy_(to_device(column, table.dtype, self.device))

    def apply(self, logits: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Edit logits ``[n, V]`` of the tokens at ``positions [n]``, in place.

        The order in which a token's edits are added doesn't matter: at most one of them is neither 0 nor −inf.
        """
        tokens, values, ends = (table.index_select(0, rows) for table in self.tables)
        logits.scatter_add_(1, tokens, values.masked_fill_(ends <= positions[:, None], 0))


def edits_of(params: SamplingParams, prompt_tokens: int, eos_token_ids: Sequence[int]) -> list[tuple[int, float, int]]:
    """What a request's logit bias and min_tokens change."""
    edits = [(token, bias, ALWAYS) for token, bias in params.logit_bias.items()]
    if params.min_tokens:
        ends = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, *eos_token_ids}
        edits += [(token, NEVER, prompt_tokens + params.min_tokens) for token in sorted(ends)]
    return edits


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
