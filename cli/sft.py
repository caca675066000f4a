"""`sabia sft`: fine-tune a model on conversations."""

from sabia.cli.command import command
from sabia.core.options.sft import SftOptions
from sabia.core.shards.job import Job


@command(
    SftOptions,
    examples="""
    sabia sft chats.jsonl --model base/ --epochs 2 -o run/
    sabia sft chats/ --model base/ --lr 2e-5 --validation held-out.parquet -o run/
    """,
)
def sft(job: Job, options: SftOptions) -> None:
    """Fine-tune a model on conversations, with a loss on the assistant's tokens only.

    Conversations are rendered with the chat template of the model and packed into rows, with
    attention within each conversation only. Conversations without an assistant message, or longer
    than --length, are rejected with the reason. The same command run again resumes an interrupted
    run and does nothing if the run is complete.
    """
    from sabia.core.recipes.sft import run

    run(job, options)
