"""Published quantized checkpoints: transformers' MXFP4 decoder, and FP8 blocks by hand."""

import ml_dtypes
import numpy as np
import pytest

from sabia.core.errors import BadData
from sabia.core.numerics.published import dequantize

RANDOM = np.random.default_rng(0)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 3]}


def test_mxfp4_is_what_transformers_decodes() -> None:
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    judge = pytest.importorskip("transformers.integrations.mxfp4", reason="the judge here")
    blocks = RANDOM.integers(0, 256, (3, 10, 2, 16), np.uint8)
    scales = RANDOM.integers(110, 135, (3, 10, 2), np.uint8)
    theirs = judge.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    plain = np.ones(3, np.float32)
    tensors = {"w_blocks": blocks, "w_scales": scales, "norm": plain}
    ours = dequantize(tensors, {"quant_method": "mxfp4"})
    assert ours.keys() == {"w", "norm"} and ours["norm"] is plain
    assert ours["w"].dtype == ml_dtypes.bfloat16 and ours["w"].shape == (3, 64, 10)
    np.testing.assert_array_equal(ours["w"].astype(np.float32), theirs.float().numpy())


def test_fp8_blocks_are_codes_times_the_scale_of_their_block() -> None:
    codes = RANDOM.standard_normal((10, 8)).astype(ml_dtypes.float8_e4m3fn)
    scale = RANDOM.random((3, 3), np.float32)
    found = dequantize({"a.weight": codes, "a.weight_scale_inv": scale}, FP8)
    rows, columns = np.arange(10) // 4, np.arange(8) // 3
    wanted = codes.astype(np.float32) * scale[rows][:, columns]
    assert list(found) == ["a.weight"]
    np.testing.assert_array_equal(found["a.weight"], wanted)


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        ({"w_scales": np.zeros((1, 2, 1), np.uint8)}, {"quant_method": "mxfp4"}, "w_blocks"),
        ({}, {"quant_method": "awq"}, "awq"),
        (
            {"w_blocks": np.zeros((1, 2, 1, 8), np.uint8), "w_scales": np.zeros((1, 2, 1))},
            {"quant_method": "mxfp4"},
            "w: cannot",
        ),
        (
            {"w": np.zeros((4, 4), np.int8), "w_scale_inv": np.ones((2, 1), np.float32)},
            FP8,
            "w: cannot",
        ),
    ],
)
def test_what_cannot_be_decoded_is_bad_data(tensors: dict, config: dict, named: str) -> None:
    with pytest.raises(BadData, match=named):
        dequantize(tensors, config)
