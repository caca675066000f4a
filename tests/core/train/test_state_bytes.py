"""The state that is counted beforehand is that of the stepper, and of its checkpoints."""

from typing import Any

import numpy as np
import pytest

from sabia.core.model.lora import LoraConfig
from sabia.core.model.storage import hub
from sabia.core.numerics.frozen_base import BYTES_PER_PARAMETER, FORMATS
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.losses.value import value_head
from sabia.core.train.optimizer.config import OptimizerConfig
from sabia.core.train.stepper import state_bytes
from sabia.core.train.stepper_factory import make_stepper

pytest.importorskip("torch")
SPEC = from_config(new_config("qwen3_moe", hidden=64, layers=2, heads=4, vocab=96, experts=4,
                              chosen=2, expert_ffn=64))  # fmt: skip
PARAMETERS = sum(int(np.prod(t.shape)) for t in SPEC.tensors())


@pytest.mark.parametrize(("optimizer", "lora", "heads"), [
    (OptimizerConfig("adamw"), None, ()),
    (OptimizerConfig("muon"), None, value_head(SPEC)),
    (OptimizerConfig("adamw", freeze="embed|norm"), None, ()),
    (OptimizerConfig("adamw"), LoraConfig(4), ()),
    (OptimizerConfig("adamw"), LoraConfig(4, base="nf4"), ()),
    (OptimizerConfig("adamw"), LoraConfig(4, base="int4"), value_head(SPEC)),
])  # fmt: skip
def test_it_is_that_of_the_stepper(optimizer: Any, lora: Any, heads: Any) -> None:
    found = state_bytes(SPEC, optimizer, lora, heads)
    params = hub.init_params(SPEC, 0)
    stepper: Any = make_stepper("torch", SPEC, params, next_token_loss, optimizer, lora=lora,
                                heads=heads)  # fmt: skip
    pieces = sum(np.asarray(piece.array).nbytes for piece in stepper.pieces()) - 8  # the count
    assert found.checkpoint == pieces
    codes = stepper.setup.base_names()
    trained = [p for k, p in stepper.params.items() if k not in codes and p.requires_grad]
    gradients = sum(p.nbytes for p in trained)
    base = sum(params[name].size for name in codes) * BYTES_PER_PARAMETER[lora.base] if codes else 0
    assert found.held == pieces + gradients + round(base)
    if lora is None and not heads and not optimizer.freeze:
        assert found.held == 16 * PARAMETERS
    if lora is not None and not codes and not heads:  # the frozen base has its weights alone
        assert found.held == 4 * PARAMETERS + 16 * found.adapters // 4
    assert (found.adapters > 0) == (lora is not None)
    sizes = sum(p.numel() for k, p in stepper.params.items() if k not in codes)
    assert found.read == sizes


@pytest.mark.parametrize("name", FORMATS)
def test_codes_have_the_bytes_that_are_counted(name: str) -> None:
    made: Any = FORMATS[name](np.random.default_rng(0).standard_normal((512, 512), np.float32))
    arrays = made.parts.values() if hasattr(made, "parts") else vars(made).values()
    size = sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))
    assert size / 512**2 == pytest.approx(BYTES_PER_PARAMETER[name], rel=0.01)
