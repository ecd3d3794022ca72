"""What a generation with speculation gives, and how often it guessed right."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Statistics:
    """What speculation did. A row step is one row's part in a step.

    Attributes:
        steps: windows of the whole batch.
        row_steps: rows with work, over all steps.
        drafted_steps: row steps that had drafts.
        drafted: drafted tokens, all candidates of a tree counted.
        accepted: accepted ones.
        new_tokens: tokens that were returned, those of the prefill included.
        tokens_from_steps: those of them that came from windows, rather than from a prefill.
        accepted_at: how often the draft at each depth from 1 was accepted.
    """

    steps: int = 0
    row_steps: int = 0
    drafted_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    new_tokens: int = 0
    tokens_from_steps: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Accepted drafts and the token after them, per row step that had drafts."""
        return 1 + self.accepted / self.drafted_steps if self.drafted_steps else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per row step. Those that a stop or `max_new_tokens` cut off don't count, nor do the prefill's."""
        return self.tokens_from_steps / self.row_steps if self.row_steps else 0.0

    def count_step(self, counts: list[int], depths: list[int], used: list[int]) -> None:
        """One step.

        Args:
            counts: tokens kept of each row's window, 0 for a row without work.
            depths: how deep each row's drafts went.
            used: tokens in each row's window.
        """
        self.steps += 1
        self.row_steps += sum(count > 0 for count in counts)
        self.drafted_steps += sum(depth > 0 for depth in depths)
        self.drafted += sum(max(0, tokens - 1) for tokens in used)
        for count in counts:
            accepted = max(0, count - 1)
            self.accepted += accepted
            self.accepted_at += [0] * (accepted - len(self.accepted_at))
            for depth in range(accepted):
                self.accepted_at[depth] += 1


@dataclass(frozen=True)
class Generation:
    """New tokens of each row, the end token included where one came, and how they came about."""

    tokens: list[list[int]]
    statistics: Statistics
