"""`sabia grpo`: reinforcement learning from verifiers and rubrics."""

from sabia.cli.command import command
from sabia.core.options.grpo import GrpoOptions
from sabia.core.shards.job import Job


@command(
    GrpoOptions,
    examples="""
    sabia grpo sums.jsonl --model sft/final --reward exact --steps 60 --max-new-tokens 8 -o run/
    sabia grpo gsm8k.parquet --model base/ --reward number --prompts 64 --group 8 -o run/
    sabia grpo prompts.jsonl --model base/ --reward rubric --judge-url http://localhost:8000/v1 \\
        --judge-model NAME -o run/
    """,
)
def grpo(job: Job, options: GrpoOptions) -> None:
    """Improve a model on prompts whose answers can be graded.

    Each step samples groups of answers, grades them by a verifier against the record's answer or
    by the record's rubric, and makes what is better than its group's mean more likely. The run
    directory also holds samples/, rows of every sample. The same command again resumes a run that
    was stopped, and leaves a finished one as it is.
    """
    from sabia.core.recipes import grpo as stage

    stage.run(job, options)
