"""BF16 products in fp32: as exact as a processor's own, and which processors have their own."""

import pytest

torch = pytest.importorskip("torch", reason="the torch backend")

from sabia.kernels.runtime import torch_fp32 as wide  # noqa: E402


@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradients_are_rounded_once(bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 64), (48, 64), (48,)][: 2 + bias]
    inputs = [torch.randn(s, generator=draw).bfloat16().requires_grad_() for s in shapes]
    grad = torch.randn((3, 5, 48), generator=draw).bfloat16()
    y = wide.fp32_linear(*inputs, *([] if bias else [None]))
    found = [y, *torch.autograd.grad(y, inputs, grad)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    z = torch.nn.functional.linear(*exact)
    wanted = [z, *torch.autograd.grad(z, exact, grad.double())]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours.double() - theirs).abs() - theirs.abs() / 256).max() <= 1e-4


def test_frozen_weights_get_no_gradient() -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(3, 4, dtype=torch.bfloat16)
    wide.fp32_linear(x, weight, None).sum().backward()
    assert weight.grad is None
    assert (x.grad == 3).all()


@pytest.mark.parametrize(
    ("capabilities", "dtypes"),
    [({}, set()), ({"amx_bf16": True}, {torch.bfloat16}), ({"avx512_fp16": True}, {torch.float16})],
)
def test_units_are_known_by_name(capabilities: dict, dtypes: set) -> None:
    assert wide._native_dtypes(capabilities) == dtypes
