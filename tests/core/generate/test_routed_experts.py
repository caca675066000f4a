"""The experts that the engine gives with a sample are those of a pass over the whole row."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sabia.core.generate.draft.draft import Draft
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.model import forward
from sabia.core.model.routing import Routing
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

SHAPE: dict[str, Any] = {"hidden": 32, "layers": 3, "heads": 2, "context": 128, "experts": 6,
                         "chosen": 2, "expert_ffn": 24}  # fmt: skip
FAMILIES = {"mixtral": {"sliding_window": 9}, "deepseek_v3": {}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe(["which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)


def engine_of(family: str, tokenizer: Any, scale: float = 4, **options: Any) -> Engine:
    config = new_config(family, vocab=tokenizer.vocab_size, **SHAPE) | FAMILIES[family]
    spec = from_config(config)
    params = {n: x * (scale if x.ndim > 1 else 1) for n, x in hub.init_params(spec, 0).items()}
    return Engine(spec, params, tokenizer, **options)


def by_rows(engine: Engine, request: Request, made: Completion) -> np.ndarray:
    """The experts [T, L, k] of a row of prompt and sample."""
    ops: Any = load_ops("torch")
    params = ops.to_device(engine.ops.to_numpy(engine.params), "float32")
    ids = np.array([[*request.prompt, *made.tokens[:-1]]])
    wanted = frozenset({"experts"})
    stats = forward.hidden_and_stats(engine.spec, params, ids, ops, wanted=wanted)[1]
    return np.stack([layer[0].numpy() for layer in stats["experts"].values()], 1)


CASES: list[Any] = [
    ("mixtral", "torch", {"slots": 5}),
    ("deepseek_v3", "torch", {"draft": 3, "slots": 4}),
    pytest.param("mixtral", "torch", {"draft": 3}, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "torch", {"shares_prefixes": True}, marks=pytest.mark.slow),
    pytest.param("mixtral", "jax", {"slots": 5}, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "jax", {"draft": 3}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "backend", "options"), CASES)
def test_a_sample_has_the_experts_of_its_row(
    family: str, backend: str, options: dict[str, Any], tokenizer: Any
) -> None:
    ops: Any = load_ops(backend)
    if "draft" in options:  # the same model: some of its tokens are kept, and not all
        options = {**options, "draft": Draft(3, engine_of(family, tokenizer, ops=ops, scale=3.5))}
    engine = engine_of(family, tokenizer, ops=ops, **options)
    draw = np.random.default_rng(1)
    start = draw.integers(0, 290, 40).tolist()
    requests = [
        Request([*start, *draw.integers(0, 290, 1 + 5 * n).tolist()], 4 + 9 * n, n=3,
                temperature=0.3, id=f"r{n}", seed=2, routed_experts=n != 1, stop_ids=(5, 9, 70))
        for n in range(4)
    ]  # fmt: skip
    routing = Routing.of(engine.spec)
    assert routing is not None
    made = engine.generate(requests)
    plain = [replace(request, routed_experts=False) for request in requests]
    assert [c.tokens for c in engine.generate(plain)] == [c.tokens for c in made]
    of = {request.name: request for request in requests}
    lengths = set[int]()
    for one in made:
        request = of[one.request_id]
        if not request.routed_experts:
            assert not one.routed_experts
            continue
        found = routing.unpacked(one.routed_experts)
        np.testing.assert_array_equal(found, by_rows(engine, request, one))
        lengths.add(len(found))
    assert len(lengths) > 2
    if "draft" in options:
        assert 3 < engine.counts.accepted < engine.counts.proposed
