"""BF16 products in fp32: as exact as a processor's own, and which processors have their own."""

from typing import Any

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


def compiled(backend: str) -> Any:
    """`linear` as torch.compile makes it for a processor with AMX."""
    torch._dynamo.reset()
    return torch.compile(wide.linear, backend=backend, fullgraph=True)


@pytest.mark.parametrize("amx", [False, True])
def test_frozen_weights_get_no_gradient(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "HAS_AMX", True)
    monkeypatch.setattr(wide, "_rows_product", None)  # not called
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(3, 4, dtype=torch.bfloat16)
    multiply = compiled("aot_eager") if amx else wide.fp32_linear
    multiply(x, weight, None).sum().backward()
    assert weight.grad is None
    assert (x.grad == 3).all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_compiled_products_with_amx(
    bias: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's; the left operand of a weight's gradient is one row after the other."""
    monkeypatch.setattr(wide, "HAS_AMX", True)
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 50, 64), (48, 64), (48,)][: 2 + bias]
    inputs = [torch.randn(s, generator=draw).bfloat16().requires_grad_() for s in shapes]
    given = [*inputs, *([] if bias else [None])]
    grad = torch.randn((3, 50, 48), generator=draw).bfloat16()
    if backend == "aot_eager":
        torch.library.opcheck(
            torch.ops.sabia.cpu_rows_product,
            (grad[0].t().contiguous(), torch.ones(50, 64).bfloat16()),
        )
    lefts: list[torch.Tensor] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.sabia.cpu_rows_product.default:
                lefts.append(args[0])
            return function(*args, **kwargs or {})

    results = [torch.autograd.grad(torch.nn.functional.linear(*given), inputs, grad)]
    made = compiled(backend)(*given)
    with Watch():
        results.append(torch.autograd.grad(made, inputs, grad))
    assert [x.shape for x in lefts] == [(48, 150)] and lefts[0].is_contiguous()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    ("capabilities", "dtypes"),
    [({}, set()), ({"amx_bf16": True}, {torch.bfloat16}), ({"avx512_fp16": True}, {torch.float16})],
)
def test_units_are_known_by_name(capabilities: dict, dtypes: set) -> None:
    assert wide._native_dtypes(capabilities) == dtypes


@pytest.mark.parametrize("bias", [False, True])
def test_large_fp32_products_are_those_of_float64(bias, monkeypatch):
    monkeypatch.setattr(wide, "MKL_IS_FASTER", False)
    called = []
    product = wide.times
    monkeypatch.setattr(
        wide, "times", lambda x, w: (called.append(wide.is_large(x, w)), product(x, w))[1]
    )
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 520, 256), (300, 256), *([(300,)] if bias else [])]
    narrow = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in narrow]
    results = []
    for inputs, linear in ((narrow, wide.fp32_linear), (exact, torch.nn.functional.linear)):
        y = linear(*inputs, *([] if bias else [None]))
        # once a gradient of its own for each element, once one for all (its strides are 0)
        gradients = torch.autograd.grad(y.square().sum() / 100, inputs, retain_graph=True)
        results.append([y, *gradients, *torch.autograd.grad(y.sum(), inputs)])
    assert all(called) and len(called) == (4 if bias else 5)  # both gradients, twice each
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found.double(), expected, rtol=2e-5, atol=2e-4)
