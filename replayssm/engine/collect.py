"""Updates put together to whole outputs."""

from __future__ import annotations

from replayssm.engine.outputs import Completion, RequestOutput, Update
from replayssm.engine.request import Request


class Collector:
    """The output of one request, from its updates."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completions = [
            Completion(index, "", [], None if request.params.logprobs is None else [], None, None)
            for index in range(request.params.n)
        ]

    def take(self, update: Update) -> None:
        """Add what a step brought."""
        completion = self.completions[update.index]
        completion.text += update.text
        completion.token_ids += update.token_ids
        if completion.logprobs is not None:
            completion.logprobs += update.logprobs
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_reason
        completion.message = update.message

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        """The whole of it."""
        request = self.request

        def since_arrival(time: float | None) -> float:
            return 0.0 if time is None else time - request.arrived

        return RequestOutput(
            request_id=request.id,
            prompt_token_ids=request.prompt,
            completions=self.completions,
            cached_tokens=request.cached_tokens or 0,
            queue_seconds=since_arrival(request.started),
            ttft_seconds=since_arrival(request.first_token),
            seconds=since_arrival(request.ended),
        )
