"""`sabia pretrain`: token rows into a model."""

from typing import Annotated, Any

from sabia.cli.grammar import command, count, option
from sabia.cli.training_options import training
from sabia.core.shards.job import Job


@command(
    kind="train",
    examples="""
    sabia pretrain tokens/ --shape d=256,layers=6 --tokens 20M -o run/
    sabia pretrain tokens/ --model base/ --lr 1e-4 --validation held-out/ -o run/
    sabia pretrain tokens/ --model base/ --mix web=3,books=1 --then decay:maths=1,web=1 -o run/
    sabia pretrain tokens/ --shape d=64,layers=2 --steps 300 --search-mix regression -o mix/
    torchrun --nproc-per-node 8 -m sabia.cli.main pretrain tokens/ --model base/ \\
        --mesh fsdp=4,tensor=2 --precision bf16 --save-every auto -o run/
    """,
)
@training()
def pretrain(
    job: Job,
    model: Annotated[str, option("Go on from this model directory.", metavar="DIR")] = "",
    config_json: Annotated[
        str, option("Start from scratch by this config.json.", metavar="FILE")
    ] = "",
    shape: Annotated[
        str, option("Start from scratch: d=256,layers=6,heads=8,…", metavar="KEY=N,…")
    ] = "",
    tokenizer: Annotated[
        str, option("The rows' tokenizer (default: as they record).", metavar="DIR")
    ] = "",
    context: Annotated[
        str, option("Extend --model to this context.", metavar="TOKENS", show_default=False)
    ] = "",
    rope_theta: Annotated[
        float, option("Extend by this rotary base (default: YaRN).", min=0.0, show_default=False)
    ] = 0.0,
    mix: Annotated[str, option("Read sources by weight.", metavar="SOURCE=WEIGHT,…")] = "",
    then: Annotated[
        str, option("Other mixes later; WHEN: steps, 80% or decay.", metavar="WHEN:MIX;…")
    ] = "",
    max_repeat: Annotated[
        float,
        option(
            "Read no source more often than this.", metavar="TIMES", min=0.0, show_default=False
        ),
    ] = 0.0,
    search_mix: Annotated[
        str, option("Find a mix with small runs: regression or doremi.", metavar="NAME")
    ] = "",
    proxies: Annotated[int, option("Small runs of regression.", metavar="N")] = 24,
    target: Annotated[
        str, option("Whose loss the mix is to lower (default: all).", metavar="SOURCE=WEIGHT,…")
    ] = "",
    for_tokens: Annotated[
        float,
        count("Tokens of the run that the mix is for (with --max-repeat).", show_default=False),
    ] = "0",  # type: ignore[assignment]
    validation: Annotated[str, option("Token rows to validate on.", metavar="PATH")] = "",
    list_read: Annotated[
        bool, option("List the rows that -o has read, and train nothing.", "--list-read")
    ] = False,
    *,
    training: dict[str, Any],
) -> None:
    """Train a model on token rows.

    -o is a run directory: checkpoints/, metrics.jsonl and, at the end, final/ in Hugging Face
    form. The metrics also go to stdout as rows. The same command again resumes a run that was
    stopped or killed, on any mesh and either backend, and leaves a finished one as it is.
    """
    from sabia.core.errors import UsageError
    from sabia.core.recipes import pretrain as room
    from sabia.core.recipes.mixture_search import SearchConfig
    from sabia.core.recipes.training_options import TrainOptions
    from sabia.core.units import parse_length

    search = None
    if search_mix:
        search = SearchConfig(search_mix, proxies, target, int(for_tokens), max_repeat)
    elif target or for_tokens:
        raise UsageError("--target and --for-tokens belong to --search-mix")
    config = room.PretrainConfig(
        model=model,
        config_json=config_json,
        shape=shape,
        tokenizer=tokenizer,
        context=parse_length(context) if context else 0,
        rope_theta=rope_theta,
        mix=mix,
        stages=then,
        max_repeat=max_repeat,
        search=search,
        validation=validation,
        options=TrainOptions(**training),
    )
    (room.list_read if list_read else room.run)(job, config)
