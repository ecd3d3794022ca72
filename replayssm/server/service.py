"""What all requests of one server share."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from replayssm.loading import LoadedModel
from replayssm.server.contract import ServedEngine
from replayssm.server.limits import Gate
from replayssm.server.metrics import Metrics
from replayssm.server.options import ServerOptions
from replayssm.server.prompts import PromptReader
from replayssm.server.tokens import TokenTexts


@dataclass
class Service:
    """One model behind one engine.

    Attributes:
        name: the model's, as requests give it.
        max_context: tokens that a request may have, its prompt's and new ones.
        stopping: set when the server is about to end.
    """

    engine: ServedEngine
    options: ServerOptions
    name: str
    max_context: int
    reader: PromptReader
    texts: TokenTexts
    gate: Gate
    metrics: Metrics
    created: int
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def draining(self) -> bool:
        """Whether the server is about to end."""
        return self.stopping.is_set()


def make_service(engine: ServedEngine, loaded: LoadedModel, max_context: int, options: ServerOptions) -> Service:
    gate = Gate(options.max_requests)
    return Service(
        engine=engine,
        options=options,
        # A folder's path says more about this machine than a client should know.
        name=options.served_name or Path(loaded.name).name,
        max_context=max_context,
        reader=PromptReader(loaded.tokenizer, options.max_requests),
        texts=TokenTexts(loaded.tokenizer),
        gate=gate,
        metrics=Metrics(engine.stats, lambda: gate.inside),
        created=int(time.time()),
    )
