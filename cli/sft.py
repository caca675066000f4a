"""`sabia sft`: fine-tune a model on conversations or preferences; its subcommands."""

from sabia.cli.command import command
from sabia.core.options.sft import MergeOptions, SftOptions, TeacherOptions
from sabia.core.shards.job import Job


@command(
    SftOptions,
    examples="""
    sabia sft chats.jsonl --model base/ --epochs 2 -o run/
    sabia sft chats/ --model base/ --lr 2e-5 --validation held-out.parquet -o run/
    sabia sft pairs.parquet --loss dpo --model run/final --validation held-out.parquet -o dpo/
    sabia sft pairs.parquet --loss reward --model run/final --lr 1e-5 -o reward/
    sabia sft scored.parquet --loss distill --model small/ -o student/
    """,
)
def sft(job: Job, options: SftOptions) -> None:
    """Fine-tune a model on conversations, with a loss on the assistant's tokens only, or on
    preferences (--loss).

    Conversations are rendered with the chat template of the model and packed into rows, with
    attention within each conversation only. Conversations without an assistant message, or longer
    than --length, are rejected with the reason, and so are pairs of equal answers. The same command
    run again resumes an interrupted run and does nothing if the run is complete.
    """
    from sabia.core.recipes.sft import run

    run(job, options)


@command(
    TeacherOptions,
    examples="""
    sabia sft teacher chats.jsonl --teacher big/ -o scored.parquet
    sabia sft teacher chats/ --teacher big/ --top 50 -o scored/
    """,
)
def sft_teacher(job: Job, options: TeacherOptions) -> None:
    """Write the predictions of a model for conversations, as records for sabia sft --loss distill.

    A record has the tokens of a conversation, rendered with the model's chat template, and at each
    token of the assistant the model's likeliest tokens with their log-probabilities. The trained
    model must have the same tokenizer.
    """
    from sabia.core.recipes.distillation.teacher_records import run

    run(job, options)


@command(
    MergeOptions,
    examples="""
    sabia sft merge run-a/final run-b/final -o merged/
    sabia sft merge a/ b/ --method slerp --weights 0.3,0.7 --for 'mlp=0.5,0.5' -o merged/
    sabia sft merge a/ b/ c/ --method ties --base base/ --density 20% -o merged/
    sabia sft merge run/ --checkpoints 5 -o averaged/
    """,
)
def sft_merge(job: Job, options: MergeOptions) -> None:
    """Merge models of one shape, or the last checkpoints of a run.

    INPUT is model directories with equal configurations and tokenizers, or with --checkpoints a run
    directory. Tensors are read, merged and written one by one, so that the models may be larger
    than the memory.
    """
    from sabia.core.recipes.merging.merge_models import run

    run(job, options)
