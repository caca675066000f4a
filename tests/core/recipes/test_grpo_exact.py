"""`grpo --exact`: the trainer's log-probabilities are those of the sampler, to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sabia.core.errors import Failed, Interrupted, UsageError
from sabia.core.generate.engine import Engine
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.mesh import Mesh
from sabia.core.recipes.grpo import policy_run
from sabia.core.recipes.grpo.policy_run import check_exact
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.losses import grpo
from sabia.core.train.telemetry import metrics_path, read_rows
from sabia.kernels.runtime.torch_fp32 import HAS_ONEDNN

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="exact operations are those of oneDNN")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("exact")
    tokenizer = train_bpe(["user assistant which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    tokenizer.save(folder / "t")
    sizes: Any = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "context": 128}
    for kind, changes in MODELS.items():
        spec = from_config(new_config(vocab=tokenizer.vocab_size, **sizes) | changes)
        # so large that a choice of experts changes with the last bits
        params = {n: x * (6 if x.ndim > 1 else 1) for n, x in hub.init_params(spec, 0).items()}
        hub.save_model(folder / kind, spec, params, tokenizer_from=folder / "t")
    texts = ["which digit?" * (1 + n % 4) for n in range(64)]
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": text}], "answer": "[0-9]"}
            for n, text in enumerate(texts)]  # fmt: skip
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(place: Path, out: Path, kind: str = "llama", **changes: Any) -> list[dict[str, Any]]:
    values = {"reward": "regex", "steps": 3, "prompts": 3, "group": 6, "max_new_tokens": 12,
              "warmup": "1", "peak_flops": 1e12, "lr": 1e-3, "exact": True} | changes  # fmt: skip
    if values.get("draft") in MODELS:
        values["draft"] = str(place / values["draft"])
    options = GrpoOptions(model=str(place / kind), **values)
    inputs = (str(place / "prompts.jsonl"),)
    job = Job(
        "grpo", inputs=inputs, out=str(out), to="jsonl", backend=values.get("backend", "torch")
    )
    policy_run.run(job, options)
    return read_rows(metrics_path(out))


def is_exact(rows: list[dict[str, Any]]) -> bool:
    assert sum(row["trained_tokens"] for row in rows) > 100
    return all(row["logprob_gap_max"] == row["logprob_gap"] == 0 for row in rows)


CASES: list[dict[str, Any]] = [
    {},
    {"kind": "qwen3_moe", "precision": "bf16", "group": 3, "temperature": 0.8},
    {"lora_rank": 2, "updates": 2, "beta": 0.1, "micro_tokens": 100},
]
SLOW: list[dict[str, Any]] = [
    {"kind": "mixtral", "prompts": 1, "group": 64},  # the window ends within a row
    {"kind": "mixtral", "precision": "bf16", "remat": "full"},
    {"kind": "qwen3", "precision": "bf16", "draft": "ngram", "refill": 2},
    {"kind": "qwen3", "draft": "llama", "prompts": 2},  # another model proposes tokens
    {"kind": "qwen3_moe", "draft": "qwen3_moe", "precision": "bf16", "temperature": 0.7},
    {"kind": "qwen3_moe", "lora_rank": 2, "lora_base": "nf4", "prompts": 2, "group": 8},
]


@pytest.mark.parametrize("changes", CASES)
def test_there_is_no_difference(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert is_exact(run(place, tmp_path / "run", **changes))


@pytest.mark.slow
@pytest.mark.parametrize("changes", SLOW)
def test_nor_in_other_runs(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert is_exact(run(place, tmp_path / "run", **changes))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_nor_in_two_hundred_updates(
    place: Path, tmp_path: Path, kind: str, precision: str
) -> None:  # fmt: skip
    sizes = {"prompts": 1, "group": 3} if kind == "qwen3" else {"prompts": 8, "group": 8}
    rows = run(place, tmp_path / "run", kind, steps=200, precision=precision, lr=3e-4, **sizes)
    assert len(rows) == 200
    assert is_exact(rows)


def test_other_runs_differ(place: Path, tmp_path: Path) -> None:
    assert not is_exact(run(place, tmp_path / "run", exact=False))


QLORA = {"lora_rank": 2, "lora_base": "nf4"}


@pytest.mark.parametrize("more", [{}, pytest.param(QLORA, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_between_tokens_goes_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    whole = run(place, tmp_path / "whole", "qwen3_moe", **more)
    count, step = iter(range(1000)), Engine.session

    def session(self: Engine, *sizes: Any, **options: Any) -> Any:
        made = step(self, *sizes, **options)
        inner = made.step

        def stopped() -> Any:
            if next(count) == 20:
                raise Interrupted("here")
            return inner()

        made.step = stopped
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "session", session)
        with pytest.raises(Interrupted):
            run(place, tmp_path / "run", "qwen3_moe", **more)
    resumed = run(place, tmp_path / "run", "qwen3_moe", **more)
    assert is_exact(resumed)
    columns = ("reward", "loss", "grad_norm", "trained_tokens")
    assert [[r.get(c) for c in columns] for r in resumed] == [
        [r.get(c) for c in columns] for r in whole
    ]


def test_a_difference_stops_the_run_by_name(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "drawn_losses",
                        lambda *given, f=grpo.drawn_losses: f(*given) * (1 + 2e-7))  # fmt: skip
    with pytest.raises(Failed, match=r"step 1: with --exact the trainer's .* \(expected 0\)"):
        run(place, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "--exact"),
        ({"backend": "jax"}, "--exact"),
        ({"compile": True}, "--exact"),
        ({"sampler_url": "http://x/v1", "sampler_folder": "f"}, "--exact"),
    ],
)
def test_options_that_it_excludes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GrpoOptions(model="m", exact=True, **changes).check()


def test_what_cannot_be_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = from_config(new_config(hidden=32, layers=1, vocab=50, heads=2, context=64))
    check_exact(spec, Mesh(data=2, fsdp=2))
    for mesh in (Mesh(tensor=2), Mesh(context=2), Mesh(expert=2)):
        with pytest.raises(UsageError, match=r"--exact: not with --mesh .*data and fsdp alone"):
            check_exact(spec, mesh)
