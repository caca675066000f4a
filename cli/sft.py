"""`sabia sft`: conversations into a model that answers as the assistant does in them."""

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
    """Fine-tune a model on conversations, with loss on the assistant only.

    Conversations are rendered by the chat template and packed into rows, where none sees another.
    Those without an assistant's answer, or longer than --length, are rejected with the reason. The
    same command again resumes a run that was stopped, and leaves a finished one as it is.
    """
    from sabia.core.recipes import sft as stage

    stage.run(job, options)
