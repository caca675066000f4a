"""Attention on CPU in pieces (kernels/attention/torch_cpu.py), against the reference with a matrix
[T, S]: random masks with small pieces, masks of real lengths, the operators for torch.compile."""

from typing import Any

import numpy as np
import pytest
import torch

from sabia.kernels.attention import torch_cpu
from sabia.kernels.attention.interface import attention, attention_mask

Tensor = torch.Tensor


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("TILE", 4), ("LEAST_RUN", 7), ("LEAST_KEYS", 5), ("KEY_STEP", 3)):
        monkeypatch.setattr(torch_cpu, name, size)


def random_segments(random: np.random.Generator, rows: int, keys: int, longest: int) -> Tensor:
    """Documents of 1 to `longest` tokens; in half of the rows padding at the end, or within."""
    segments = np.zeros((rows, keys), np.int32)
    for row in segments:
        lengths = random.integers(1, longest + 1, keys)
        row[:] = np.repeat(np.arange(1, keys + 1), lengths)[:keys]
        if random.integers(2):
            row[int(random.integers(keys)) :] = 0
        elif random.integers(2):
            row[row == int(random.integers(1, 5))] = 0
    return torch.from_numpy(segments)


def random_case(seed: int, dtype: torch.dtype) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    random = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    rows, keys, key_heads = int(random.integers(1, 4)), int(random.integers(1, 90)), pick(1, 2, 3)
    start = pick(0, int(random.integers(keys)))
    queries = pick(keys - start, int(random.integers(1, keys - start + 1)))
    shape = {
        "segments": pick(None, random_segments(random, rows, keys, pick(3, 20, keys))),
        "start": start,
        "window": pick(None, None, 1, int(random.integers(1, keys + 5))),
        "causal": bool(random.integers(4)),
    }
    heads, size = key_heads * pick(1, 2, 4), pick(8, 16, 24)
    value_size = pick(size, size, 8, 32)
    sizes = {
        "q": (rows, queries, heads, size),
        "k": (rows, keys, key_heads, size),
        "v": (rows, keys, key_heads, value_size),
        "sinks": (heads,),
        "grad": (rows, queries, heads, value_size),
    }
    data: dict[str, Any] = {
        name: torch.from_numpy(random.standard_normal(size, np.float32)).to(dtype)
        for name, size in sizes.items()
    }
    mask = attention_mask(data["q"], queries, keys, **shape)
    options = {"softcap": pick(None, None, 2.0), "scale": pick(None, 0.3)}
    if random.integers(2):
        data["sinks"] = None
    return data, mask, options


def leaves_of(data: dict[str, Any]) -> dict[str, Tensor]:
    given = {name: data[name] for name in ("q", "k", "v", "sinks")}
    return {n: x.clone().requires_grad_() for n, x in given.items() if x is not None}


def computed(data: dict[str, Any], mask: Any, **options: Any) -> list[Tensor]:
    """Output and gradients, in fp32."""
    leaves = leaves_of(data)
    out = attention(*(leaves[n] for n in "qkv"), mask, sinks=leaves.get("sinks"), **options)
    grads = torch.autograd.grad(out, list(leaves.values()), data["grad"])
    return [x.detach().float() for x in (out, *grads)]


def agree(ours: list[Tensor], right: list[Tensor], bound: float) -> None:
    for one, other in zip(ours, right, strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).abs().max() <= bound * other.abs().max().clamp_min(1.0)


@pytest.mark.parametrize("seed", range(150))
def test_random_masks_in_small_pieces(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    data, mask, options = random_case(seed, torch.float32)
    right = computed(data, mask, implementation="reference", **options)
    agree(computed(data, mask, implementation="library", **options), right, 5e-6)


@pytest.mark.parametrize("seed", range(40))
def test_bf16_rounds_as_the_reference_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    data, mask, options = random_case(seed, torch.bfloat16)
    wide = {name: None if x is None else x.float() for name, x in data.items()}
    right = computed(wide, mask, implementation="reference", **options)
    agree(computed(data, mask, implementation="library", **options), right, 3e-2)


@pytest.mark.parametrize("amx", [False, True])  # with it the forward pass is torch's
@pytest.mark.parametrize(
    ("rows", "length", "heads", "longest", "window"),
    [
        (5, 37, (4, 2), None, None), (2, 300, (2, 2), None, None), (1, 767, (3, 1), None, None),
        (3, 300, (4, 2), 40, None), (2, 600, (2, 1), 500, None), (2, 600, (2, 2), None, 130),
    ],
)  # fmt: skip
def test_short_rows_in_bf16_by_whole_products(
    rows: int, length: int, heads: tuple[int, int], longest: int | None, window: int | None,
    amx: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Results within 8e-3 of the largest of those in fp32 (torch's gradients: up to 2e-2), in
    blocks of queries and batches of pieces; the setting of fp32 products stays as it was."""
    monkeypatch.setattr(torch_cpu, "HAS_BF16_UNITS", True)
    monkeypatch.setattr(torch_cpu, "HAS_AMX", amx)
    monkeypatch.setattr(torch_cpu, "SCORES", 5 * length**2)
    random = np.random.default_rng(length)
    segments = None if longest is None else random_segments(random, rows, length, longest)
    shapes = dict.fromkeys(("q", "grad"), (rows, length, heads[0], 32))
    shapes |= dict.fromkeys(("k", "v"), (rows, length, heads[1], 32))
    data: dict[str, Any] = {
        name: torch.from_numpy(random.standard_normal(shape, np.float32)).bfloat16()
        for name, shape in shapes.items()
    } | {"sinks": None}
    mask = attention_mask(data["q"], length, length, segments=segments, window=window)
    wide = {name: None if x is None else x.float() for name, x in data.items()}
    right = computed(wide, mask, implementation="reference")
    before = torch.backends.mkldnn.matmul.fp32_precision
    ours = computed(data, mask, implementation="library")
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    for one, other in zip(ours, right, strict=True):
        assert (one - other).abs().max() <= 8e-3 * other.abs().max()


@pytest.mark.parametrize("window", [None, 64, 300, 700])
@pytest.mark.parametrize("longest", [5, 64, 700, 2000])
@pytest.mark.parametrize("start", [0, 777])
def test_real_lengths(window: int | None, longest: int, start: int) -> None:
    random = np.random.default_rng(longest)
    segments = random_segments(random, 2, 1500, longest)
    names = {"q": (2, 1500 - start, 4, 16), "k": (2, 1500, 2, 16), "v": (2, 1500, 2, 16)}
    names |= {"grad": names["q"]}
    data: dict[str, Any] = {
        name: torch.from_numpy(random.standard_normal(shape, np.float32))
        for name, shape in names.items()
    } | {"sinks": None}
    mask = attention_mask(
        data["q"], 1500 - start, 1500, segments=segments, start=start, window=window
    )
    agree(
        computed(data, mask, implementation="library"),
        computed(data, mask, implementation="reference"),
        5e-6,
    )


@pytest.mark.parametrize("window", [None, 64, 300])
@pytest.mark.parametrize("longest", [5, 300, 2000])
@pytest.mark.parametrize("share", [0.1, 0.97])
def test_queries_at_some_keys(window: int | None, longest: int, share: float) -> None:
    """Some queries of whole rows, in another order too, have the results and gradients of these."""
    random = np.random.default_rng(longest)
    segments = random_segments(random, 2, 1100, longest)
    at = np.stack([np.sort(random.permutation(1100)[: int(1100 * share)]) for _ in range(2)])
    at[1, : len(at[1]) // 2] = at[1, : len(at[1]) // 2][::-1].copy()
    rows, taken = torch.arange(2)[:, None], torch.from_numpy(at)
    shapes = {"q": (2, 1100, 4, 16), "k": (2, 1100, 2, 16), "v": (2, 1100, 2, 16)}
    whole: dict[str, Any] = {
        name: torch.from_numpy(random.standard_normal(shape, np.float32))
        for name, shape in shapes.items()
    } | {"sinks": None}
    grad = torch.from_numpy(random.standard_normal((*at.shape, 4, 16), np.float32))
    some = whole | {"q": whole["q"][rows, taken], "grad": grad}
    whole["grad"] = torch.zeros(shapes["q"]).index_put((rows, taken), grad)
    masks = [
        attention_mask(whole["q"], queries, 1100, segments=segments, window=window, at=where)
        for queries, where in ((1100, None), (at.shape[1], taken))
    ]
    out, d_q, *others = computed(whole, masks[0], implementation="reference")
    right = [out[rows, taken], d_q[rows, taken], *others]
    for implementation in ("library", "reference"):
        agree(computed(some, masks[1], implementation=implementation), right, 1e-5)


def test_what_a_mask_holds_is_linear_in_the_row() -> None:
    """A context-parallel rank's 4,096 of 32,768 tokens; a matrix of them would take 537 MB."""
    length, start = 4096, 5 * 4096
    random = np.random.default_rng(0)
    for segments, window in (
        (None, None),
        (None, 64),
        (None, 512),
        (None, 10000),
        (random_segments(random, 1, 32768, 100), None),
        (random_segments(random, 1, 32768, 20000), None),
    ):
        like = torch.zeros(1, length, 8)
        mask = attention_mask(like, length, 32768, segments=segments, start=start, window=window)
        parts = mask.groups(1)
        held = [x for part in parts for x in (part.queries, part.keys, part.bias)]
        tensors = [x for x in held if isinstance(x, Tensor)]
        assert sum(x.numel() * x.element_size() for x in tensors) < 6e6
        assert len(parts) < 40


@pytest.mark.parametrize("seed", range(4))
def test_the_operators_of_compiled_code(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    data, mask, options = random_case(seed, torch.float32)
    settings = {"implementation": "library", **options}
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)

    leaves = leaves_of(data)
    out = compiled(*(leaves[n] for n in "qkv"), mask, sinks=leaves.get("sinks"), **settings)
    ours = [out.detach(), *torch.autograd.grad(out, list(leaves.values()), data["grad"])]
    agree(ours, computed(data, mask, **settings), 1e-6)


def test_operators_are_registered_soundly() -> None:
    q = torch.randn(1, 9, 2, 8, requires_grad=True)
    k, v = (torch.randn(1, 9, 1, 8, requires_grad=True) for _ in range(2))
    mask = attention_mask(q, 9, 9, segments=torch.tensor([[1] * 4 + [2] * 5]))
    arguments = (q, k, v, torch.randn(2), mask.first, mask.last_keys, True, 0.3, None)
    torch.library.opcheck(torch.ops.sabia.cpu_attention, arguments)
