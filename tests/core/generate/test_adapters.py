"""Adapters of single requests: tokens and log-probabilities are those of the merged models."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import SabiaError, UsageError
from sabia.core.generate.draft.draft import Draft
from sabia.core.generate.engine import Engine
from sabia.core.generate.model_directory import load_engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.model.lora import LoraConfig, lora_tensors, merged
from sabia.core.model.storage import hub
from sabia.core.model.storage.peft_adapters import load_adapter, save_adapter
from sabia.core.ops.product import Matrix, Product
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import ModelSpec, from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 64}
CONFIGS = {"two": LoraConfig(4, 8.0), "five": LoraConfig(5, 3.0, r"attn")}
NOT_FUSED = r"mlp|ffn|delta\.o|attn\.[kvo]"  # matrices of their own in the files of qwen3_5


def config(kind: str, vocab: int) -> dict[str, Any]:
    made = new_config("llama", vocab=vocab, **SHAPE)
    if kind == "qwen3_moe":
        made |= {"model_type": kind, "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 16, "norm_topk_prob": False}  # fmt: skip
    if kind == "qwen3_5":
        made |= {"model_type": "qwen3_5_text", "rope_theta": None,
                 "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                 "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-2,
                 "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                 "linear_key_head_dim": 12, "linear_value_head_dim": 8,
                 "linear_conv_kernel_dim": 4}  # fmt: skip
    return made


def random_params(spec: ModelSpec, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {t.name: (draw.standard_normal(t.shape) * 0.4).astype(np.float32)
            for t in spec.tensors()}  # fmt: skip


def close(ours: Completion, theirs: Completion) -> None:
    assert ours.tokens == theirs.tokens
    assert np.abs(np.subtract(ours.raw_logprobs, theirs.raw_logprobs)).max() <= 1e-5


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("llama", "torch"), ("qwen3_moe", "torch"),
     pytest.param("llama", "jax", marks=pytest.mark.slow),
     pytest.param("qwen3_moe", "jax", marks=pytest.mark.slow),
     pytest.param("qwen3_5", "torch", marks=pytest.mark.slow),
     pytest.param("qwen3_5", "jax", marks=pytest.mark.slow)],
)  # fmt: skip
def test_each_row_of_a_batch_has_its_own_adapter(kind: str, backend: str, tmp_path: Path) -> None:
    tokenizer = train_bpe(["the quick brown fox"] * 4, 290)
    tokenizer.save(tmp_path / "t")
    spec = from_config(config(kind, tokenizer.vocab_size))
    params = random_params(spec, 0)
    hub.save_model(tmp_path / "m", spec, params, tokenizer_from=tmp_path / "t")
    models = {"": Engine(spec, params, tokenizer)}
    for name, lora in CONFIGS.items():
        lora = replace(lora, targets=NOT_FUSED) if kind == "qwen3_5" else lora
        draw = np.random.default_rng(len(name))
        held = {t.name: draw.standard_normal(t.shape).astype(np.float32) * 0.2
                for t in lora_tensors(spec, lora)}  # fmt: skip
        save_adapter(tmp_path / name, spec, held, lora)
        merged_params = dict(merged(params | held, lora))
        models[name] = Engine(spec, merged_params, tokenizer)
    adapters = {n: str(tmp_path / n) for n in CONFIGS}
    engine = load_engine(tmp_path / "m", adapters=adapters, backend=backend)
    names = ["two", "", "five", "two", "five", "", "two"]
    requests = [
        Request([3 + n, 9, 40][: 1 + n % 3], 6 + 2 * n, seed=n, n=1 + n % 2, id=str(n), stop_ids=(),
                adapter=name)
        for n, name in enumerate(names)
    ]  # fmt: skip
    together = engine.generate(requests)
    alone = [one for request in requests for one in engine.generate([request])]
    plain = [one for r in requests for one in models[r.adapter].generate([plain_of(r)])]
    for batch, single, expected in zip(together, alone, plain, strict=True):
        close(batch, expected)
        close(single, expected)
    # rows move when others end, and wait for free ones
    few = Engine(engine.spec, engine.params, tokenizer, ops=engine.ops, slots=2)
    for batch, expected in zip(few.generate(requests), plain, strict=True):
        close(batch, expected)
    # also where several tokens are checked together, and what prompts begin with is kept
    few.draft = Draft(3, Engine(spec, merged_params, tokenizer, ops=load_ops(backend)))
    greedy = [replace(request, temperature=0.0) for request in requests]
    plain = [one for r in greedy for one in models[r.adapter].generate([plain_of(r)])]
    for batch, expected in zip(few.generate(greedy), plain, strict=True):
        close(batch, expected)
    assert few.counts.accepted and few.counts.proposed > few.counts.accepted
    sharing = Engine(engine.spec, engine.params, tokenizer, ops=engine.ops, shares_prefixes=True)
    long = [replace(r, prompt=[*range(20, 60), *r.prompt], max_new_tokens=5) for r in greedy]
    plain = [one for r in long for one in models[r.adapter].generate([plain_of(r)])]
    for batch, expected in zip(sharing.generate(long), plain, strict=True):
        close(batch, expected)
    same = [models[name].generate([Request([3], 8, seed=1)])[0].tokens for name in models]
    assert len({*map(tuple, same)}) == 3
    with pytest.raises(UsageError, match="adapter six is not loaded"):
        engine.generate([Request([3], 4, adapter="six")])
    with pytest.raises(UsageError, match="adapter six is not loaded"):
        models[""].generate([Request([3], 4, adapter="six")])


def test_rows_of_jax_multiply_by_their_own_matrices() -> None:
    jax = pytest.importorskip("jax")
    from sabia.core.ops.row_adapters_jax import JaxRowAdapters

    draw = np.random.default_rng(0)
    shapes = {"one": {"w": (2, 5, 7), "v": (2, 5, 3)}, "two": {"w": (4, 5, 7)}}  # rank, in, out
    adapters = {
        name: {m: (draw.standard_normal((r, i)).astype(np.float32),
                   draw.standard_normal((o, r)).astype(np.float32))
               for m, (r, i, o) in of.items()}
        for name, of in shapes.items()
    }  # fmt: skip
    weights = {"w": draw.standard_normal((7, 5)), "v": draw.standard_normal((3, 5))}
    matrices = tuple(Matrix(name, weight.astype(np.float32)) for name, weight in weights.items())
    rule, x = JaxRowAdapters(adapters), draw.standard_normal((4, 6, 5)).astype(np.float32)

    def multiply(rows: Any, stacked: Any) -> list[Any]:
        rule.bind(rows, stacked)
        return rule.apply(Product(x, matrices), lambda p: [p.x @ m.weight.T for m in p.matrices])

    names = ["two", "", "one", "two"]
    numbers = np.array([rule.number(name) for name in names], np.int32)
    made = dict(zip(weights, jax.jit(multiply)(numbers, rule.stacked), strict=True))
    for row, name in enumerate(names):
        for matrix, weight in weights.items():
            a, b = adapters.get(name, {}).get(matrix, (np.zeros((1, 5)), np.zeros((1, 1))))
            expected = x[row] @ (weight + b @ a).T
            np.testing.assert_allclose(made[matrix][row], expected, atol=1e-5)


def plain_of(request: Request) -> Request:
    return replace(request, adapter="")


def phi3() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    ))  # fmt: skip


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    ))  # fmt: skip


@pytest.mark.parametrize(("make", "targets", "more"), [
    (llama, ["q_proj", "down_proj"], {"use_rslora": True, "rank_pattern": {"q_proj": 3}}),
    (llama, ["v_proj", "up_proj"], {"alpha_pattern": {"layers.1.mlp.up_proj": 3}, "lora_alpha": 5}),
    (phi3, ["qkv_proj", "gate_up_proj", "o_proj"], {"layers_to_transform": [1]}),
])  # fmt: skip
def test_adapters_of_peft_are_those_that_it_merges(
    make: Callable[[], Any], targets: list[str], more: Mapping[str, Any], tmp_path: Path
) -> None:
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path / "m")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **more)
    )
    wrapped.save_pretrained(tmp_path / "a")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")
    spec, params = hub.load_model(tmp_path / "m")
    _, expected = hub.load_model(tmp_path / "merged")
    pairs = load_adapter(tmp_path / "a", spec)
    changed = {n for n in params if not np.array_equal(params[n], expected[n])}
    assert set(pairs) == changed and changed
    for name, (a, b) in pairs.items():
        np.testing.assert_allclose(params[name] + b @ a, expected[name], atol=1e-6)


@pytest.mark.parametrize(("change", "hint"), [
    ({"use_dora": True}, "use_dora True"), ({"peft_type": "LOHA"}, "peft_type LOHA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"peft_type": None}, "peft_type None"),
])  # fmt: skip
def test_other_adapters_are_refused(change: dict[str, Any], hint: str, tmp_path: Path) -> None:
    spec, lora = from_config(config("llama", 97)), CONFIGS["five"]
    held = {t.name: np.zeros(t.shape, np.float32) for t in lora_tensors(spec, lora)}
    save_adapter(tmp_path / "a", spec, held, lora)
    file = tmp_path / "a" / "adapter_config.json"
    with pytest.raises(UsageError, match="of another model"):
        load_adapter(tmp_path / "a", from_config(config("llama", 97) | {"hidden_size": 64}))
    with pytest.raises(UsageError, match="changes no matrix"):
        load_adapter(tmp_path / "a", from_config(config("llama", 97) | {"num_hidden_layers": 1}))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SabiaError, match=hint):
        load_adapter(tmp_path / "a", spec)
    with pytest.raises(UsageError, match=r"adapter_config.json"):
        load_adapter(tmp_path, spec)
