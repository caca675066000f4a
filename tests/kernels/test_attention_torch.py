"""Attention in torch: reference against a NumPy oracle; SDPA, FlexAttention and the Triton kernel
(interpreted on CPU) against the reference, values and every gradient."""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import pytest
import torch
from attention_cases import CASES, Case, interpreted, oracle

from sabia.kernels.attention.interface import attention, attention_mask, choose_attention
from sabia.kernels.attention.torch_impl import flex
from sabia.kernels.runtime.dispatch import Unavailable

Tensor = torch.Tensor
TOLERANCE = 1e-5


def tensors(case: Case, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Any]:
    data = {n: None if x is None else torch.from_numpy(x) for n, x in case.arrays().items()}
    for name in ("q", "k", "v", "grad"):
        data[name] = data[name].to(dtype)
    for name in ("q", "k", "v", "sinks"):
        if data[name] is not None:
            data[name].requires_grad_()
    mask = attention_mask(
        data["q"], case.T, case.S, segments=data["segments"], start=case.start, window=case.window
    )
    return data, mask


def run(case: Case, implementation: str | None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    data, mask = tensors(case, dtype)
    if implementation == "flex":
        scale = case.N**-0.5 if case.scale is None else case.scale
        q, k, v = (data[n].detach() for n in "qkv")  # torch has no gradient of it on CPU
        return [flex(q, k, v, mask, scale, case.softcap, data["sinks"])]
    out = attention(
        data["q"], data["k"], data["v"], mask, scale=case.scale, softcap=case.softcap,
        sinks=data["sinks"], implementation=implementation,
    )  # fmt: skip
    inputs = [data[n] for n in ("q", "k", "v", "sinks") if data[n] is not None]
    return [out, *torch.autograd.grad(out, inputs, data["grad"])]


def agree(got: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        size = other.float().abs().max().clamp_min(1e-3)
        torch.testing.assert_close(one.float() / size, other.float() / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_is_the_definition(case: Case) -> None:
    out = run(case, "reference")[0]
    np.testing.assert_allclose(out.detach().numpy(), oracle(case, case.arrays()), atol=5e-6)


@pytest.mark.parametrize("case", interpreted({"causal", "everything", "latent", "slice"}))
def test_triton_agrees(case: Case) -> None:
    agree(run(case, "triton"), run(case, "reference"))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_flex_agrees(case: Case) -> None:
    agree(run(case, "flex"), run(case, "reference")[:1])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_library_agrees(case: Case) -> None:
    agree(run(case, "library"), run(case, "reference"))


@pytest.mark.slow
def test_triton_in_half_precision() -> None:
    """p and ds are rounded before products. (The interpreter cannot multiply bfloat16.)"""
    case = CASES[6]
    agree(run(case, "triton", torch.float16), run(case, "reference"), 2e-3)


def test_flex_blocks_skip_what_nobody_sees() -> None:
    """Against create_block_mask, which looks at every pair."""
    from torch.nn.attention.flex_attention import create_block_mask

    segments = torch.ones(2, 1000, dtype=torch.int32)
    segments[0, 300:] = 2
    segments[0, 850:] = 0
    mask = attention_mask(torch.ones(1), 600, 1000, segments=segments, start=400, window=200)
    made = mask.blocks
    dense = mask.dense[:, 0]
    judge = create_block_mask(lambda b, h, i, j: dense[b, i, j], 2, None, 600, 1000, device="cpu")
    assert torch.equal(made.kv_num_blocks, judge.kv_num_blocks)
    assert torch.equal(made.full_kv_num_blocks, judge.full_kv_num_blocks)
    assert torch.equal(made.to_dense(), judge.to_dense())


def test_operators_are_sound() -> None:
    """torch's own checks of the registration, and the operator inside a compiled graph."""
    pytest.importorskip("sabia.kernels.attention.triton_impl", exc_type=ImportError)
    case = Case("small", B=1, T=9, S=9, H=2, K=1, N=16, M=16, sinks=True)
    data, mask = tensors(case)
    arrays = (data["q"], data["k"], data["v"], mask.first, mask.until, data["sinks"])
    torch.library.opcheck(torch.ops.sabia.attention_forward, (*arrays, 0, 0.25, 0.0))
    attend = torch.compile(
        lambda *qkv: attention(*qkv, mask, sinks=data["sinks"], implementation="triton"),
        backend="aot_eager",
        fullgraph=True,
    )
    out = attend(data["q"], data["k"], data["v"])
    agree([out], run(case, "reference")[:1])


@pytest.mark.parametrize("name", ["reference", "library"])
def test_masks_are_made_and_read_within_a_compiled_graph(name: str) -> None:
    data, _ = tensors(Case("small", B=2, T=9, S=9, H=2, K=1, N=16, M=16))
    segments = torch.tensor([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = attention_mask(q, 9, 9, segments=segments, window=3)
        return attention(q, k, v, mask, implementation=name)

    qkv = [data[n] for n in "qkv"]
    whole = torch.compile(attend, backend="aot_eager", fullgraph=True)
    agree([whole(*qkv)], [attend(*qkv)])


def test_choice_is_said_and_never_replaced() -> None:
    data, mask = tensors(CASES[0])
    qkv = [data[n] for n in "qkv"]
    assert choose_attention(*qkv, mask).implementation == "library"
    assert choose_attention(*qkv, mask, softcap=1.0).implementation == "library"
    with pytest.raises(Unavailable, match="pallas"):
        attention(*qkv, mask, implementation="pallas")
    with pytest.raises(ValueError, match="expected one of reference"):
        attention(*qkv, mask, implementation="fast")
    with pytest.raises(ValueError, match="queries 30"):
        attention_mask(qkv[0], 10, 37, start=30)
