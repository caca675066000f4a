"""`sabia sft`: conversations into a model that answers as the assistant does in them."""

from typing import Annotated, Any

from sabia.cli.grammar import command, length, option
from sabia.cli.training_options import training
from sabia.core.shards.job import Job


@command(
    kind="train",
    examples="""
    sabia sft chats.jsonl --model base/ --epochs 2 -o run/
    sabia sft chats/ --model base/ --lr 2e-5 --validation held-out.parquet -o run/
    """,
)
@training(lr=2e-5, warmup="3%", weight_decay=0.0)
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
    *,
    training: dict[str, Any],
) -> None:
    """Fine-tune a model on conversations, with loss on the assistant only.

    Conversations are rendered by the chat template and packed into rows, where none sees another.
    Those without an assistant's answer, or longer than --length, are rejected with the reason.
    -o is a run directory as in pretrain; the same command again resumes or is done.
    """
    from sabia.core.recipes import sft as room
    from sabia.core.recipes.training_options import TrainOptions

    config = room.SftConfig(
        model=model,
        tokenizer=tokenizer,
        length=int(length),
        packed=packed,
        validation=validation,
        options=TrainOptions(**training),
    )
    room.run(job, config)
