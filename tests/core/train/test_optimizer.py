"""Rules: which optimizer takes which tensor, what is frozen, and what state is kept."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.numerics.optimizers import OPTIMIZERS
from sabia.core.options.training import Optimizer
from sabia.core.spec import from_config, new_config
from sabia.core.train.optimizer.config import (
    OptimizerConfig,
    Rule,
    rules,
    state_parts,
    state_shapes,
)

SHAPE = {"hidden": 32, "layers": 6, "vocab": 97, "heads": 4, "kv_heads": 2, "ffn": 64}
SPEC = from_config(new_config("qwen3", tied=False, **SHAPE))
SHAPES = {t.name: t.shape for t in SPEC.tensors()}


def kinds(name: str) -> dict[str, str]:
    return {k: r.kind for k, r in rules(SPEC, OptimizerConfig(name=name)).items()}


def test_muon_takes_hidden_matrices_only() -> None:
    found = kinds("muon")
    assert found["layers.0.attn.q"] == found["layers.5.mlp.down"] == "muon"
    others = ("embed", "head", "final_norm", "layers.0.attn.norm", "layers.0.attn.q_norm")
    assert {found[name] for name in others} == {"adamw"}


def test_soap_takes_all_matrices_and_lion_everything() -> None:
    found = kinds("soap")
    assert {found[n] for n, s in SHAPES.items() if len(s) > 1} == {"soap"}
    assert {found[n] for n, s in SHAPES.items() if len(s) == 1} == {"adamw"}
    assert set(kinds("lion").values()) == {"lion"}
    assert set(kinds("adafactor").values()) == {"adafactor"}


def test_decay_is_of_matrices() -> None:
    found = rules(SPEC, OptimizerConfig(weight_decay=0.3))
    assert {r.decay for n, r in found.items() if len(SHAPES[n]) > 1} == {0.3}
    assert {r.decay for n, r in found.items() if len(SHAPES[n]) == 1} == {0.0}


def test_freezing_by_expression() -> None:
    found = rules(SPEC, OptimizerConfig(freeze=r"embed|layers\.[0-3]\."))
    frozen = {name for name, rule in found.items() if not rule.trained}
    assert frozen == {n for n in SHAPES if n == "embed" or n[:9] in
                      ("layers.0.", "layers.1.", "layers.2.", "layers.3.")}  # fmt: skip
    assert state_parts(found["embed"], SHAPES["embed"]) == {}
    names = state_shapes(SHAPES, found)
    assert "param/embed" in names
    assert "m/embed" not in names
    assert "m/layers.4.attn.q" in names


def test_adapters_are_trained_alone() -> None:
    adapter = SPEC.tensors()[2].__class__(**{**vars(SPEC.tensors()[2]), "name": "extra"})
    found = rules(SPEC, OptimizerConfig(), adapters=(adapter,))
    assert [name for name, rule in found.items() if rule.trained] == ["extra"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"freeze": "layers.9"}, "matches no tensor"),
        ({"freeze": "."}, "matches all tensors"),
        ({"lr_scales": {"emb": 0.1}}, "no tensor is called 'emb'"),
        ({"lr_scales": {"embed": 0.0}}, "expected above 0"),
        ({"settings": {"beta1": 1.0}}, "--betas: 1.0 .expected 0 to below 1"),
        ({"name": "muon", "settings": {"momentum": 1.0}}, "--momentum: 1.0 .expected 0"),
        ({"name": "soap", "settings": {"soap_every": 0}}, "--soap-every: 0 .expected a whole"),
        ({"settings": {"eps": 0.0}}, "--eps: 0.0 .expected above 0"),
        ({"settings": {"momentum": 0.5}}, "--momentum: not a setting of adamw .expected muon"),
        ({"name": "soup"}, "--optimizer: 'soup' .* did you mean soap"),
        ({"weight_decay": -1.0}, "--weight-decay: -1.0"),
        ({"clip_norm": -1.0}, "--clip-norm: -1.0"),
    ],
)
def test_refusals(config: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rules(SPEC, OptimizerConfig(**config))


def rule(kind: str, **settings) -> Rule:
    return Rule(kind, 0.0, OptimizerConfig(name=kind, settings=settings))


def test_state_parts() -> None:
    expert = (4, 6, 8)
    assert state_parts(rule("adamw"), expert) == {"m": (expert, False), "v": (expert, False)}
    assert state_parts(rule("muon"), expert) == {"m": (expert, False)}
    assert state_parts(rule("lion"), (8,)) == {"m": ((8,), False)}
    assert state_parts(rule("adafactor"), (8,)) == {"v": ((8,), False)}
    assert state_parts(rule("adafactor"), expert) == {
        "row": ((4, 6), True),
        "column": ((4, 8), True),
    }
    assert state_parts(rule("soap", soap_max_dim=7), expert) == {
        "m": (expert, False),
        "v": (expert, False),
        "left": ((4, 6, 6), True),
        "left_basis": ((4, 6, 6), True),
    }


def test_names_of_adamw_are_those_of_older_checkpoints() -> None:
    names = [*state_shapes(SHAPES, rules(SPEC, OptimizerConfig()))]
    assert names == [f"{part}/{name}" for part in ("param", "m", "v") for name in SHAPES]


def test_the_options_have_all_optimizers() -> None:
    assert Optimizer.table["optimizer"].choices == tuple(OPTIMIZERS)
