"""Checkpoints to Hugging Face directories: the same bytes, a tensor at a time; merged adapters."""

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sabia.core.errors import BadData
from sabia.core.model.forward import hidden, logits
from sabia.core.model.init import init_params
from sabia.core.model.lora import LoraConfig, init_lora
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import build_ops, load_ops
from sabia.core.spec import ModelSpec, from_config, new_config
from sabia.core.train import convert
from sabia.core.train.checkpoint.pieces import Piece
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Saver

SHAPE = {"hidden": 32, "layers": 2, "vocab": 67, "heads": 4, "kv_heads": 2, "head_dim": 8}
SHAPE |= {"ffn": 48, "context": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
           "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
           "swiglu_limit": 7.0, "hidden_act": "silu"}  # fmt: skip
CONFIGS = {
    "plain": new_config("llama", **SHAPE),
    "tied": new_config("qwen3", **SHAPE, tied=True),
    "stacked": new_config("qwen3", **SHAPE) | {"model_type": "qwen3_moe"} | EXPERTS,
    "fused": new_config("llama", **SHAPE) | {"model_type": "gpt_oss"} | GPT_OSS,
}
PHI = {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "pad_token_id": 0}
MERGED = CONFIGS | {"phi3": CONFIGS["plain"] | {"model_type": "phi3"} | PHI}


@pytest.fixture(params=CONFIGS)
def spec(request: pytest.FixtureRequest):
    return from_config(CONFIGS[request.param])


def save_halves(place: Path, params: dict[str, np.ndarray]) -> Reader:
    """A checkpoint of parameters, each cut in two where it can be."""
    pieces = []
    for name, array in params.items():
        half = len(array) // 2
        at = (half, *(0,) * (array.ndim - 1))
        pieces += [Piece(f"param/{name}", array[:half], (), array.shape)] * (half > 0)
        pieces += [Piece(f"param/{name}", array[half:], at, array.shape)]
    with Saver(place) as saver:
        saver.save(1, pieces, {})
    return Reader(latest(place))


def files(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_export_is_what_saving_whole_arrays_gives(tmp_path, spec, dtype: str, shard: int) -> None:
    params = init_params(spec, 3)
    kind = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    cast = {name: array.astype(kind) for name, array in params.items()}
    hub.save_model(tmp_path / "whole", spec, cast, max_shard_bytes=shard)
    reader = save_halves(tmp_path / "run", params)
    convert.export_checkpoint(reader, spec, tmp_path / "lazy", dtype, max_shard_bytes=shard)
    assert files(tmp_path / "lazy") == files(tmp_path / "whole")
    assert len(files(tmp_path / "lazy")) == 2 or shard < 10**9


def test_peak_memory_is_a_tensor(tmp_path: Path) -> None:
    """24 MiB of parameters in bfloat16, of which the largest has 2 MiB."""
    wide = SHAPE | {"hidden": 512, "ffn": 2048, "vocab": 2048, "layers": 4}
    spec = from_config(new_config("llama", **wide))
    reader = save_halves(tmp_path / "run", init_params(spec, 0))
    total = sum(2 * int(np.prod(tensor.shape)) for tensor in spec.tensors())
    tracemalloc.start()
    convert.export_checkpoint(reader, spec, tmp_path / "out", max_shard_bytes=total)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < total / 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    spec, other = (from_config(CONFIGS[name]) for name in ("plain", "tied"))
    reader = save_halves(tmp_path / "run", init_params(spec, 0))
    with pytest.raises(BadData, match="missing"):
        convert.export_checkpoint(reader, other, tmp_path / "out")


@pytest.mark.parametrize("targets", ["", r"attn\.[qv]$", r"layers\.1\.(attn\.o|mlp)"])
@pytest.mark.parametrize("name", ["plain", "tied", "stacked", "fused", "phi3"])
def test_merged_exports_have_the_logits_of_the_adapters(
    tmp_path: Path, name: str, targets: str
) -> None:
    """Rank, alpha and targets of each kind, from a checkpoint in pieces, in files of any size."""
    ops = load_ops("torch")
    spec, lora = from_config(MERGED[name]), LoraConfig(3, 7.0, targets)
    drawn, random = init_params(spec, 3) | init_lora(spec, lora, 1), np.random.default_rng(2)
    # matrices and both parts of each adapter are large enough to matter
    params = {
        key: x + np.float32(0.2) * random.standard_normal(x.shape, np.float32)
        for key, x in drawn.items()
    }
    reader = save_halves(tmp_path / "run", params)
    convert.export_checkpoint(
        reader, spec, tmp_path / "final", "float32", lora=lora, max_shard_bytes=20_000
    )
    held = ops.to_device(params)
    adapted = logits_of(spec, held, build_ops("torch", adapters=lora))
    loaded, merged = hub.load_model(tmp_path / "final")
    assert loaded == spec and merged.keys() == {tensor.name for tensor in spec.tensors()}
    exported = logits_of(spec, ops.to_device(merged), ops)
    scale = np.abs(adapted).max()
    assert np.abs(exported - adapted).max() <= 1e-5 * scale
    assert np.abs(exported - logits_of(spec, held, ops)).max() >= 0.01 * scale
    convert.export_checkpoint(reader, spec, tmp_path / "narrow", lora=lora)
    for key, array in hub.load_model(tmp_path / "narrow")[1].items():
        assert (array == merged[key].astype(ml_dtypes.bfloat16)).all(), key


def logits_of(spec: ModelSpec, params: dict[str, Any], ops: Any) -> np.ndarray:
    """Logits of 33 tokens."""
    ids = np.random.default_rng(5).integers(0, spec.vocab_size, (1, 33))
    return np.asarray(logits(spec, params, hidden(spec, params, ids, ops), ops))
