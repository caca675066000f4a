"""`sabia pretrain`: token rows into a model."""

from typing import Annotated

from sabia.cli import training_options as given
from sabia.cli.grammar import command, option
from sabia.core.shards.job import Job


@command(
    kind="train",
    examples="""
    sabia pretrain tokens/ --shape d=256,layers=6 --tokens 20M -o run/
    sabia pretrain tokens/ --model base/ --lr 1e-4 --validation held-out/ -o run/
    torchrun --nproc-per-node 8 -m sabia.cli.main pretrain tokens/ --model base/ -o run/
    """,
)
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
    mix: Annotated[str, option("Read sources by weight.", metavar="SOURCE=WEIGHT,…")] = "",
    validation: Annotated[str, option("Token rows to validate on.", metavar="PATH")] = "",
    steps: given.Steps = 0,
    tokens: given.Tokens = "0",  # type: ignore[assignment]
    epochs: given.Epochs = 0.0,
    batch: given.Batch = 0,
    batch_tokens: given.BatchTokens = "0",  # type: ignore[assignment]
    micro_batch: given.MicroBatch = 0,
    lr: given.Lr = 6e-4,
    schedule: given.Schedule = "wsd",
    warmup: given.Warmup = "2%",
    decay: given.Decay = "20%",
    decay_shape: given.DecayShape = "linear",
    final_lr: given.FinalLr = 0.0,
    weight_decay: given.WeightDecay = 0.1,
    betas: given.Betas = "0.9,0.95",
    clip_norm: given.ClipNorm = 1.0,
    precision: given.Precision = "fp32",
    compiled: given.Compiled = False,
    remat: given.RematOption = "none",
    save_every: given.SaveEvery = "10m",
    keep_checkpoints: given.KeepCheckpoints = 2,
    eval_every: given.EvalEvery = 0,
    log_every: given.LogEvery = 1,
    peak_flops: given.PeakFlops = "0",  # type: ignore[assignment]
    export_dtype: given.ExportDtype = "float32",
) -> None:
    """Train a model on token rows.

    -o is a run directory: checkpoints/, metrics.jsonl and, at the end, final/ in Hugging Face
    form. The metrics also go to stdout as rows. The same command again resumes a run that was
    stopped or killed, and leaves a finished one as it is.
    """
    from sabia.core.recipes import pretrain as room
    from sabia.core.recipes.training import TrainOptions

    options = TrainOptions(
        lr=lr,
        schedule=schedule,
        warmup=warmup,
        decay=decay,
        decay_shape=decay_shape,
        final_lr=final_lr,
        weight_decay=weight_decay,
        betas=betas,
        clip_norm=clip_norm,
        batch=batch,
        batch_tokens=int(batch_tokens),
        micro_batch=micro_batch,
        steps=steps,
        tokens=int(tokens),
        epochs=epochs,
        precision=precision,
        compiled=compiled,
        remat=remat,
        save_every=save_every,
        keep_checkpoints=keep_checkpoints,
        eval_every=eval_every,
        log_every=log_every,
        peak_flops=peak_flops,
        export_dtype=export_dtype,
    )
    config = room.PretrainConfig(
        model=model,
        config_json=config_json,
        shape=shape,
        tokenizer=tokenizer,
        mix=mix,
        validation=validation,
        options=options,
    )
    room.run(job, config)
