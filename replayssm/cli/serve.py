"""`replayssm serve`: options and checks; :mod:`replayssm.server` serves."""

import os
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console

from replayssm.cli.early import check_backend, check_drafter
from replayssm.cli.values import INTEGER, MODEL, NAMES, NUMBER, SIZE
from replayssm.engine.options import SPECULATE, EngineOptions
from replayssm.errors import InputError
from replayssm.loading.folder import check_model
from replayssm.options import BACKENDS, DEVICES, DTYPES, RING_DTYPES, STATE_DTYPES, LoadOptions, check_drafts_are_used
from replayssm.server.options import LOG_FORMATS, ServerOptions

KEY_VARIABLE = "REPLAYSSM_API_KEY"
NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def serve(
    model: Annotated[str, MODEL] = NAMES[0],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(**INTEGER, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar=KEY_VARIABLE, help="Key that requests must have; may be given several times."
        ),
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="Name of the model in requests. [default: its own]")] = None,
    max_requests: Annotated[int, typer.Option(**INTEGER, help="Samples answered or waiting at once.")] = 512,
    max_body: Annotated[int, typer.Option(**SIZE, help="Largest request body.")] = "4MiB",  # type: ignore[assignment]
    max_tokens: Annotated[
        int | None, typer.Option(**INTEGER, help="Most new tokens of a sample. [default: the context]")
    ] = None,
    default_max_tokens: Annotated[int, typer.Option(**INTEGER, help="Of a chat request that doesn't say.")] = 1024,
    request_seconds: Annotated[float, typer.Option(**NUMBER, help="Longest time of a request.")] = 600.0,
    body_seconds: Annotated[float, typer.Option(**NUMBER, help="Longest time for a body to arrive.")] = 30.0,
    drain_seconds: Annotated[float, typer.Option(**NUMBER, help="For requests to finish after a signal.")] = 30.0,
    log_format: Annotated[str, typer.Option(help=f"One of {', '.join(LOG_FORMATS)}.")] = "text",
    dtype: Annotated[str, typer.Option(help=f"Of the model: {', '.join(DTYPES)}; auto on a CPU: float32.")] = "auto",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "auto",
    ring_len: Annotated[int, typer.Option(**INTEGER, help="L: the state is written once in L steps.")] = 16,
    state_dtype: Annotated[str, typer.Option(help=f"Of checkpoints: {', '.join(STATE_DTYPES)}.")] = "float32",
    ring_dtype: Annotated[str, typer.Option(help=f"Of update vectors: {', '.join(RING_DTYPES)}.")] = "auto",
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(BACKENDS)}.")] = "auto",
    memory: Annotated[
        int | None, typer.Option(**SIZE, help="For states, snapshots and pages. [default: a share of what is free]")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(**INTEGER, help="Tokens of a prompt and its answer. [default: the model's]")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(**INTEGER, help="Samples computed at once. [default: what fits]")
    ] = None,
    max_step_tokens: Annotated[
        int | None,
        typer.Option(**INTEGER, help="Tokens of all samples in a step. [default: 2048, on a GPU up to 8192]"),
    ] = None,
    speculate: Annotated[str | None, typer.Option(help=f"Draft tokens ahead by {', '.join(SPECULATE)}.")] = None,
    num_draft: Annotated[int, typer.Option(**INTEGER, help="Tokens drafted ahead, at most.")] = 3,
    fixed_draft: Annotated[
        bool, typer.Option("--fixed-draft", help="Always draft --num-draft tokens, though it may not pay.")
    ] = False,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Keep no prefixes.")] = False,
    no_graphs: Annotated[bool, typer.Option("--no-graphs", help="Capture no CUDA graphs.")] = False,
    no_replay: Annotated[bool, typer.Option("--no-replay", help="Write the state at every token.")] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The same bits whatever shares the batch; slower.")
    ] = False,
) -> None:
    """Serve a model over HTTP, in the form of OpenAI's API."""
    if not api_key and KEY_VARIABLE in os.environ:  # a key that was meant and is lost would leave the door open
        raise InputError(f"{KEY_VARIABLE} is empty: a key is wanted, or the variable unset")
    if speculate is None:
        check_drafts_are_used(num_draft=num_draft, fixed_draft=fixed_draft)
    options = ServerOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        served_name=served_name,
        max_body_bytes=max_body,
        body_seconds=body_seconds,
        request_seconds=request_seconds,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        max_requests=max_requests,
        drain_seconds=drain_seconds,
        log_format=log_format,
    )
    engine_options = EngineOptions(
        ring_len=ring_len,
        state_dtype=state_dtype,
        ring_dtype=ring_dtype,
        backend=backend,
        max_rows=max_rows,
        max_context=max_context,
        max_step_tokens=max_step_tokens,
        memory_bytes=memory,
        prefix_cache=not no_prefix_cache,
        replay=not no_replay,
        speculate=speculate,  # type: ignore[arg-type]  # checked by EngineOptions
        num_draft=num_draft,
        fixed_draft=fixed_draft,
        graphs=False if no_graphs else "auto",
        batch_invariant=batch_invariant,
    )
    load_options = LoadOptions(dtype=dtype, device=device)
    check_extra()
    check_model(model)
    check_backend(backend, device)
    check_drafter(model, speculate)

    from replayssm.server.logs import configure
    from replayssm.server.run import bind, run

    with bind(options) as bound:  # a port that is taken is told before a model loads
        configure(options.log_format)

        from replayssm.engine import Engine
        from replayssm.loading import load_model, use_fitting_threads

        with Console(stderr=True).status(f"loading {model} ..."):
            loaded = load_model(model, load_options)
            use_fitting_threads(loaded)
            engine = Engine(loaded, engine_options)
        run(engine, options, bound)


def check_extra() -> None:
    """Refuse to serve without the packages for it.

    Raises:
        InputError: says what to install.
    """
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise InputError(
            f"serve needs {', '.join(missing)}, not installed here: pip install 'replayssm[serve]' brings all of it"
        )
