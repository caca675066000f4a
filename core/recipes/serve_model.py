"""`sabia serve`: load a model and serve it."""

import os
from collections.abc import Sequence
from pathlib import Path

from sabia.core import notes, units
from sabia.core.errors import UsageError
from sabia.core.generate.engine import PAGES_SHARE, Engine
from sabia.core.generate.model_directory import load_draft, load_engine
from sabia.core.generate.slots import CONTEXT_STEP
from sabia.core.options.serve import LOOPBACK, ServeOptions
from sabia.core.serve.http_server import serve

SAMPLES = 8  # that the default context leaves room for


def run(options: ServeOptions) -> None:
    """Serve until a stop signal."""
    token = os.environ.get(options.token_env, "")
    if options.host not in LOOPBACK and not token:
        raise UsageError(
            f"--host: {options.host} can be reached by others (expected a token of clients in the "
            f"environment variable {options.token_env})"
        )
    name = options.name or Path(options.model).resolve().name
    adapters = adapter_directories(options.adapter, name)
    engine = load_engine(options.model, options.dtype, adapters, options.backend)
    engine.draft = load_draft(options, engine, options.dtype, options.backend)
    if options.cache_memory is not None:
        engine.cache_bytes = options.cache_memory
    context, samples = sizes(engine, options)

    memory = samples * engine.row_bytes(context)

    def ready(port: int) -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host  # of IPv6
        address = f"http://{host}:{port}/v1"
        notes.say(
            f"serving {name} at {address}: contexts of {context:,} tokens, {samples} samples "
            f"together, {units.format_bytes(memory)} for keys and values"
        )

    updates = Path(options.updates) if options.updates else None
    if updates is not None and not updates.is_dir():
        raise UsageError(f"--updates: {updates} is not a directory")
    address = options.host, options.port
    serve(engine, name, address, context, samples, options.queue, token, ready, updates)


def adapter_directories(given: Sequence[str], model: str) -> dict[str, str]:
    """The directories of adapters by name, from NAME=DIR. Raises UsageError."""
    adapters = dict[str, str]()
    for text in given:
        name, _, directory = text.partition("=")
        if not name or not directory or name in {model, *adapters}:
            raise UsageError(f"--adapter: {text} (expected NAME=DIR, with a name of its own)")
        adapters[name] = directory
    return adapters


def sizes(engine: Engine, options: ServeOptions) -> tuple[int, int]:
    """(context, samples) that fit into the memory of the cache beside its pages. Raises
    UsageError."""
    longest = engine.spec.max_positions
    memory = engine.cache_bytes - engine.cache_bytes // PAGES_SHARE
    context = options.context or _context_for(engine, memory // SAMPLES)
    if context > longest:
        raise UsageError(f"--context: {context} (expected at most {longest}, that of the model)")
    context = -(-context // CONTEXT_STEP) * CONTEXT_STEP
    needed = engine.row_bytes(context)
    if needed > memory:
        least = -(-needed * PAGES_SHARE // (PAGES_SHARE - 1))
        raise UsageError(
            f"--cache-memory: {units.format_bytes(engine.cache_bytes)}; a sample of {context} "
            f"tokens needs {units.format_bytes(least)} (expected at least as much, or a smaller "
            "--context)"
        )
    return context, min(options.samples, memory // needed)


def _context_for(engine: Engine, memory: int) -> int:
    """The longest context whose sample fits the memory, one step at least."""
    least, most = 1, -(-engine.spec.max_positions // CONTEXT_STEP)
    while least < most:
        middle = (least + most + 1) // 2
        if engine.row_bytes(middle * CONTEXT_STEP) <= memory:
            least = middle
        else:
            most = middle - 1
    return min(least * CONTEXT_STEP, engine.spec.max_positions)
