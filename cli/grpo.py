"""`sabia grpo`: reinforcement learning with verifiers and rubrics."""

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
    """Train a model by reinforcement learning (GRPO) on prompts with verifiable answers.

    Each step samples a group of answers for each prompt, and grades them with a verifier or with
    the rubric of the record. Answers with a reward above the mean of their group become more
    likely. The samples are written to samples/ in the run directory. The same command run again
    resumes an interrupted run and does nothing if the run is complete.
    """
    from sabia.core.recipes.grpo.policy_run import run

    run(job, options)
