"""Parameters with packed copies for products on a CPU: equal products, copies made anew where
weights changed, and layers of one row that are computed at once."""

from typing import Any

import numpy as np
import pytest
import torch

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.ops.decoded_torch import DecodedRows
from sabia.core.ops.device_torch import TorchOps
from sabia.core.ops.packed_torch import HAS_ONEDNN, Packed
from sabia.core.ops.product import Matrix, Product
from sabia.kernels.row_products import torch_arrays

from ..model.test_decoding_backends import (
    EVEN,
    ROUNDED_MORE,
    by_name,
    engine_of,
    plain_logprobs,
    requests,
)

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="torch has no oneDNN here")
MOST = 1 << 40


def weights(*rows: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {f"w{n}": torch.randn(size, 48, generator=draw).to(dtype) for n, size in enumerate(rows)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "least"), [(1, 0), (1, 1 << 20), (2, 0), (17, 0)])
def test_joined_products_are_those_of_each_matrix(
    rows: int, least: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_arrays, "LEAST_BYTES", least)
    ops, plain = TorchOps(), weights(33, 7, 20, dtype=dtype)
    ready = ops.prepared(plain, {}, MOST)
    bias = torch.arange(7).to(dtype)
    x = torch.randn(rows, 1, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)

    def product(params: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
        every = (Matrix(n, params[n], bias if n == "w1" else None) for n in names)
        return list(ops.kernel(Product(x, tuple(every))))

    with torch.inference_mode():
        for names in (("w0", "w1", "w2"), ("w0",), ("w1", "w2"), ("w0", "w2")):
            both = zip(product(ready, names), product(plain, names), strict=True)
            for mine, theirs in both:
                bound = 2e-5 if dtype == torch.float32 else 0.13
                torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)


def test_copies_are_kept_until_a_weight_changes() -> None:
    ops, plain = TorchOps(), weights(33, 7)
    ready = ops.prepared(plain, {}, MOST)
    assert all(type(x) is Packed for x in ready.values())
    assert ops.prepared(dict(plain), ready, MOST) is ready
    with torch.no_grad():
        plain["w1"].mul_(2)
    again = ops.prepared(plain, ready, MOST)
    assert again is not ready
    assert ops.prepared({**plain, "w1": plain["w1"].clone()}, again, MOST) is not again


def test_without_memory_parameters_stay_as_they_are() -> None:
    plain = weights(33, 7)
    assert TorchOps().prepared(plain, {}, 40 * 48 * 4 - 1) is plain
    assert TorchOps().prepared(plain, {}, 40 * 48 * 4) is not plain


def test_a_trainer_writes_weights_in_place() -> None:
    """Tokens after an update are those of a new engine with the new weights."""
    engine = engine_of("llama", "torch")
    asked = [Request([3, 1, 4], 12, n=3, stop_ids=())]

    def tokens(one: Engine) -> list[list[int]]:
        return [made.tokens for made in one.generate(asked)]

    before = tokens(engine)
    draw = np.random.default_rng(1)
    with torch.no_grad():
        for x in engine.params.values():
            x += torch.from_numpy(draw.standard_normal(x.shape, np.float32) * 0.3)
    changed = {name: x.numpy().copy() for name, x in engine.params.items()}
    assert tokens(engine) == tokens(Engine(engine.spec, changed, engine.tokenizer)) != before


@pytest.mark.parametrize("slots", [1, 32])
@pytest.mark.parametrize(
    ("name", "dtype", "share"),  # share: of the layers that are computed at once
    [
        ("llama-bias", "float32", 1),
        ("qwen3-window", "float32", 1),
        ("olmo2", "float32", 1),
        ("phi3-short", "float32", 1),
        ("qwen3.5", "float32", 0.5),
        ("gemma2", "float32", 0),
        ("gpt-oss", "float32", 0),
        ("mixtral", "float32", 0),
        ("llama-bias", "bfloat16", 1),
        ("qwen3-window", "bfloat16 and norms in float32", 1),
    ],
)
def test_layers_of_a_step(
    name: str, dtype: str, share: float, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of composed operations, and the log-probabilities of a plain pass."""
    more: Any = EVEN if name in ROUNDED_MORE else {}

    def made(**limits: int) -> Engine:
        engine = engine_of(name, "torch", more, dtype=dtype.split()[0], **limits)
        if "norms" in dtype:  # as in the sampling of grpo
            params = engine.params.items()
            engine.params = {n: x.float() if n.endswith("norm") else x for n, x in params}
        return engine

    with monkeypatch.context() as patch:
        patch.setattr(TorchOps, "decoded_rows", lambda *_: None)
        composed = by_name(made().generate(requests(5)))
    computed, advance = list[tuple[int, bool]](), DecodedRows.advance

    def counted(*given: Any) -> bool:
        computed.append((len(given[-1]), advance(*given)))
        return computed[-1][1]

    monkeypatch.setattr(DecodedRows, "advance", counted)
    monkeypatch.setattr(torch_arrays, "LEAST_BYTES", 0)
    engine = made(slots=slots)
    for one in engine.generate(asked := requests(5)):
        theirs = composed[one.request_id, one.sample]
        if dtype == "float32":
            prompt = next(r.prompt for r in asked if r.name == one.request_id)
            error = np.abs(plain_logprobs(engine, prompt, one.tokens) - one.raw_logprobs).max()
            assert error <= 1e-5
            assert one.tokens == theirs.tokens
        else:  # of rounding alone
            assert abs(one.raw_logprobs[0] - theirs.raw_logprobs[0]) < 0.05
    for several in {rows > 1 for rows, _ in computed}:
        gated = several and name == "qwen3.5"
        every = [done for rows, done in computed if (rows > 1) == several]
        assert np.mean(every) == (0 if gated else share)
    assert {rows > 1 for rows, _ in computed} >= {slots > 1}
