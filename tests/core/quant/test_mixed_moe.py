"""`mixed` on tiny trained models of five MoE families: experts, what stays BF16, KL, loaders.

They have read parts of novels, as bytes, for STEPS steps; other parts of it calibrate and compare.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import stage

pytest.importorskip("torch")

from sabia.core.model.storage import hub
from sabia.core.numerics.floats import round_bfloat16
from sabia.core.quant.quantize import LEAST_TOKENS
from sabia.core.quant.recipe import NEVER, component_of
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper

STEPS, ROWS, LENGTH = 150, 16, 128
SHAPE: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 300, "tied": False}
EXPERTS = {"experts": 8, "chosen": 2, "expert_ffn": 96}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 16}
GPT_OSS |= {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}
GPT_OSS |= {"attention_bias": True, "sliding_window": 7}
CONFIGS = {
    "mixtral": new_config("mixtral", **SHAPE, **EXPERTS),
    "qwen3_moe": new_config("qwen3_moe", **SHAPE, **EXPERTS),
    "deepseek_v3": new_config("deepseek_v3", **SHAPE, **EXPERTS, shared=1, ffn=96),
    "qwen3_next": new_config("qwen3_next", **SHAPE | {"layers": 4}, **EXPERTS, shared=1),
    "gpt_oss": {k: v for k, v in new_config("llama", **SHAPE).items() if k != "mlp_bias"} | GPT_OSS,
}
LOADERS = {"gpt_oss": "loads wrongly"}  # transformers


@functools.lru_cache
def novels() -> np.ndarray:
    """Rows [N, LENGTH] of the bytes of novels, mixed."""
    files = sorted(Path(os.environ["SABIA_TEST_DATA"], "text/machado").glob("*.txt"))
    data = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    rows = data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return np.random.default_rng(0).permutation(rows)


@functools.lru_cache
def trained(family: str) -> tuple[Any, dict[str, np.ndarray], list[float]]:
    """(spec, parameters, losses) after STEPS steps on rows of `novels`, from the first on."""
    spec, losses = from_config(CONFIGS[family]), list[float]()
    stepper = make_stepper("torch", spec, hub.init_params(spec, 0), next_token_loss)
    for step in range(STEPS):
        rows = novels()[step * ROWS : (step + 1) * ROWS].astype(np.int32)
        targets, mask = np.roll(rows, -1, 1), np.ones(rows.shape, np.float32)
        mask[:, -1] = 0
        batch = {"input_ids": rows, "targets": targets, "loss_mask": mask}
        rate = 4e-3 * min(1, (step + 1) / 15) * (1 - step / STEPS)
        losses.append(float(stepper.step(batch, rate, number=step).loss))
    params = {name: array.detach().numpy().copy() for name, array in stepper.params.items()}
    return spec, params, losses


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["routed", "all"])
@pytest.mark.parametrize("family", CONFIGS)
def test_mixed_on_a_model_of_experts(
    family: str, experts: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    spec, params, losses = trained(family)
    assert np.mean(losses[-10:]) < losses[0] / 1.8  # it has learned something to lose
    hub.save_model(tmp_path / "m", spec, params)
    rows = [{"id": str(n), "input_ids": ids.tolist()} for n, ids in enumerate(novels()[-72:])]
    rows = [row | {"document_lengths": [LENGTH]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stage("quantize", inputs=(str(tmp_path / "rows.jsonl"),), out=tmp_path / "q", recipe="mixed",
          to="jsonl", json=True, model=tmp_path / "m", held_out=8, samples=64,
          experts=experts)  # fmt: skip
    written = capsys.readouterr()
    report = json.loads(written.out)
    # every expert is calibrated, or too few tokens reached it and stderr says so
    own = [row for row in report["layers"] if row["component"] == "expert"]
    first = sum(t.stacked and t.linear for t in spec.tensors())
    assert len(own) == first * EXPERTS["experts"]
    nearest = [row for row in own if row["method"] == "rtn"]
    assert all(row["tokens"] < LEAST_TOKENS for row in nearest)
    assert all(row["tokens"] >= LEAST_TOKENS for row in own if row["method"] == "gptq")
    assert bool(nearest) == ("few tokens reached" in written.err)
    if experts == "all":
        assert not nearest and {row["tokens"] for row in own} == {64 * LENGTH}
    # embeddings, norms and routers are BF16, and read back with these values
    _, loaded = hub.load_model(tmp_path / "q")
    _, original = hub.load_model(tmp_path / "m")
    kept = [t.name for t in spec.tensors() if t.component in NEVER or not t.linear]
    assert {component_of(t) for t in spec.tensors() if t.name in kept} >= {"embedding", "router"}
    for name in kept:
        np.testing.assert_array_equal(
            np.asarray(loaded[name], np.float32),
            round_bfloat16(np.asarray(original[name], np.float32)), err_msg=name,
        )  # fmt: skip
    by_component = {row["component"]: row["scheme"].split()[0] for row in report["layers"]}
    assert {
        "attention": "w8a16",
        "head": "w8a16",
        "expert": "w4a16",
    }.items() <= by_component.items()
    # our reader, on the tokens that were held out
    stage("quantize", inputs=(str(tmp_path / "rows.jsonl"),), verify=tmp_path / "q", to="jsonl",
          json=True, model=tmp_path / "m", held_out=8)  # fmt: skip
    verified = json.loads(capsys.readouterr().out)
    assert not verified["unused_tensors"] and not verified["missing_tensors"]
    kl = report["divergence"]["kl_nats"], verified["divergence"]["kl_nats"]
    print(family, experts, f"KL {kl[0]:.2g} held out, {kl[1]:.2g} by the reader",
          [(x["loader"], x["result"]) for x in report["loaders"]], len(nearest))  # fmt: skip
    assert max(kl) <= 0.01
    usual = report["loaders"][0]
    assert usual["loader"] == "transformers" and usual["result"] == LOADERS.get(family, "loads")
    card = (tmp_path / "q" / "README.md").read_text()
    assert all(f"| {x['loader']} | {x['result']} |" in card for x in report["loaders"])
