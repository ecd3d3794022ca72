"""`python -m tests.serve_fake SECONDS_PER_TOKEN [option=value ...]`: a server over the fake engine, to send signals to.

Its address is its first line of output; after a clean end it prints what was left running.
"""

import asyncio
import sys

from replayssm.server.logs import configure
from replayssm.server.options import ServerOptions
from replayssm.server.run import Server, bind, url
from replayssm.server.service import make_service
from tests.serving import CONTEXT, FakeEngine, loaded_tokenizer


async def main(seconds: float, options: ServerOptions) -> None:
    engine = FakeEngine(seconds)
    bound = bind(options)
    server = Server(make_service(engine, loaded_tokenizer(), CONTEXT, options))
    await server.serve(bound, lambda: print(url(bound), flush=True))
    print(f"left running: {len(engine.running)}", flush=True)


if __name__ == "__main__":
    seconds, *settings = sys.argv[1:]
    given = {name: float(value) for name, value in (setting.split("=") for setting in settings)}
    configure("json")
    asyncio.run(main(float(seconds), ServerOptions(port=0, log_format="json", **given)))
