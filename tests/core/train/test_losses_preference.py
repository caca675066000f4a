"""The losses of preferences beside NumPy formulas, and their independence of how rows are cut."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torch")

from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops
from sabia.core.parallel.world import World
from sabia.core.spec import from_config, new_config
from sabia.core.spec.families import with_classifier
from sabia.core.spec.model import classifier_config
from sabia.core.train.losses import preference
from sabia.core.train.losses.preference import Answers, PreferenceLoss, preference_loss
from sabia.core.train.preference_rows import PreferenceBatches, PreferenceRows
from sabia.core.train.stepper_factory import make_stepper
from sabia.core.train.token_rows import read_token_rows

VOCABULARY = 61
CASES = [
    PreferenceLoss("dpo", 0.3),
    PreferenceLoss("dpo", 2.0, smoothing=0.1, nll=0.7),
    PreferenceLoss("dpo", 5.0, length_norm=True),
    PreferenceLoss("ipo", 0.3, nll=0.2),
    PreferenceLoss("ipo", 0.3, length_norm=True),
    PreferenceLoss("orpo", 0.2),
    PreferenceLoss("simpo", 2.0, margin=1.0, nll=0.1),
    PreferenceLoss("kto", 0.5),
    PreferenceLoss("kto", 0.5, length_norm=True, undesirable=1.5),
    PreferenceLoss("reward"),
]
JAX = pytest.param("jax", marks=pytest.mark.slow)  # compiles each shape


def log_sigmoid(x: Any) -> Any:
    return -np.logaddexp(0, -x)


def formula(x: dict[str, np.ndarray], o: PreferenceLoss) -> float:
    """The mean loss of pairs of tokens' log-probabilities [P, T], with masks of the same shape."""
    size = {s: x[f"{s}_mask"].sum(1) for s in ("chosen", "rejected", "kl")}
    sums = {s: (x[s] * x[f"{s}_mask"]).sum(1) for s in size}
    if o.kind == "reward":
        return float(-log_sigmoid(sums["chosen"] - sums["rejected"]).mean())
    ratio = {s: sums[s] - (x[f"{s}_ref"] * x[f"{s}_mask"]).sum(1) for s in size}
    if o.length_norm:
        ratio = {s: ratio[s] / size[s] for s in size}
    c, r, nll = ratio["chosen"], ratio["rejected"], -sums["chosen"].sum() / size["chosen"].sum()
    mean = {s: sums[s] / size[s] for s in size}
    h = o.beta * (c - r)
    if o.kind == "dpo":
        e = o.smoothing
        loss = (-(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)).mean()
    elif o.kind == "ipo":
        loss = ((c - r - 1 / (2 * o.beta)) ** 2).mean()
    elif o.kind == "simpo":
        loss = -log_sigmoid(o.beta * (mean["chosen"] - mean["rejected"]) - o.margin).mean()
    elif o.kind == "orpo":
        odds = [m - np.log1p(-np.exp(m)) for m in (mean["chosen"], mean["rejected"])]
        return float(nll - o.beta * log_sigmoid(odds[0] - odds[1]).mean())
    else:
        z = max(0.0, ratio["kl"].mean())
        parts = 1 - np.exp(log_sigmoid(o.beta * (c - z))), 1 - np.exp(log_sigmoid(o.beta * (z - r)))
        return float(np.concatenate([parts[0], o.undesirable * parts[1]]).mean())
    return float(loss + o.nll * nll)


def drawn(seed: int) -> dict[str, np.ndarray]:
    """Random log-probabilities of answers of 1 to T tokens."""
    rng = np.random.default_rng(seed)
    pairs, tokens = rng.integers(1, 7), rng.integers(2, 11)
    x: dict[str, np.ndarray] = {}
    for name in ("chosen", "rejected", "kl"):
        sizes = rng.integers(1, tokens + 1, pairs)
        x[f"{name}_mask"] = (np.arange(tokens) < sizes[:, None]).astype(float)
        x[f"{name}_ref"] = -rng.gamma(2.0, 0.7, (pairs, tokens))
        moved = x[f"{name}_ref"] + rng.normal(0.2, 0.4, (pairs, tokens))
        x[name] = np.minimum(moved, -0.01)
    return x


def ours(x: dict[str, Any], given: dict[str, np.ndarray], o: PreferenceLoss, ops: Any) -> Any:
    """The loss from the functions of the module, of backend arrays x of the policy."""

    def answers(name: str) -> Answers:
        mask = given[f"{name}_mask"]
        held = (given[f"{name}_ref"] * mask).sum(1)
        return Answers((x[name] * mask).sum(1), held, mask.sum(1))

    c, r = answers("chosen"), answers("rejected")
    pairs = len(given["chosen_mask"])
    if o.kind == "kto":
        numbers = ops.stop_gradient(preference.rewards(answers("kl"), o)) / o.beta
        z = ops.where(numbers.mean() > 0, numbers.mean(), 0.0)
        both = Answers(*(ops.concat(list(p), 0) for p in zip(c, r, strict=True)))
        sides = ops.concat([c.length * 0 + 1, r.length * 0 - 1], 0)
        return preference.answer_losses(both, sides, z, o, ops).mean()
    loss = preference.pair_losses(c, r, o, ops).sum()
    nll = 1.0 if o.kind == "orpo" else o.nll
    return (loss - nll * c.logp.sum() * pairs / given["chosen_mask"].sum()) / pairs


@pytest.mark.parametrize("o", CASES, ids=str)
@pytest.mark.parametrize("backend", ["torch", JAX])
def test_losses_and_gradients_are_the_formulas(
    backend: str, o: PreferenceLoss, seeds: int = 4
) -> None:
    ops = load_ops(backend)
    for seed in range(seeds):
        x = drawn(seed)
        if backend == "torch":
            import torch

            given = {k: torch.from_numpy(v) for k, v in x.items()}
            policy = {k: given[k].clone().requires_grad_() for k in ("chosen", "rejected", "kl")}
            loss = ours(policy, given, o, ops)
            loss.backward()
            gradients = {k: policy[k].grad.numpy() for k in ("chosen", "rejected")}
            value = loss.item()
        else:
            jax = pytest.importorskip("jax")
            with jax.enable_x64(True):
                given = {k: jax.numpy.asarray(v) for k, v in x.items()}
                policy = {k: given[k] for k in ("chosen", "rejected", "kl")}
                both = jax.value_and_grad(lambda p, g=given: ours(p, g, o, ops))(policy)
                value, gradients = float(both[0]), {k: np.asarray(v) for k, v in both[1].items()}
        assert value == pytest.approx(formula(x, o), abs=1e-9)
        for name in ("chosen", "rejected"):
            for index in map(tuple, np.argwhere(x[f"{name}_mask"] > 0)):
                around = []
                for sign in (1, -1):
                    moved = x[name].copy()
                    moved[index] += sign * 1e-5
                    around.append(formula(x | {name: moved}, o))
                slope = (around[0] - around[1]) / 2e-5
                assert gradients[name][index] == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_jax_has_the_gradient_of_the_formula() -> None:
    """One loss with the backend's own functions; the others are slow to compile."""
    o = PreferenceLoss("orpo", 0.2)
    test_losses_and_gradients_are_the_formulas("jax", o, seeds=1)


TRL = {"sigmoid": PreferenceLoss("dpo", 0.3),
       "sigmoid_norm": PreferenceLoss("dpo", 3.0, length_norm=True),
       "ipo": PreferenceLoss("ipo", 0.3, length_norm=True)}  # fmt: skip


@pytest.mark.parametrize("kind", TRL)
def test_trl_computes_the_same_from_equal_log_probabilities(kind: str) -> None:
    """Its DPOTrainer's loss and gradient, with a model that gives our log-probabilities."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="the other implementation")
    from collections import defaultdict
    from types import SimpleNamespace

    import torch

    def same(value: Any) -> Any:
        return value

    x, o = drawn(3), TRL[kind]
    given = {k: torch.from_numpy(v) for k, v in x.items()}
    policy = {k: given[k].clone().requires_grad_() for k in ("chosen", "rejected")}
    ours({**policy, "kl": given["kl"]}, given, o, load_ops("torch")).backward()
    logps = torch.cat([given["chosen"], given["rejected"]]).clone().requires_grad_()
    mask = torch.cat([given["chosen_mask"], given["rejected_mask"]]).long()
    completion = torch.cat([torch.zeros_like(mask[:, :1]), mask], 1)
    zeros = torch.zeros(mask.shape)
    made = SimpleNamespace(log_probs=logps * mask, entropy=zeros, mean_logits=zeros,
                           is_top1=zeros.bool())  # fmt: skip
    reference = {f"ref_{s}_logps": (given[f"{s}_ref"] * given[f"{s}_mask"]).sum(1)
                 for s in ("chosen", "rejected")}  # fmt: skip
    state = SimpleNamespace(
        model=SimpleNamespace(training=False), aux_loss_enabled=False, ld_alpha=None,
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[kind],
        loss_weights=[1.0], beta=o.beta, label_smoothing=0.0, use_weighting=False,
        _metrics={"eval": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"input_ids": completion, "attention_mask": torch.ones_like(completion),
              "completion_mask": completion, **reference}  # fmt: skip
    loss = trainer.DPOTrainer._compute_loss(state, lambda **_: made, inputs, False)
    loss.backward()
    assert loss.item() == pytest.approx(formula(x, o), abs=1e-12)
    gradient = torch.cat([policy["chosen"].grad, policy["rejected"].grad])
    np.testing.assert_allclose(logps.grad.numpy(), gradient.numpy(), atol=1e-12)


# -- rows of a model


def model(kind: str) -> tuple[Any, dict[str, np.ndarray]]:
    spec = from_config(new_config(hidden=32, layers=2, heads=4, vocab=VOCABULARY))
    if kind == "reward":
        spec = with_classifier(spec, classifier_config(spec.config, ("reward",), "regression", 0))
    return spec, {k: np.array(2 * v) for k, v in hub.init_params(spec, 1).items()}


def units(kto: bool, count: int = 7) -> list[list[tuple[list[int], list[bool]]]]:
    """Documents of units: chosen, rejected and with kto a mismatched answer, of random sizes."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(count):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist()
        unit = []
        for _ in range(3 if kto else 2):
            answer = rng.integers(0, VOCABULARY, rng.integers(1, 8)).tolist()
            unit.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
        made.append(unit)
    return made


def rows_of(bins: list[list[Any]], kind: str, most: int) -> PreferenceRows:
    """Rows of these units, of which the rows' documents have random reference values."""
    flat = [[document for unit in row for document in unit] for row in bins]
    table = pa.RecordBatch.from_pydict(
        {
            "input_ids": [[i for ids, _ in row for i in ids] for row in flat],
            "document_lengths": [[len(ids) for ids, _ in row] for row in flat],
            "loss_mask": [[m for _, mask in row for m in mask] for row in flat],
            "source": ["pairs" if kind == "kto" else ""] * len(flat),
        },
        schema=pa.schema(
            {"input_ids": pa.list_(pa.int32()), "document_lengths": pa.list_(pa.int32()),
             "loss_mask": pa.list_(pa.bool_()), "source": pa.string()}
        ),
    )  # fmt: skip
    held = np.zeros((len(flat), most), np.float32)
    for r, row in enumerate(flat):
        held[r, : len(row)] = [reference(ids) for ids, _ in row]
    return PreferenceRows(read_token_rows([table]).files, most, kind == "reward", held)


def reference(ids: list[int]) -> float:
    return -float(np.random.default_rng(sum(ids)).gamma(4.0, 2.0))


def by_hand(kind: str, o: PreferenceLoss) -> float:
    """The loss of all units, each document in a forward pass of its own."""
    (spec, params), ops = model(kind), load_ops("torch")
    weights = ops.to_device(params, "float32")
    x: dict[str, Any] = {n: [] for s in ("chosen", "rejected", "kl") for n in (s, f"{s}_ref")}
    for unit in units(kind == "kto"):
        for name, (ids, mask) in zip(("chosen", "rejected", "kl"), unit, strict=False):
            states = forward.hidden(spec, weights, np.array([ids], np.int32), ops)
            if kind == "reward":
                value, count = float(states[0, -1] @ weights["classifier"][0]), 1
            else:
                scores = forward.logits(spec, weights, states, ops)[0].numpy().astype(np.float64)
                logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
                picked = [logs[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t]]
                value, count = float(np.sum(picked)), len(picked)
            x[name].append([value / count] * count)
            x[f"{name}_ref"].append([reference(ids) / count] * count)
    whole: dict[str, np.ndarray] = {}
    for name, rows in x.items():
        width = max([len(row) for row in rows], default=1)
        whole[name] = np.array([row + [0.0] * (width - len(row)) for row in rows]).reshape(
            -1, width
        )
        mask = [[1.0] * len(row) + [0.0] * (width - len(row)) for row in rows]
        whole[f"{name.removesuffix('_ref')}_mask"] = np.array(mask).reshape(-1, width)
    return formula(whole, o)


MODEL_CASES = [
    PreferenceLoss("dpo", 0.1, nll=0.3), PreferenceLoss("kto", 0.1), PreferenceLoss("orpo", 0.2),
    PreferenceLoss("reward"),
]  # fmt: skip
CUTS = {
    "packed": ([[0, 1, 2], [3, 4], [5, 6]], 0),
    "micro": ([[0, 1, 2], [3, 4], [5, 6]], 1),
    "single": ([[n] for n in range(7)], 2),
}


@pytest.mark.parametrize("o", MODEL_CASES, ids=lambda o: o.kind)
@pytest.mark.parametrize("backend", ["torch", JAX])
def test_packing_and_micro_batches_change_nothing(backend: str, o: PreferenceLoss) -> None:
    made, gradients = units(o.kind == "kto"), []
    for bins, micro in CUTS.values():
        if backend == "jax" and micro == 2:
            continue  # another compilation; torch has it
        most = max(map(len, bins)) * len(made[0])
        rows = rows_of([[made[n] for n in row] for row in bins], o.kind, most)
        spec, params = model(o.kind)

        def loss(*arguments: Any) -> Any:
            return preference_loss(*arguments, options=o)

        stepper = make_stepper(backend, spec, params, loss, micro_batch=micro)
        batch = rows.batch(np.arange(len(rows)), 64 if backend == "jax" else None)
        given = PreferenceBatches(o, stepper, World()).complete(batch)
        assert stepper.evaluate(given).loss == pytest.approx(by_hand(o.kind, o), rel=2e-5)
        gradients.append(stepper.gradients(given))
    # XLA rounds a program of another shape differently; float64 differs from both by up to 4e-5
    bound = 5e-5 if backend == "jax" else 2e-5
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert np.abs(other[name] - gradient).max() <= bound * np.abs(gradient).max(), name
