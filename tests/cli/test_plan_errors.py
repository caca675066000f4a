"""Wrong command lines of plan-cluster: one line on stderr, nothing on stdout, the mend in it."""

import pytest
from plan_calls import call, process

BASE = "--params 8B --chip h100"
USAGE = [
    ("--deadline 30", "did you mean 30d?"),
    ("--deadline 30x", "needs a unit"),
    ("--deadline ,", "--deadline: ',' has an empty part"),
    ("--deadline 0d", "--deadline"),
    ("--tokens 500m", "did you mean M"),
    ("--tokens lots", "--tokens: 'lots'"),
    ("--tokens -5B", "--tokens"),
    ("--tokens 5b", "did you mean B?"),
    ("--tokens 0", "--tokens: 0"),
    ("--mfu 4000", "more than 100 %"),
    ("--mfu 110%", "more than 100 %"),
    ("--mfu 0", "--mfu"),
    ("--chips 0", "--chips: 0 is out of range (expected 1 to 1,000,000,000)"),
    ("--chips 1.5", "--chips: '1.5' is not a whole number"),
    ("--chips 8 --nodes 1", "--nodes: not together with --chips"),
    ("--seq 0", "--seq: '0'"),
    ("--batch-tokens 100", "at least --seq"),
    ("--batch-tokens 1T", "more than all --tokens 500B"),
    ("--utilisation 0", "--utilisation: 0"),
    ("--hbm 80", "did you mean 80GB?"),
    ("--hbm 80Gb", "did you mean GB?"),
    ("--price cheap", "--price: 'cheap'"),
    ("--price 4.4,,12", "--price: '4.4,,12' has an empty part"),
    ("--price 0", "--price"),
    ("--active 10B", "at most --params 8B"),
    ("--model x", "--params: not together with --model"),
    ("--config none.toml", "--config: none.toml: No such file"),
    ("--convention flops", "6nd, palm or causal"),
    ("--state-recipe adam", "adamw16"),
    ("--search --stack megatronn", "megatron"),
    ("--fixed-layout tensor=8x", "a whole number"),
    ("--fixed-layout foo=6", "micro-batch"),
    ("--fixed-layout tp=3", "does not divide 32 heads; use"),
    ("--fixed-layout fsdp=8 --chips 12", "8"),
    ("--fixed-layout expert=8", "the model has no experts"),
    ("--search --mfu 40", "--mfu: not together with --search"),
    ("--search --objective speed", "time or cost"),
    ("--search --lora", "--lora-rank"),
    ("--objective cost", "only with --search"),
    ("--explain", "only with --search or --fixed-layout"),
    ("--micro-batch 2", "only with --search"),
    ("--precision fp8", "only with --search"),
    ("--preempt 6", "did you mean 6d?"),
    ("--preempt 0h", "--preempt"),
    ("--capacity-wait 1h", "only with --preempt"),
    ("--spare-nodes 1", "only with --repair"),
    ("--simulate 0", "--simulate: 0 is out of range"),
    ("--spot --spot-share 50", "--spot-share: not together with --spot"),
    ("--provider nobody", "--provider: no price of h100 is on file for nobody"),
    ("--provider nebius --commitment 9years", "--commitment: no price of h100"),
    ("--provider lambda --region us-east-1 --spot", "--spot: no price of h100"),
    ("--price 3 --region us", "--region: not together with --price"),
    ("--pue 11", "expected 1 to 5"),
    ("--carbon-intensity 40", "expected 0 to 2"),
    ("--plot x.png", "expected .svg or .html"),
    ("--emit k8s", "slurm, xpk or skypilot"),
    ("--emit slurm", "only with --search or --fixed-layout"),
    ("--emit slurm --search --stack megatron --deadline 99w", "omit --stack"),
    ("--emitt slurm", "--emitt: no such option"),
    ("--gpus 8", "--chips"),
    ("--stage train", "did you mean pretrain?"),
    ("--stage sft", "--items"),
    ("--stage serve --tokens 5B", "--tokens: only with --stage pretrain or sft"),
    ("--stage serve --weights fp3", "nvfp4"),
    ("--prompts 64", "only with --stage grpo"),
    ("--seed 5", "only with --simulate"),
    ("--queue 1h", "only with --job-limit"),
    ("--stage grpo --off-policy 2", "only with --generation-chips"),
    ("--stage grpo --seq 4k", "--seq: only with --stage pretrain or sft"),
    ("--stage eval --judge-params 7B", "only with --judge-calls"),
    ("--stage eval --batch 7", "only with --stage serve or grpo"),
    ("--stage eval --api-price 1,2 --cache fp8", "--cache: not together with --api-price"),
    ("--stage serve --output-limit 5k", "only with --stage grpo"),
    ("--to csv", "parquet, arrow or jsonl"),
    ("--budget none.toml", "--params: not together with --budget"),
    ("--tokens 1e300", "'1e300' is too large"),
    ("--tokens 1e400", "too large"),
    ("--preempt 1e300w", "'1e300w' is too large"),
    ("--max-cost 1e300", "too large"),
    ("--layers 99999999999999999999", "expected 1 to 10,000)"),
    ("--lora-rank 99999999999999999999", "expected 1 to 1,000,000,000)"),
    ("--fixed-layout fsdp=99999999999999", "use 4096"),
    ("--fixed-layout micro-batch=1 --micro-batch 2", "omit one of them"),
    ("8B", "expected a list of runs"),
]
INFEASIBLE = [
    ("--tokens 1T --chips 1", "use --chips"),
    ("--tokens 1T --chips 8 --deadline 7d", "use --chips"),
    ("--tokens 1T --chips 8 --search --deadline 7d", "use --deadline"),
    ("--params 405B --chips 8 --search", "use --chips"),
    (
        "--params 70B --chips 8 --search --fixed-layout fsdp=1,tp=1,pp=1",
        "do not fix fsdp, tensor, pipe and use",
    ),
    ("--restart 400w --repair 30d --spare-nodes 1", "leaves no progress"),
    ("--fixed-layout data=8 --deadline 900d", "add --search"),
    ("--max-cost 100", "use --tokens"),
    ("--params 1.6T --active 49B --preempt 1m", "leaves no progress"),
]


@pytest.mark.parametrize(("words", "hint"), USAGE)
def test_wrong_usage_is_one_line_with_its_mend(words: str, hint: str) -> None:
    asked = call(f"{BASE} {words}")
    assert asked.code == 2, asked
    assert hint in asked.stderr
    assert asked.stdout == "" and asked.stderr.count("\n") == 1
    assert asked.stderr.startswith("sabia plan-cluster: error: ")


@pytest.mark.parametrize(("words", "hint"), INFEASIBLE)
def test_infeasible_plans_name_the_smallest_change(words: str, hint: str) -> None:
    asked = call(f"{BASE} {words}")
    assert asked.code == 3, asked
    assert hint in asked.stderr and asked.stdout == "" and asked.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [("--params 8", "did you mean 8B?"), ("--params 0", "--params: 0"), ("", "--params"),
     ("--active 8B", "--params"), ("--model nowhere", "nowhere"),
     ("--params 8B --chip h10", "did you mean h100?"), ("--params 8B --chip v7", "--price 4.40"),
     ("--params 8B --chip v6e --provider nobody", "; and more)"),
     ("--params 8B --compare h100,b200 --offers", "--offers: not together with --compare"),
     ("--params 8B --carbon --chip v7 --price 3", "--carbon")],
)  # fmt: skip
def test_models_and_chips_that_are_not_there(words: str, hint: str) -> None:
    asked = call(words)
    assert asked.code == 2 and hint in asked.stderr and asked.stderr.count("\n") == 1


def test_a_config_json_at_the_wrong_option_is_told_its_own(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert "goes with --model" in call(f"{BASE} --config {path}").stderr


def test_mfu_beyond_what_products_reach_warns() -> None:
    asked = call("--params 8B --chip mi300x --mfu 60 --price 2")
    assert asked.code == 0 and "--mfu 60% is above 51%" in asked.stderr


def test_a_process_ends_with_the_same_code_and_line() -> None:
    done = process(f"{BASE} --tokens 500m")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
