"""`sabia sft`: conversations into a model that answers as the assistant does in them."""

from typing import Annotated

from sabia.cli import training_options as given
from sabia.cli.grammar import command, length, option
from sabia.core.shards.job import Job


@command(
    kind="train",
    examples="""
    sabia sft chats.jsonl --model base/ --epochs 2 -o run/
    sabia sft chats/ --model base/ --lr 2e-5 --validation held-out.parquet -o run/
    """,
)
def sft(
    job: Job,
    model: Annotated[str, option("The model directory to start from.", metavar="DIR")],
    tokenizer: Annotated[
        str, option("Tokenizer with a chat template (default: the model's).", metavar="DIR")
    ] = "",
    length: Annotated[int, length("Most tokens of a conversation, and of a row.")] = "2k",  # type: ignore[assignment]
    packed: Annotated[
        bool, option("Several conversations a row, or one.", "--pack/--no-pack")
    ] = True,
    validation: Annotated[str, option("Chat records to validate on.", metavar="PATH")] = "",
    steps: given.Steps = 0,
    tokens: given.Tokens = "0",  # type: ignore[assignment]
    epochs: given.Epochs = 0.0,
    batch: given.Batch = 0,
    batch_tokens: given.BatchTokens = "0",  # type: ignore[assignment]
    micro_batch: given.MicroBatch = 0,
    lr: given.Lr = 2e-5,
    schedule: given.Schedule = "wsd",
    warmup: given.Warmup = "3%",
    decay: given.Decay = "20%",
    decay_shape: given.DecayShape = "linear",
    final_lr: given.FinalLr = 0.0,
    weight_decay: given.WeightDecay = 0.0,
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
    """Fine-tune a model on conversations, with loss on the assistant only.

    Conversations are rendered by the chat template and packed into rows, where none sees another.
    Those without an assistant's answer, or longer than --length, are rejected with the reason.
    -o is a run directory as in pretrain; the same command again resumes or is done.
    """
    from sabia.core.recipes import sft as room
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
    config = room.SftConfig(
        model=model,
        tokenizer=tokenizer,
        length=int(length),
        packed=packed,
        validation=validation,
        options=options,
    )
    room.run(job, config)
