"""`sabia grpo`: reinforcement learning from verifiers and rubrics."""

from typing import Annotated

from sabia.cli.grammar import command, count, fraction, money, option
from sabia.cli.training_options import kind
from sabia.core.shards.job import Job


@command(
    kind="train",
    examples="""
    sabia grpo sums.jsonl --model sft/final --reward exact --steps 60 --max-new-tokens 8 -o run/
    sabia grpo gsm8k.parquet --model base/ --reward number --prompts 64 --group 8 -o run/
    sabia grpo prompts.jsonl --model base/ --reward rubric --judge-url http://localhost:8000/v1 \\
        --judge-model NAME -o run/
    """,
)
def grpo(
    job: Job,
    model: Annotated[str, option("The model directory to start from.", metavar="DIR")],
    reward: Annotated[
        str,
        option(
            "exact, number, contains, regex, choice, json or rubric; a mix: number=0.8,regex=0.2.",
            metavar="KIND",
        ),
    ] = "exact",
    steps: Annotated[int, option("Steps to train.", metavar="N", min=1)] = 100,
    prompts: Annotated[int, option("Prompts in a step.", metavar="N", min=1)] = 32,
    group: Annotated[int, option("Samples of each prompt.", metavar="N", min=2)] = 16,
    max_new_tokens: Annotated[int, option("Most tokens of a sample.", metavar="N", min=1)] = 256,
    temperature: Annotated[float, option("Of the sampling.", metavar="T")] = 1.0,
    updates: Annotated[int, option("Updates a step, on parts of it.", metavar="N", min=1)] = 1,
    advantage: Annotated[
        str, option("mean (of the group, taken off) or std (divided by it too).", metavar="NAME")
    ] = "mean",
    aggregation: Annotated[
        str, option("Sum of the token losses: token, seq-mean or dr.", metavar="NAME")
    ] = "token",
    ratio: Annotated[
        str, option("Of each token, or of the sequence (GSPO).", metavar="NAME")
    ] = "token",
    clip_low: Annotated[float, option("Clip of the ratio below 1.", metavar="X")] = 0.2,
    clip_high: Annotated[float, option("Clip of the ratio above 1.", metavar="X")] = 0.28,
    dual_clip: Annotated[
        float, option("Bound of the loss of bad samples; 0: none.", metavar="X", min=0.0)
    ] = 0.0,
    beta: Annotated[
        float, option("Weight of the KL to the starting model.", metavar="X", min=0.0)
    ] = 0.0,
    correction: Annotated[
        str,
        option(
            "For a sampler that differs: none, token-cap, sequence-cap, sequence-mask.",
            metavar="NAME",
        ),
    ] = "none",
    overlong: Annotated[
        str, option("Samples cut off: keep them in the loss, or mask.", metavar="NAME")
    ] = "keep",
    lr: kind("lr") = 1e-4,
    schedule: kind("schedule") = "constant",
    warmup: Annotated[int, option("Steps of warm-up.", metavar="STEPS", min=0)] = 10,
    decay: Annotated[int, option("Steps of wsd's tail.", metavar="STEPS", min=0)] = 0,
    final_lr: kind("final_lr") = 0.0,
    weight_decay: kind("weight_decay") = 0.0,
    betas: kind("betas") = "0.9,0.95",
    clip_norm: kind("clip_norm") = 1.0,
    precision: kind("precision") = "fp32",
    micro_tokens: Annotated[float, count("Tokens of one forward and backward pass.")] = "16K",  # type: ignore[assignment]
    judge_url: Annotated[
        str, option("OpenAI-compatible server of the judge, up to /v1.", metavar="URL")
    ] = "",
    judge_model: Annotated[str, option("The judge's model name.", metavar="NAME")] = "",
    judge_votes: Annotated[int, option("Calls that vote on an item.", metavar="N", min=1)] = 1,
    judge_items_per_call: Annotated[int, option("Rubric items in a call.", metavar="N", min=1)] = 1,
    judge_format: Annotated[
        str, option("Replies held to: text, json-object, json-schema.", metavar="NAME")
    ] = "text",
    judge_tokens: Annotated[int, option("Longest reply of the judge.", metavar="N", min=16)] = 1024,
    api_key_env: Annotated[
        str, option("Variable that holds the judge's key.", metavar="VARIABLE")
    ] = "SABIA_API_KEY",
    judge_cache: Annotated[
        str, option("Finished calls (default: ~/.cache/sabia/calls).", metavar="DIR")
    ] = "",
    concurrency: Annotated[int, option("Calls in flight.", metavar="N", min=1)] = 16,
    max_usd: Annotated[float | None, money("Stop before spending more; needs --prices.")] = None,
    max_requests: Annotated[float | None, count("Stop before sending more.")] = None,
    max_judge_tokens: Annotated[float | None, count("Stop before using more tokens.")] = None,
    prices: Annotated[
        str, option("Dollars per million tokens by model.", metavar="FILE.toml")
    ] = "",
    max_null: Annotated[float, fraction("Stop when more samples have no reward.")] = "20%",  # type: ignore[assignment]
    max_unknown: Annotated[
        float, fraction("Share of a rubric's weight that may lack a verdict.")
    ] = "0%",  # type: ignore[assignment]
    save_every: kind("save_every") = "10m",
    keep_checkpoints: kind("keep_checkpoints") = 2,
    export_dtype: kind("export_dtype") = "float32",
) -> None:
    """Improve a model on prompts whose answers can be graded.

    Each step samples groups of answers, grades them by a verifier against the record's answer or
    by the record's rubric, and makes what is better than its group's mean more likely. -o is a run
    directory: checkpoints/, metrics.jsonl, samples/ (rows of every sample) and final/ in Hugging
    Face form. The same command again resumes a run that was stopped, or leaves it as it is.
    """
    from sabia.core.errors import UsageError

    if advantage not in ("mean", "std"):
        raise UsageError(f"--advantage: {advantage!r} (expected mean or std)")
    if bool(judge_url) != bool(judge_model):
        raise UsageError("a judge needs both --judge-url and --judge-model")

    from sabia.core.recipes import grpo as room
    from sabia.core.recipes.grpo_config import GrpoConfig, JudgeOptions
    from sabia.core.recipes.training_options import TrainOptions
    from sabia.core.train.losses_grpo import GrpoLossConfig

    shared = TrainOptions(
        weight_decay=weight_decay, betas=betas, clip_norm=clip_norm, save_every=save_every
    )
    judge = JudgeOptions(
        judge_url,
        judge_model,
        judge_votes,
        judge_items_per_call,
        judge_format,
        judge_tokens,
        api_key_env,
        cache=judge_cache,
        concurrency=concurrency,
        max_requests=None if max_requests is None else int(max_requests),
        max_tokens=None if max_judge_tokens is None else int(max_judge_tokens),
        max_usd=max_usd,
        prices=prices,
    )
    loss = GrpoLossConfig(
        clip_low=clip_low,
        clip_high=clip_high,
        aggregation=aggregation,
        ratio=ratio,
        dual_clip=dual_clip,
        beta=beta,
        correction=correction,
        temperature=temperature,
    )
    config = GrpoConfig(
        model=model,
        reward=reward,
        steps=steps,
        prompts=prompts,
        group=group,
        updates=updates,
        lr=lr,
        schedule=schedule,
        warmup=warmup,
        decay=decay,
        final_lr=final_lr,
        max_new_tokens=max_new_tokens,
        std=advantage == "std",
        overlong=overlong,
        precision=precision,
        loss=loss,
        optimizer=shared.plain_optimizer(),
        judge=judge if judge_url else None,
        micro_tokens=int(micro_tokens),
        interval=shared.interval(1),
        keep_checkpoints=keep_checkpoints,
        max_null=max_null,
        max_unknown=max_unknown,
        export_dtype=export_dtype,
    )
    room.run(job, config)
