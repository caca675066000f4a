"""Packed rows compute what separate rows compute; padding is harmless."""

from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model import forward
from sabia.core.ops.base import dtype_name
from sabia.core.ops.kv_cache import KVCache
from sabia.core.ops.product import Multiply, Product, Rule
from sabia.core.parallel.build_ops import build_ops, load_ops
from sabia.core.spec import from_config

from .conftest import CONFIGS, perturbed, states

LENGTHS = (5, 1, 17, 9)
DOCUMENTS = [np.random.default_rng(n).integers(1, 293, n) for n in LENGTHS]


def packed(padding: int) -> dict[str, np.ndarray]:
    """All documents in one row, then padding; and a second row that is nothing but padding."""
    ids = np.concatenate([*DOCUMENTS, np.zeros(padding, int)])
    segments = np.repeat([1, 2, 3, 4, 0], [*LENGTHS, padding])
    positions = np.concatenate([np.arange(n) for n in (*LENGTHS, padding)])
    rows = {"ids": ids, "segments": segments, "positions": positions}
    return {name: np.stack([row, np.zeros_like(row)]) for name, row in rows.items()}


@pytest.mark.parametrize(
    "name", ["llama3", "qwen3-window", "gemma3", "qwen3-next", "deepseek-v3", "minicpm3", "gpt-oss"]
)
def test_packed_rows_equal_separate_documents(name: str, ops: Any) -> None:
    spec = from_config(CONFIGS[name])
    params = ops.to_device(perturbed(spec), "float32")
    batch = packed(padding=6)
    whole = states(spec, params, batch.pop("ids"), ops, **batch)
    assert np.isfinite(whole).all()
    separate = np.zeros((len(LENGTHS), max(LENGTHS)), int)
    for row, document in zip(separate, DOCUMENTS, strict=True):
        row[: len(document)] = document  # what follows a document it cannot see
    alone = states(spec, params, separate, ops)
    together = np.concatenate([alone[row, :length] for row, length in enumerate(LENGTHS)])
    assert np.abs(whole[0, : len(together)] - together).max() <= 1e-5


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("start", [0, 5, 16])
def test_a_slice_of_the_queries_is_a_slice_of_the_result(
    documents: bool, window: int | None, start: int, ops: Any
) -> None:
    random = np.random.default_rng(start)
    arrays = {n: random.standard_normal((2, 20, 4, 8), np.float32) for n in "qkv"}
    segments = np.sort(random.integers(1, 4, (2, 20)), -1)

    def run(first: int, last: int) -> np.ndarray:
        x = ops.to_device(arrays | {"q": arrays["q"][:, first:last]})
        given = ops.integers(segments, x["q"]) if documents else None
        like = x["q"][:, :, 0]
        mask = ops.attention_mask(like, 20, segments=given, start=first, window=window)
        out = ops.attention(x["q"], x["k"], x["v"], mask, scale=0.3)
        return ops.to_numpy({"x": out})["x"]

    whole = run(0, 20)
    assert np.abs(run(start, 20) - whole[:, start:]).max() <= 1e-6
    assert np.abs(run(start, start + 3) - whole[:, start : start + 3]).max() <= 1e-6


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("dynamic-long", "max_position_embeddings"),
        ("phi3-long", "original_max_position_embeddings"),
        ("minicpm3", "original_max_position_embeddings"),
    ],
)
def test_rotations_are_those_of_each_document_s_length(name: str, context: str, ops: Any) -> None:
    spec = from_config(CONFIGS[name] | {context: 12})
    params = ops.to_device(perturbed(spec), "float32")
    documents = [np.random.default_rng(n).integers(1, 293, n) for n in (9, 17)]
    segments, positions = np.repeat([1, 2], (9, 17)), np.concatenate([*map(np.arange, (9, 17))])
    rows = {"segments": segments[None], "positions": positions[None]}
    whole = states(spec, params, np.concatenate(documents)[None], ops, **rows)
    alone = [states(spec, params, document[None], ops) for document in documents]
    assert np.abs(whole - np.concatenate(alone, 1)).max() <= 1e-5
    # the rotations of the longer document are not those of a text within the context
    wide = from_config(CONFIGS[name] | {context: 200})
    assert np.abs(states(wide, params, documents[1][None], ops) - alone[1]).max() > 1e-2


def test_a_cache_beyond_the_original_context_is_refused() -> None:
    ops = load_ops("torch")
    spec = from_config(CONFIGS["phi3-long"])
    assert KVCache.create(spec, 1, 20, ops).slots == 20
    with pytest.raises(UsageError, match="21 tokens"):
        KVCache.create(spec, 1, 21, ops)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_of_a_model_computes_in_the_dtype_of_its_matrices(name: str) -> None:
    pytest.importorskip("torch")
    spec, ops = from_config(CONFIGS[name]), load_ops("torch")
    params = ops.to_device(perturbed(spec), "float32")
    matrices = {tensor.name for tensor in spec.tensors() if tensor.dtype_class == "weight"}
    in_bf16 = {k: ops.cast(x, "bfloat16") if k in matrices else x for k, x in params.items()}
    products = []

    class Recorded(Rule):
        def apply(self, product: Product, proceed: Multiply) -> Any:
            products.extend((m.name, dtype_name(product.x)) for m in product.matrices)
            return proceed(product)

    batch = packed(padding=6)
    x = forward.hidden(
        spec, in_bf16, batch.pop("ids"), build_ops(ops.name, record=Recorded()), **batch
    )
    assert dtype_name(x) == "bfloat16"
    assert {name for name, dtype in products if dtype != "bfloat16"} <= routers(spec)


def routers(spec: Any) -> set[str]:
    return {tensor.name for tensor in spec.tensors() if tensor.component == "router"}


def test_documents_do_not_see_each_other_or_the_future(tiny: Any, ops: Any) -> None:
    spec, arrays = tiny
    params = ops.to_device(arrays, "float32")
    batch = packed(padding=3)
    changed = batch | {"ids": batch["ids"].copy()}
    changed["ids"][0, 10] = (changed["ids"][0, 10] + 1) % 293  # in the third document
    first, second = (
        states(spec, params, rows["ids"], ops, segments=rows["segments"])[0]
        for rows in (batch, changed)
    )
    moved = np.abs(first - second).max(-1) > 0
    assert moved[10:23].all() and not moved[:10].any() and not moved[23:].any()


def test_gradients_with_padding_are_finite(tiny: Any, ops: Any) -> None:
    spec, arrays = tiny
    batch = packed(padding=7)
    targets = np.where(batch["segments"] > 0, batch["ids"], -1)

    def loss(params: Any) -> Any:
        x = forward.hidden(spec, params, batch["ids"], ops, segments=batch["segments"])
        return forward.token_losses(spec, params, x, targets, ops)[0].sum()

    params = ops.to_device(arrays, "float32")
    if ops.name == "jax":
        import jax

        grads = jax.jit(jax.grad(loss))(params)
    else:
        params = {name: p.requires_grad_() for name, p in params.items()}
        loss(params).backward()
        grads = {name: p.grad for name, p in params.items()}
    assert all(np.isfinite(grad).all() for grad in ops.to_numpy(grads).values())


def test_segments_with_a_cache_are_refused(tiny: Any, ops: Any) -> None:
    spec, arrays = tiny
    params = ops.to_device(arrays, "float32")
    cache = KVCache.create(spec, 1, 8, ops)
    with pytest.raises(UsageError, match="segments with a cache"):
        forward.hidden(
            spec, params, np.ones((1, 4)), ops, segments=np.ones((1, 4), int), cache=cache
        )
