"""Scaling laws against published figures, and optima against trying."""

import math

import pytest

from sabia.core.errors import Infeasible
from sabia.core.plan.money import scaling
from sabia.core.plan.money.scaling import BESIROGLU, Pair, ScalingLaw

# arXiv 2203.15556, approach 3, with the digits of its source
HOFFMANN = ScalingLaw("Hoffmann 2022", 1.6934, 406.4, 410.7, 0.3392, 0.2849)


def test_tokens_per_parameter_of_published_runs():
    assert Pair(8.03e9, 15e12).tokens_per_param == pytest.approx(1868, abs=0.5)
    assert Pair(405e9, 15.6e12).tokens_per_param == pytest.approx(38.5, abs=0.05)
    assert Pair(70e9, 1.4e12).over_training == pytest.approx(1)


def test_exponents_and_size_of_the_published_fits():
    """Hoffmann table A3 (approach 3): 40B on 1.6T at Gopher's budget; a = 0.46 and 0.51."""
    assert HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta) == pytest.approx(0.4565, abs=0.0005)
    assert BESIROGLU.beta / (BESIROGLU.alpha + BESIROGLU.beta) == pytest.approx(0.5126, abs=1e-4)
    pair = HOFFMANN.optimal(5.76e23)
    assert pair.params / 1e9 == pytest.approx(40, rel=0.05)
    again = BESIROGLU.optimal(5.76e23)
    assert again.tokens_per_param == pytest.approx(20, rel=0.2)


@pytest.mark.parametrize("law", (HOFFMANN, BESIROGLU), ids=lambda law: law.name)
@pytest.mark.parametrize("flops", [1e20, 1.47e23, 4e25])
def test_optimal_is_the_best_of_all_tried(law, flops):
    optimum = law.optimal(flops)
    assert optimum.train_flops == pytest.approx(flops)
    tried = min(
        (Pair(n, flops / 6 / n) for n in (optimum.params * 1.02**k for k in range(-200, 201))),
        key=lambda pair: law.loss(pair.params, pair.tokens),
    )
    assert tried.params == pytest.approx(optimum.params, rel=0.021)


def test_published_saving_of_serving_two_trillion_tokens():
    """Sardana et al., figure 1: 7B for longer instead of 13B saves 1.7e22 operations, 17 %."""
    law = ScalingLaw("their constants", 1.69, 406.4, 410.7, 0.336, 0.283)
    flops = next(c for c in (10 ** (x / 1000) for x in range(21000, 25000))
                 if law.optimal(c).params >= 13e9)  # fmt: skip
    planned = law.optimal(flops)
    loss = law.loss(planned.params, planned.tokens)
    seven = Pair(7e9, law.tokens_for(7e9, loss))
    saved = planned.life_flops(2e12) - seven.life_flops(2e12)
    assert saved == pytest.approx(1.7e22, rel=0.1)
    assert saved / planned.life_flops(2e12) == pytest.approx(0.17, abs=0.01)
    best = scaling.cheapest_pair(law, loss, 2e12)
    assert best.life_flops(2e12) <= seven.life_flops(2e12)


@pytest.mark.parametrize("law", (HOFFMANN, BESIROGLU), ids=lambda law: law.name)
@pytest.mark.parametrize("inference_tokens", [0.0, 1e12, 1e14])
def test_the_cheapest_pair_is_the_cheapest_of_all_tried(law, inference_tokens):
    loss = law.loss(70e9, 1.4e12)
    pair = scaling.cheapest_pair(law, loss, inference_tokens)
    assert law.loss(pair.params, pair.tokens) == pytest.approx(loss)
    tried = min(
        Pair(n, law.tokens_for(n, loss)).life_flops(inference_tokens)
        for n in (pair.params * 1.02**k for k in range(-150, 151))
    )
    assert pair.life_flops(inference_tokens) <= tried * (1 + 1e-9)


def test_without_serving_the_cheapest_pair_is_the_compute_optimal_one():
    planned = BESIROGLU.optimal(1e23)
    best = scaling.cheapest_pair(BESIROGLU, planned.loss(BESIROGLU))
    assert best.params == pytest.approx(planned.params, rel=1e-3)
    assert best.train_flops == pytest.approx(planned.train_flops)


def test_the_more_is_served_the_smaller_the_model():
    planned, inference_tokens = Pair(70e9, 1.4e12), (0, 1e12, 1e13, 1e14)
    loss = planned.loss(BESIROGLU)
    best = [scaling.cheapest_pair(BESIROGLU, loss, tokens) for tokens in inference_tokens]
    sizes = [pair.params for pair in best]
    assert sizes == sorted(sizes, reverse=True)
    saved = [1 - pair.life_flops(tokens) / planned.life_flops(tokens)
             for pair, tokens in zip(best, inference_tokens, strict=True)]  # fmt: skip
    assert saved[-1] > saved[1] > 0


def test_what_no_model_reaches_is_infeasible():
    assert BESIROGLU.tokens_for(1e6, 2.0) == math.inf
    with pytest.raises(Infeasible, match=r"irreducible loss 1\.817"):
        scaling.cheapest_pair(BESIROGLU, 1.8)
