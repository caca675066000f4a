"""Every optimizer against its judge (torch.optim, optax, or a NumPy oracle), in both backends."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from update_cases import KINDS, LR, MATRICES, problem, rule
from waiting import HANG_S

from sabia.core.numerics.optimizers import newton_schulz
from sabia.core.train.optimizer.config import OptimizerConfig, Rule, state_parts

torch = pytest.importorskip("torch", reason="the torch backend and torch.optim")
jax = pytest.importorskip("jax", reason="the JAX backend")
optax = pytest.importorskip("optax", reason="optax is a reference")

from sabia.core.train.optimizer import updates_jax, updates_torch  # noqa: E402
from sabia.core.train.optimizer.config import update  # noqa: E402


def run_torch(rules, params, grads, lr: float = LR):
    held = {k: torch.from_numpy(v.copy()) for k, v in params.items()}
    state = updates_torch.init_torch(held, rules)
    for count, g in enumerate(grads):
        g = {k: torch.from_numpy(v) for k, v in g.items()}
        updates_torch.apply_torch(held, g, state, rules, count, lr)
    return {k: v.numpy() for k, v in held.items()}, state


def run_jax(rules, params, grads, lr: float = LR):
    state = updates_jax.init_jax({k: v.shape for k, v in params.items()}, rules)

    @jax.jit
    def step(p, g, s, count, rate):
        return updates_jax.apply_jax(p, g, s, rules, count, rate)

    held = params
    for count, g in enumerate(grads):
        held, state = step(held, g, state, np.int32(count), np.float32(lr))
    return {k: np.asarray(v) for k, v in held.items()}, state


def run_optax(optimizer, params, grads):
    @jax.jit
    def step(held, state, g):
        change, state = optimizer.update(g, state, held)
        return optax.apply_updates(held, change), state

    held, state = params, optimizer.init(params)
    for g in grads:
        held, state = step(held, state, g)
    return {k: np.asarray(v) for k, v in held.items()}


def run_torch_class(make, params, grads):
    held = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in params.items()}
    optimizer = make(list(held.values()))
    for g in grads:
        for k, p in held.items():
            p.grad = torch.from_numpy(g[k].copy())
        optimizer.step()
    return {k: p.detach().numpy() for k, p in held.items()}


def close(found, wanted, atol: float) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=atol, rtol=0, err_msg=name)


BOTH = pytest.mark.parametrize("run", [run_torch, run_jax], ids=["torch", "jax"])


@BOTH
def test_adamw_is_torchs_and_optaxs(run) -> None:
    params, grads = problem()
    ours, _ = run({k: rule("adamw") for k in params}, params, grads)
    theirs = run_torch_class(
        lambda p: torch.optim.AdamW(p, LR, (0.9, 0.95), 1e-8, 0.1), params, grads
    )
    close(ours, theirs, 2e-6)
    close(ours, run_optax(optax.adamw(LR, 0.9, 0.95, 1e-8, weight_decay=0.1), params, grads), 2e-6)


@BOTH
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_eps_is_torchs(run, kind: str) -> None:
    """Muon's tensors that AdamW updates have its settings too."""
    params, grads = problem()
    settings = {"eps": 1e-2, "beta1": 0.8, "beta2": 0.9}
    config = OptimizerConfig(kind, settings=settings)
    ours, _ = run({k: Rule("adamw", 0.1, config) for k in params}, params, grads)
    theirs = run_torch_class(
        lambda p: torch.optim.AdamW(p, LR, (0.8, 0.9), 1e-2, 0.1), params, grads
    )
    close(ours, theirs, 2e-6)


@BOTH
def test_eps_of_adafactor_is_added_to_the_squares(run) -> None:
    params, grads = problem({"vector": (20,)})
    ours, _ = run({k: rule("adafactor", 0.0, eps=0.5) for k in params}, params, grads)
    p, v = params["vector"].astype(np.float64), 0.0
    for t, g in enumerate((g["vector"].astype(np.float64) for g in grads), start=1):
        beta = 1 - t**-0.8
        v = beta * v + (1 - beta) * (g * g + 0.5)
        u = g / np.sqrt(v)
        p = p - LR * u / max(1.0, np.sqrt((u * u).mean()))
    close(ours, {"vector": p}, 2e-6)


@BOTH
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_of_muon_is_torchs(run, nesterov: bool) -> None:
    params, grads = problem(MATRICES)
    settings = {"momentum": 0.6, "nesterov": nesterov}
    ours, _ = run({k: rule("muon", **settings) for k in params}, params, grads)
    theirs = run_torch_class(
        lambda p: torch.optim.Muon(p, LR, 0.1, **settings, adjust_lr_fn="match_rms_adamw"),
        params,
        grads,
    )
    close(ours, theirs, 1e-4)
    plain, _ = run({k: rule("muon", nesterov=nesterov) for k in params}, params, grads)
    assert max(np.abs(plain[k] - theirs[k]).max() for k in params) > 1e-4


@BOTH
def test_muon_is_torchs(run) -> None:
    """torch orthogonalises in bfloat16, which moves an update of RMS 0.2 lr by a percent."""
    params, grads = problem(MATRICES)
    ours, _ = run({k: rule("muon") for k in params}, params, grads)
    theirs = run_torch_class(
        lambda p: torch.optim.Muon(
            p, LR, 0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
        ),
        params,
        grads,
    )
    close(ours, theirs, 1e-4)
    plain, _ = run({k: rule("muon", nesterov=False) for k in params}, params, grads)
    assert max(np.abs(plain[k] - theirs[k]).max() for k in params) > 1e-4


@BOTH
def test_muon_is_optaxs(run) -> None:
    """Without Nesterov: with it optax corrects m and g for their start apart, torch neither."""
    params, grads = problem(MATRICES)
    ours, _ = run({k: rule("muon", nesterov=False) for k in params}, params, grads)
    judge = optax.contrib.muon(LR, nesterov=False, weight_decay=0.1, consistent_rms=0.2)
    close(ours, run_optax(judge, params, grads), 1e-5)


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (3, 32, 80)])
def test_orthogonal_updates_have_even_singular_values(shape) -> None:
    """Five steps take 0.01 … 1 into 0.68 … 1.14 (the polynomial's range), each of stacked
    matrices by itself, and keep the singular vectors."""
    rng = np.random.default_rng(1)
    u, _, v = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    x = (u * np.linspace(1, 0.1, u.shape[-1])) @ v
    found = newton_schulz(updates_torch.OPS, torch.tensor(x, dtype=torch.float32)).numpy()
    seen = np.swapaxes(u, -1, -2) @ found @ np.swapaxes(v, -1, -2)  # in x's singular vectors
    values = np.diagonal(seen, axis1=-2, axis2=-1)
    assert 0.68 < values.min() < values.max() < 1.14
    np.testing.assert_allclose(seen, values[..., None] * np.eye(u.shape[-1]), atol=1e-5)


@BOTH
def test_lion_is_optaxs(run) -> None:
    params, grads = problem()
    settings = {"beta1": 0.95, "beta2": 0.98}
    ours, _ = run({k: rule("lion", **settings) for k in params}, params, grads)
    close(ours, run_optax(optax.lion(LR, 0.95, 0.98, weight_decay=0.1), params, grads), 4e-6)


@BOTH
def test_adafactor_is_optaxs(run) -> None:
    """With the parameter scale off; optax does not multiply its decay by the rate."""
    params, grads = problem()
    ours, _ = run({k: rule("adafactor") for k in params}, params, grads)
    judge = optax.adafactor(
        LR,
        min_dim_size_to_factor=2,
        multiply_by_parameter_scale=False,
        weight_decay_rate=0.1 * LR,
    )
    close(ours, run_optax(judge, params, grads), 2e-6)


def test_adafactor_is_torchs_where_its_parameter_scale_is_one() -> None:
    """torch multiplies the rate by max(eps2, rms(p)), so here one step of parameters of RMS 1."""
    params, grads = problem(steps=1)
    params = {k: p / np.sqrt((p**2).mean()) for k, p in params.items()}
    ours, _ = run_torch({k: rule("adafactor", 0.0) for k in params}, params, grads)
    judge = run_torch_class(lambda p: torch.optim.Adafactor(p, LR, weight_decay=0.0), params, grads)
    close(ours, judge, 2e-6)


def soap_oracle(p, grads, lr, decay, every, largest, b1=0.95, b2=0.95, eps=1e-8):
    """Algorithm 3 of arXiv 2409.11321 in float64; an identity basis beyond `largest`."""
    p = p.astype(np.float64)
    rows, columns = p.shape
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    ql, qr = np.eye(rows), np.eye(columns)
    m, v = np.zeros_like(p), np.zeros_like(p)

    def by_eigenvalue(factor, q):
        return np.argsort(-np.diag(q.T @ factor @ q))

    for t, g in enumerate(g.astype(np.float64) for g in grads):
        if t == 0:
            left, right = (1 - b2) * g @ g.T, (1 - b2) * g.T @ g
            if rows <= largest:
                ql = np.linalg.eigh(left)[1][:, ::-1]
            if columns <= largest:
                qr = np.linalg.eigh(right)[1][:, ::-1]
            p *= 1 - lr * decay
            continue
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (ql.T @ g @ qr) ** 2
        turned = (ql.T @ m @ qr) / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (ql @ turned @ qr.T + decay * p)
        left = b2 * left + (1 - b2) * g @ g.T
        right = b2 * right + (1 - b2) * g.T @ g
        if t % every == 0:
            if rows <= largest:
                order = by_eigenvalue(left, ql)
                v, ql = v[order], np.linalg.qr(left @ ql[:, order])[0]
            if columns <= largest:
                order = by_eigenvalue(right, qr)
                v, qr = v[:, order], np.linalg.qr(right @ qr[:, order])[0]
    return p


@BOTH
@pytest.mark.parametrize(
    ("largest", "every", "eps"), [(100, 3, 1e-8), (15, 3, 1e-8), (100, 5, 1e-2)],
    ids=["two-sided", "one-sided", "settings"],
)  # fmt: skip
def test_soap_is_the_paper(run, largest, every, eps) -> None:
    """Shapes whose first gradient has full rank on the sides that are turned: a null space has
    no basis of its own."""
    shapes = {"square": (16, 16)} if largest == 100 else {"wide": (12, 20), "tall": (20, 12)}
    params, grads = problem(shapes, steps=12, seed=3)
    settings = {"soap_max_dim": largest, "soap_every": every, "eps": eps}
    ours, state = run({k: rule("soap", **settings) for k in params}, params, grads)
    for name, p in params.items():
        wanted = soap_oracle(p, [g[name] for g in grads], LR, 0.1, every, largest, eps=eps)
        np.testing.assert_allclose(ours[name], wanted, atol=2e-5)
        assert np.abs(wanted - p).max() > 5e-3
    turned = {
        name: {p[:-6] for p in parts if p.endswith("_basis")} for name, parts in state.items()
    }
    wanted = {"square": {"left", "right"}, "wide": {"left"}, "tall": {"right"}}
    assert turned == {name: wanted[name] for name in shapes}


@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree_over_ten_steps(kind) -> None:
    """With a scaled rate, and stacked matrices where a rule knows them."""
    shapes = {"square": (16, 16), "stack": (2, 8, 8)}
    if kind != "muon" and kind != "soap":
        shapes["vector"] = (20,)
    params, grads = problem(shapes)
    rules = {k: rule(kind, 0.1, 0.3) for k in params}
    one, state = run_torch(rules, params, grads)
    other, there = run_jax(rules, params, grads)
    close(one, other, 1e-5)
    for name, parts in state.items():
        assert parts.keys() == there[name].keys() == state_parts(rules[name], shapes[name]).keys()
        for part in parts.keys() - {"left_basis", "right_basis"}:  # their signs are free
            atol = 1e-4 * float(parts[part].abs().max())
            np.testing.assert_allclose(parts[part], there[name][part], atol=atol)


@pytest.mark.parametrize("kind", ["muon", "adafactor", "soap"])
def test_stacked_matrices_are_matrices(kind) -> None:
    params, grads = problem({"stack": (3, 8, 8)})
    rules = {k: rule(kind) for k in ("stack", "0", "1", "2")}
    stacked, _ = run_torch(rules, params, grads)
    alone, _ = run_torch(
        rules,
        {str(i): params["stack"][i] for i in range(3)},
        [{str(i): g["stack"][i] for i in range(3)} for g in grads],
    )
    for i in range(3):
        np.testing.assert_allclose(stacked["stack"][i], alone[str(i)], atol=1e-6)


def test_the_scale_leaves_the_decay_alone() -> None:
    params, grads = problem({"square": (16, 16)}, steps=1)
    nothing = [{"square": np.zeros((16, 16), np.float32)}]
    for kind in KINDS:
        small, _ = run_torch({"square": rule(kind, 0.1, 0.01)}, params, nothing)
        np.testing.assert_allclose(small["square"], params["square"] * (1 - LR * 0.1), atol=1e-6)
    full, _ = run_torch({"square": rule("adamw", 0.0)}, params, grads)
    tenth, _ = run_torch({"square": rule("adamw", 0.0, 0.1)}, params, grads)
    moved, less = full["square"] - params["square"], tenth["square"] - params["square"]
    np.testing.assert_allclose(less, 0.1 * moved, atol=1e-6)


def test_frozen_tensors_stay_and_need_no_gradient() -> None:
    params, grads = problem(steps=2)
    frozen = Rule("adamw", 0.1, OptimizerConfig(), trained=False)
    rules = {k: frozen if k == "wide" else rule("adamw") for k in params}
    some = [{k: g[k] for k in g if k != "wide"} for g in grads]
    for run in (run_torch, run_jax):
        after, state = run(rules, params, some)
        assert (after["wide"] == params["wide"]).all()
        assert state["wide"] == {}
        assert (after["tall"] != params["tall"]).any()


class Ring:
    """Two threads that stand for two devices, each holding half of every tensor along `axis`."""

    def __init__(self, axis: int) -> None:
        self.axis, self.slots, self.meet = axis, [None, None], threading.Barrier(2, timeout=HANG_S)

    def gather(self, rank: int, x):
        self.slots[rank] = x
        self.meet.wait()
        whole = torch.cat(self.slots, self.axis)
        self.meet.wait()
        return whole

    def own(self, rank: int, x):
        return x.chunk(2, self.axis)[rank]

    def run(self, one, p, grads):
        found = [None, None]

        def device(rank: int) -> None:
            shard = self.own(rank, p).clone()
            rules, shapes = {"p": one}, {"p": tuple(p.shape)}
            state = updates_torch.init_torch({"p": shard}, rules, shapes)
            for count, g in enumerate(grads):
                updates_torch.apply_torch(
                    {"p": shard},
                    {"p": self.own(rank, g)},
                    state,
                    rules,
                    count,
                    LR,
                    lambda name, x: self.gather(rank, x),
                    lambda name, x: self.own(rank, x),
                )
            found[rank] = shard

        threads = [threading.Thread(target=device, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(found, self.axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_is_unsharded(kind, axis) -> None:
    params, grads = problem({"p": (16, 16)})
    one = rule(kind)
    whole, _ = run_torch({"p": one}, params, grads)
    halves = Ring(axis).run(
        one, torch.from_numpy(params["p"]), [torch.from_numpy(g["p"]) for g in grads]
    )
    np.testing.assert_allclose(halves, whole["p"], atol=1e-6)


def test_sharded_vector_of_adafactor() -> None:
    params, grads = problem({"p": (20,)})
    whole, _ = run_torch({"p": rule("adafactor")}, params, grads)
    halves = Ring(0).run(
        rule("adafactor"), torch.from_numpy(params["p"]), [torch.from_numpy(g["p"]) for g in grads]
    )
    np.testing.assert_allclose(halves, whole["p"], atol=1e-6)


def test_jax_on_a_mesh_is_one_device() -> None:
    """jit on four devices, parameters and elementwise state split both ways."""
    file = Path(__file__).parents[2] / "support" / "update_mesh.py"
    done = subprocess.run([sys.executable, file], capture_output=True, check=True, cwd=file.parent)
    found = json.loads(done.stdout)
    assert found.keys() == set(KINDS)
    assert max(found.values()) <= 1e-5, found


def test_fast_paths_are_the_shared_maths() -> None:
    """torch's fused AdamW and foreach Lion do what `update` says."""
    params, grads = problem()
    for kind in ("adamw", "lion"):
        one = rule(kind, 0.1, 0.5)
        fast, _ = run_torch(dict.fromkeys(params, one), params, grads)
        for name, p in params.items():
            p, state = torch.from_numpy(p), {"m": torch.zeros(p.shape), "v": torch.zeros(p.shape)}
            for count, g in enumerate(grads):
                g = torch.from_numpy(g[name])
                p, state = update(one, updates_torch.OPS, p, g, state, count, LR)
            np.testing.assert_allclose(fast[name], p, atol=2e-6)


def test_lion_bounds_its_temporary_copy(monkeypatch) -> None:
    params, grads = problem()
    rules = {k: rule("lion") for k in params}
    whole, _ = run_torch(rules, params, grads)
    monkeypatch.setattr(updates_torch, "GROUP_ELEMENTS", 300)
    close(run_torch(rules, params, grads)[0], whole, 0.0)
