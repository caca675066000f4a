"""The step: the two backends agree, accumulation is exact, AdamW is the formula, bf16 is real."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_state import reading, whole_state

from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage.hub import init_params
from sabia.core.parallel.mesh import Mesh
from sabia.core.spec import from_config, new_config
from sabia.core.train.checkpoint import local
from sabia.core.train.checkpoint.pieces import Piece, write_pieces
from sabia.core.train.checkpoint.reader import Reader
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.optimizer.config import OptimizerConfig
from sabia.core.train.stepper_factory import make_stepper
from sabia.kernels.runtime import dispatch

SPEC = from_config(new_config("llama", hidden=32, layers=1, vocab=97, heads=4, kv_heads=2, ffn=64))
PARAMS = init_params(SPEC, 0)
ROWS, LENGTH = 8, 24


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch = pytest.importorskip("torch", reason="the torch backend")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(seed: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Rows of two documents each, with padding, an uneven mask and two sources."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 50, (rows, length)).astype(np.int32)
    ids[:, 1::2] = ids[:, ::2]
    cut, end = length // 3, length - 2
    column = np.arange(length)
    segments = np.where(column < cut, 1, np.where(column < end, 2, 0)).astype(np.int32)
    positions = np.where(column < cut, column, column - cut).astype(np.int32)
    mask = rng.random((rows, length)) < rng.random((rows, 1))
    return {
        "input_ids": ids,
        "targets": np.roll(ids, -1, 1),
        "loss_mask": (mask & (segments > 0)).astype(np.float32),
        "segments": np.tile(segments, (rows, 1)),
        "positions": np.tile(positions, (rows, 1)),
        "source": np.eye(2, dtype=np.float32)[rng.integers(0, 2, rows)],
    }


_MADE: dict = {}  # JAX compiles a step for seconds: settings share one, set back to the start


def stepper(backend: str = "torch", **settings):
    if backend != "jax":
        return make_stepper(backend, SPEC, PARAMS, next_token_loss, **settings)
    key = tuple(sorted(settings.items()))
    if key not in _MADE:
        one = make_stepper("jax", SPEC, PARAMS, next_token_loss, mesh=Mesh(), **settings)
        _MADE[key] = one, whole_state(one)
    one, start = _MADE[key]
    one.load(reading(start))
    return one


def test_backends_agree_over_twenty_steps() -> None:
    torch_one, jax_one = stepper("torch"), stepper("jax", micro_batch=3)
    for step in range(20):
        a, b = (one.step(batch(step), 1e-2, np.array([2.0, 0.0])) for one in (torch_one, jax_one))
        assert abs(a.loss - b.loss) <= 1e-5
        assert abs(a.grad_norm - b.grad_norm) <= 1e-4 * a.grad_norm
        assert a.weight == b.weight == batch(step)["loss_mask"].sum()
        np.testing.assert_allclose(a.extras["source_loss"], b.extras["source_loss"], rtol=1e-5)
        assert a.extra_sums.tolist() == b.extra_sums.tolist() == [2.0, 0.0]
    assert a.loss < 4.4
    wanted = whole_state(jax_one)
    for name, array in whole_state(torch_one).items():
        np.testing.assert_allclose(array, wanted[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_handover_with_optimizer_state(first: str, second: str) -> None:
    one = stepper(first)
    for step in range(5):
        one.step(batch(step), 1e-2)
    handed = whole_state(one)
    wanted = [one.step(batch(step), 1e-2).loss for step in range(5, 10)]
    other = stepper(second)
    other.load(reading(handed))
    found = [other.step(batch(step), 1e-2).loss for step in range(5, 10)]
    assert np.abs(np.array(wanted) - np.array(found)).max() <= 1e-5


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_micro_batches_divide_once_by_the_global_weight(backend: str) -> None:
    """Micro-batches of very different weight give the same update as one batch."""
    data = batch(1)
    data["loss_mask"][:6] *= np.arange(LENGTH) < 3
    whole, parts = stepper(backend), stepper(backend, micro_batch=3)
    a, b = whole.step(data, 1e-2), parts.step(data, 1e-2)
    assert abs(a.loss - b.loss) <= 1e-6
    assert abs(a.grad_norm - b.grad_norm) <= 1e-6
    states = whole_state(whole), whole_state(parts)
    for name in PARAMS:  # m is (1 - beta1) times the clipped gradient
        found = [state[f"m/{name}"] for state in states]
        np.testing.assert_allclose(*found, atol=2e-8, rtol=1e-5, err_msg=name)


def gradients(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the mean loss, by torch's autograd on its own."""
    import torch

    from sabia.core.parallel.build_ops import load_ops

    params = {k: torch.tensor(v, requires_grad=True) for k, v in PARAMS.items()}
    loss, weight, _ = next_token_loss(
        SPEC, params, {k: torch.tensor(v) for k, v in data.items()}, load_ops("torch")
    )
    (loss / weight).backward()
    return {k: p.grad.numpy() for k, p in params.items()}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_first_update_is_the_formula(backend: str) -> None:
    """After one step m and v are known in closed form, and so is the update (decay marked)."""
    config = OptimizerConfig("adamw", 0.3, 0.05, settings={"beta1": 0.8, "beta2": 0.9, "eps": 1e-6})
    one = stepper(backend, optimizer=config)
    norm = one.step(batch(2), 0.01).grad_norm
    raw = gradients(batch(2))
    assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in raw.values())), rel=1e-5)
    assert norm > config.clip_norm
    state = whole_state(one)
    assert state["count"] == 1
    for name, g in raw.items():
        g = g * (config.clip_norm / norm)
        decay = 0.3 * PARAMS[name] if len(PARAMS[name].shape) > 1 else 0.0
        wanted = PARAMS[name] - 0.01 * (g / (np.abs(g) + 1e-6) + decay)
        np.testing.assert_allclose(state[f"m/{name}"], 0.2 * g, atol=1e-7)
        np.testing.assert_allclose(state[f"v/{name}"], 0.1 * g**2, atol=1e-8)
        np.testing.assert_allclose(state[f"param/{name}"], wanted, atol=3e-4)
        exact = np.abs(g) > 1e-5
        np.testing.assert_allclose(state[f"param/{name}"][exact], wanted[exact], atol=2e-5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_nothing_happens_without_weight_or_with_nan(backend: str) -> None:
    one = stepper(backend)
    before = whole_state(one)
    empty, broken = batch(3), batch(3)
    empty["loss_mask"] = np.zeros_like(empty["loss_mask"])
    broken["loss_mask"] = broken["loss_mask"] * np.float32("nan")
    for data in (empty, broken):
        assert one.step(data, 0.1).updated is False
    for name, array in whole_state(one).items():
        assert np.array_equal(array, before[name]), name


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_bf16_computes_in_bf16_and_keeps_fp32_masters(backend: str) -> None:
    full, narrow = stepper(backend), stepper(backend, precision="bf16")
    losses = [(full.step(batch(s), 1e-2).loss, narrow.step(batch(s), 1e-2).loss)
              for s in range(8)]  # fmt: skip
    differences = [abs(a - b) for a, b in losses]
    assert 1e-5 < max(differences) < 0.05
    assert losses[-1][1] < losses[0][1]
    state = whole_state(narrow)
    assert all(array.dtype == np.float32 for n, array in state.items() if n != "count")
    small = state["param/embed"]
    assert (small.view(np.uint32) & 0xFFFF).any(), "masters were rounded to bf16"


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_evaluate_is_the_loss_before_the_step(backend: str) -> None:
    one = stepper(backend)
    measured = one.evaluate(batch(4))
    stepped = one.step(batch(4), 1e-3)
    assert measured.loss == pytest.approx(stepped.loss, abs=1e-6)
    np.testing.assert_allclose(
        measured.extras["source_loss"], stepped.extras["source_loss"], rtol=1e-5
    )


def test_packed_loss_is_the_sum_of_separate_losses() -> None:
    """Two documents in one row cost what they cost alone."""
    one, data = stepper(), batch(5, rows=2)
    data["loss_mask"] = np.where(np.isin(np.arange(LENGTH), (7, LENGTH - 3)), 0, 1) * (
        data["segments"] > 0
    )
    data["loss_mask"] = data["loss_mask"].astype(np.float32)
    whole, cut = one.evaluate(data), LENGTH // 3
    total = 0.0
    for part in (slice(0, cut), slice(cut, LENGTH - 2)):
        alone = {k: v[:, part] for k, v in data.items() if k != "source"}
        del alone["segments"], alone["positions"]
        found = one.evaluate(alone)
        total += found.loss * found.weight
    assert whole.loss * whole.weight == pytest.approx(total, abs=1e-3)


def test_variable_shapes_in_torch() -> None:
    one = stepper()
    for rows, length in ((3, 12), (8, 24), (1, 8)):
        assert np.isfinite(one.step(batch(0, rows, length), 1e-3).loss)


def test_a_loss_of_ones_own() -> None:
    """What grpo needs: any loss over ops, with its own weights and extras."""

    def own_loss(spec, params, data, ops):
        loss, weight, _ = next_token_loss(spec, params, data, ops)
        return 2.0 * loss, weight * 0 + 5.0, {"rows": weight * 0 + 1.0}

    found = make_stepper("torch", SPEC, PARAMS, own_loss, micro_batch=4).step(batch(6), 0.0)
    plain = stepper().evaluate(batch(6))
    assert found.weight == 10.0
    assert found.extras["rows"] == 2.0
    assert found.loss == pytest.approx(2 * plain.loss * plain.weight / 10, rel=1e-5)


def test_micro_batches_of_jax_are_filled_up_as_little_as_possible() -> None:
    """Passes over 8 rows of at most 7 at a time: 4 + 4, not 7 + 7."""

    def rows_loss(spec, params, data, ops):
        rows = data["input_ids"].shape[0]
        return params["embed"].sum() * 0, data["loss_mask"].sum(), {"rows": np.float32(rows)}

    one = make_stepper("jax", SPEC, PARAMS, rows_loss, mesh=Mesh(), micro_batch=7)
    assert one.evaluate(batch(6)).extras["rows"] == 8.0


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--precision"):
        stepper(precision="fp16")
    with pytest.raises(UsageError, match="--backend"):
        stepper("tensorflow")
    one = stepper()
    state = whole_state(one)
    of_others = {"m/embed": None}, {"v/embed": np.zeros(3, np.float32)}
    for step, (other, message) in enumerate(zip(of_others, ("m/embed", "outside"), strict=True)):
        arrays = {name: array for name, array in (state | other).items() if array is not None}
        saving = local.saving_path(tmp_path, step)
        saving.mkdir()
        entry = write_pieces(saving, 0, (Piece(name, array) for name, array in arrays.items()))
        local.commit(tmp_path, step, [entry], {})
        reader = Reader(local.open_checkpoint(local.path_of(tmp_path, step)))
        with pytest.raises(BadData, match=message):
            one.load(reader.read)


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral", "qwen3_next"))],
)
def test_a_compiled_step_is_one_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers, for batches of two sizes; traced, without generating code."""
    torch = pytest.importorskip("torch", reason="the torch backend")
    graphs = list[Any]()

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    monkeypatch.setattr(dispatch, "_FRAMEWORKS", {})  # as in a new process
    experts = {"experts": 4, "chosen": 2, "expert_ffn": 16} if family != "llama" else {}
    shape = {"hidden": 32, "layers": 2 if family == "llama" else 4, "vocab": 97, "heads": 4}
    spec = from_config(new_config(family, **shape, **experts, kv_heads=2, ffn=64))
    given = ("torch", spec, init_params(spec, 0), next_token_loss)
    plain, compiled = (
        make_stepper(*given, precision="bf16", compiled=compiled) for compiled in (False, True)
    )
    for number in range(2):
        data = batch(number, length=16 + 8 * number)
        a, b = (one.step(data, 1e-3).loss for one in (compiled, plain))
        assert abs(a - b) <= 0.03
    assert 1 <= len(graphs) <= 2
    torch._dynamo.reset()  # what it learnt of sizes


@pytest.mark.slow
def test_compiled_step_agrees() -> None:
    plain, compiled = stepper(), stepper(compiled=True)
    for step in range(3):
        a, b = (one.step(batch(step), 1e-2).loss for one in (plain, compiled))
        assert abs(a - b) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "remat", "bound"),
    [("fp32", "none", 1e-5), ("bf16", "none", 0.03), ("bf16", "matmuls", 0.03)],
)
def test_compiled_gradients_agree_through_several_layers(
    precision: str, remat: str, bound: float
) -> None:
    shape = {"hidden": 32, "layers": 3, "vocab": 97, "heads": 4, "kv_heads": 2, "ffn": 64}
    spec = from_config(new_config("llama", **shape))
    params, found = init_params(spec, 0), []
    loss = partial(next_token_loss, remat=remat)
    for compiled in (False, True):
        one = make_stepper("torch", spec, params, loss, precision=precision, compiled=compiled)
        found.append(one.gradients(batch(0)))
    for name, plain in found[0].items():
        apart = np.linalg.norm(found[1][name] - plain) / np.linalg.norm(plain)
        assert apart <= bound, name
