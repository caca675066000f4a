"""What questions begin with is run once, and the log-likelihoods are those of an unshared pass."""

from typing import Any

import numpy as np
import pytest

from sabia.core.bench import loglikelihood as ll
from sabia.core.spec import from_config, new_config

VOCAB = 211
SHAPE = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "context": 512}
EXPERTS = {"experts": 5, "chosen": 2, "expert_ffn": 40}
DENSE = new_config("llama", **SHAPE, ffn=80)
HYBRID = new_config("llama", **SHAPE, ffn=80, tied=False) | {
    "model_type": "qwen3_next",
    "rope_theta": None,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 44, "shared_expert_intermediate_size": 52,
}  # fmt: skip
LATENT = new_config("deepseek_v3", **{**SHAPE, "kv_heads": None}, **EXPERTS, shared=1)
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "sliding window": DENSE | {"model_type": "mistral", "sliding_window": 23},
    "experts": new_config("mixtral", **SHAPE, **EXPERTS),
    "latent": LATENT,
    "delta nets": HYBRID,
}


def model_of(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    spec, draw = from_config(CONFIGS[name]), np.random.default_rng(0)
    params = {}
    for tensor in spec.tensors():
        scale = 1.2 * tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 0.2
        noise = draw.standard_normal(tensor.shape) * scale + (tensor.init.kind == "ones")
        params[tensor.name] = noise.astype(np.float32)
    return spec, params


def questions(examples: int) -> list[tuple[ll.Row, ...]]:
    """Questions after two sets of fixed examples of odd lengths that begin alike, and without."""
    draw = np.random.default_rng(examples)
    common = draw.integers(0, VOCAB, examples).tolist()
    sets = [[*common, *draw.integers(0, VOCAB, n).tolist()] for n in (77, 131)]
    made = []
    for number in range(24):
        before = [*sets[number % 2]] if number < 20 else []
        before += draw.integers(0, VOCAB, int(draw.integers(1, 30))).tolist()
        rows = []
        for _ in range(1 + number % 4):
            tail = draw.integers(0, VOCAB, 1 if number % 3 else int(draw.integers(1, 9))).tolist()
            rows.append(ll.Row((*before, *tail), len(tail)))
        made.append(tuple(rows))
    made.append((ll.Row((*sets[0], 5), 1), ll.Row((*sets[0], 6, 7), 2)))  # nothing after examples
    made.append((ll.Row((3, 4), 1), ll.Row((3, 5, 6), 2)))  # a prefix of the first token only
    return made


def scorer(model: Any, backend: str, **options: Any) -> ll.Scorer:
    pytest.importorskip(backend)
    return ll.Scorer(*model, backend, **options)


def unshared(model: Any, asked: list[tuple[ll.Row, ...]]) -> np.ndarray:
    """Each row alone, in one pass without a cache."""
    alone = scorer(model, "torch", cache_bytes=0)
    return np.concatenate([alone.score([[row]])[0] for rows in asked for row in rows])


CASES = [(name, "torch") for name in CONFIGS] + [
    ("dense", "jax"),
    # programs of several shapes are compiled
    *(pytest.param(name, "jax", marks=pytest.mark.slow) for name in CONFIGS if name != "dense"),
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_log_likelihoods_are_those_of_an_unshared_pass(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ll.LEAST_SAVED, backend, 256)
    model, asked = model_of(name), questions(67)
    shared = scorer(model, backend)
    used = {batch.prefix for batch in shared._batches([tuple(rows) for rows in asked])}
    assert sorted(map(len, used)) == ([0, 143, 198] if backend == "torch" else [0, 128, 192])
    assert {len(one.parent) for one in used if one.parent} == {67 if backend == "torch" else 64}
    ours = np.concatenate(shared.score(asked))
    expected = unshared(model, asked)
    assert np.abs(ours - expected).max() <= 1e-4 and np.ptp(ours) > 5


def test_examples_are_run_once_and_caches_stay_within_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = np.random.default_rng(0)
    limit = 600 * 2 * 2 * 2 * 12 * 4  # of 600 tokens in 2 layers
    tight = scorer(model_of("dense"), "torch", cache_bytes=limit)
    tokens, held = [], []
    hidden = tight._hidden

    def counted(ids: Any, positions: Any, cache: Any) -> Any:
        made = hidden(ids, positions, cache)
        tokens.append(ids.size)
        space = tight._space[1].nbytes if tight._space else cache.nbytes if cache else 0
        held.append(tight._prefixes.nbytes + space)
        return made

    monkeypatch.setattr(tight, "_hidden", counted)
    examples = draw.integers(0, VOCAB, 120).tolist()
    asked = [
        [ll.Row((*examples, number, option, 9), 2) for option in range(4)] for number in range(40)
    ]
    tight.score(asked)
    assert sum(tokens) <= 120 + 40 * (2 + 4)
    assert max(held) <= limit


def test_the_longest_batch_of_a_prefix_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it the last, no freed array were large enough for the next one."""
    draw, made, sizes = np.random.default_rng(0), scorer(model_of("dense"), "torch"), list[int]()
    made.batch_tokens = 300
    hidden = made._hidden
    monkeypatch.setattr(
        made, "_hidden", lambda ids, *rest: (sizes.append(ids.shape[1]), hidden(ids, *rest))[1]
    )
    lengths = draw.permutation(np.arange(20, 180, 4))
    made.score([[ll.Row((*draw.integers(0, VOCAB, n).tolist(), 1), 1)] for n in lengths])
    assert len(sizes) > 8 and sizes == sorted(sizes, reverse=True)
