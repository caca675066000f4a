"""`sabia serve`: load a model and serve it, with `--mesh` by several devices.

Under torch each process along `tensor` holds its part of the model and makes the same steps; the
first one has the endpoint. JAX has one process, with all devices.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from sabia.core import notes, stop, units
from sabia.core.errors import Interrupted, UsageError
from sabia.core.generate.engine import PAGES_SHARE, Engine
from sabia.core.generate.model_directory import load_draft, load_engine
from sabia.core.generate.slots import CONTEXT_STEP
from sabia.core.options.serve import LOOPBACK, ServeOptions
from sabia.core.parallel.split_interface import SplitModel
from sabia.core.serve.followers import Others, follow, packed, served_session
from sabia.core.serve.http_server import ENDED, serve
from sabia.core.shards.job import Job
from sabia.core.spec import load_spec

SAMPLES = 8  # that the default context leaves room for


def run(job: Job, options: ServeOptions) -> None:
    """Serve until a stop signal."""
    if not options.mesh:
        serve_model(options)
        return
    # only with a mesh, because these load what trains
    from sabia.core.parallel import process_group
    from sabia.core.parallel.health.watchdog import WatchdogConfig
    from sabia.core.parallel.mesh import parse_mesh
    from sabia.core.parallel.split_model import split_model
    from sabia.core.parallel.world import detect
    from sabia.core.recipes.run_call import joined

    if others := [axis for axis in parse_mesh(options.mesh) if axis != "tensor"]:
        raise UsageError(f"--mesh: {options.mesh}: axis {others[0]} (expected tensor=N)")
    spec, world = load_spec(options.model), detect()
    if options.backend == "jax" and world.size > 1:
        raise UsageError(
            f"--mesh: {options.mesh}: {world.size} processes of JAX (expected one, which has all "
            "devices)"
        )
    equal = {"options": json.dumps(options.recorded(), default=str), "model": str(spec.config)}
    config = WatchdogConfig(equal, hang_timeout_s=process_group.LONGEST.total_seconds())
    with process_group.library_output_to_stderr(world), joined(job, world, config) as mesh:
        split = split_model(options.backend, spec, mesh, world) if mesh.size > 1 else None
        if world.size == 1:
            serve_model(options, split)
            return
        give = process_group.broadcaster()

        def agree(error: str) -> str:
            return next(filter(None, process_group.gather_objects(world, error)), "")

        if world.leads:
            serve_model(options, split, Others(lambda message: give(packed(message)), agree))
        engine, context, samples = opened(options, split)
        with stop.polling("serve"):
            follow(engine, served_session(engine, samples, context), lambda: give(None), agree)
        raise Interrupted(ENDED)


def serve_model(
    options: ServeOptions, split: SplitModel | None = None, others: Others | None = None
) -> None:
    """Serve a model, of which split and others hold parts."""
    token = os.environ.get(options.token_env, "")
    if options.host not in LOOPBACK and not token:
        raise UsageError(
            f"--host: {options.host} can be reached by others (expected a token of clients in the "
            f"environment variable {options.token_env})"
        )
    engine, context, samples = opened(options, split)
    name = served_name(options)
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
    serve(engine, name, address, context, samples, options.queue, token, ready, updates, others)


def served_name(options: ServeOptions) -> str:
    """The name of the model in requests."""
    return options.name or Path(options.model).resolve().name


def opened(options: ServeOptions, split: SplitModel | None) -> tuple[Engine, int, int]:
    """The engine of the options, with the context and the samples of its session."""
    adapters = adapter_directories(options.adapter, served_name(options))
    engine = load_engine(options.model, options.dtype, adapters, options.backend, split)
    engine.draft = load_draft(options, engine, options.dtype, options.backend)
    if options.cache_memory is not None:
        engine.cache_bytes = options.cache_memory
    return engine, *sizes(engine, options)


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
    longest = engine.spec.max_positions
    further = range(2 * CONTEXT_STEP, longest + CONTEXT_STEP, CONTEXT_STEP)
    fitting = bisect_right(further, memory, key=engine.row_bytes)
    return min((1 + fitting) * CONTEXT_STEP, longest)
