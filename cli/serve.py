"""`sabia serve`: an OpenAI-compatible endpoint over the engine."""

from sabia.cli.command import command
from sabia.core.options.serve import ServeOptions
from sabia.core.shards.job import Job


@command(
    ServeOptions,
    examples="""
    sabia serve --model run/final
    sabia serve --model run/final --name tutor --port 8001 --dtype bfloat16 --context 4096
    torchrun --nproc-per-node 2 -m sabia.cli.main serve --model large --mesh tensor=2
    SABIA_SERVE_TOKEN=... sabia serve --model run/final --host 0.0.0.0
    """,
)
def serve(job: Job, options: ServeOptions) -> None:
    """Serve a model behind an OpenAI-compatible endpoint.

    It answers /v1/chat/completions, /v1/completions (with `echo` and `logprobs`) and /v1/models,
    whole or as a stream, with tool calls and reasoning read back by the chat template; /metrics has
    figures in the text format of Prometheus. Samples of all requests are decoded together, and the
    same seed gives the same tokens in any company. A parameter that is not supported is refused by
    name. It uses one device, or several with `--mesh`; for many users use vLLM or SGLang, with
    which the other commands work in the same way. SIGTERM finishes the requests that run, and
    refuses those that wait; exit code 75.
    """
    from sabia.core.recipes.serve_model import run

    run(job, options)
