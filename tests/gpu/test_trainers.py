"""How a training run is made to fit a device, with out-of-memory errors that are raised here."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainers
from cases import Device, Figures, Skipped
from trainers import REMATS, Policy, Run, fitting, policies
from workloads import CONFIGS, RandomParameters, shape_spec, token_batch

GPU = Device(True, "NVIDIA H100 80GB HBM3", 80 << 30, Path(), Path())
CPU = Device(False, "cpu", 0, Path(), Path())
RUN = Run("1B", 8192)


def spec_of(shape: str = "1B") -> Any:
    return shape_spec(shape, GPU)


@pytest.mark.parametrize("shape", list(CONFIGS))
def test_policies_are_ordered_and_fit_by_plan(shape: str) -> None:
    """Little recomputation first, then large micro-batches; none that clearly does not fit."""
    found = policies(spec_of(shape), Run(shape, 8192), GPU.memory)
    keys = [(REMATS.index(policy.remat), -policy.micro_batch) for policy in found]
    assert keys == sorted(keys) and len(set(keys)) == len(keys) > 1
    assert all(policy.bytes < GPU.memory for policy in found)
    assert [p.remat for p in policies(spec_of(shape), Run(shape, 8192), 1e9)] == ["full"]


@pytest.fixture(scope="module")
def planned() -> list[Policy]:
    """The policies of RUN, which are planned once."""
    return policies(spec_of(), RUN, GPU.memory)


@pytest.mark.parametrize("limit_gb", [10, 24, 30, 40, 60, 100])
def test_the_first_policy_that_fits_is_used(
    limit_gb: float, planned: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of memory lead to a clearly smaller policy; if none fits the case is skipped."""
    monkeypatch.setattr(trainers, "policies", lambda *_: planned)
    monkeypatch.setattr(trainers.gc, "collect", lambda: 0)  # nothing is held here
    tried: list[Policy] = []

    def use(policy: Policy) -> Figures:
        tried.append(policy)
        if policy.bytes > limit_gb * 1e9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return {"step_s": 1.0}

    if limit_gb < min(policy.bytes for policy in planned) / 1e9:
        with pytest.raises(Skipped, match=r"1\.24e9 parameters .* do not fit"):
            fitting(spec_of(), RUN, GPU, use)
        return
    figures, policy, refused = fitting(spec_of(), RUN, GPU, use)
    assert figures == {"step_s": 1.0} and policy == tried[-1]
    assert len(refused) == len(tried) - 1
    last = min(planned, key=lambda policy: policy.bytes)
    for before, after in itertools.pairwise(tried):
        assert after.bytes < 0.81 * before.bytes or (after == last and after.bytes < before.bytes)


def test_other_errors_are_not_hidden() -> None:
    def use(policy: Policy) -> Figures:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        fitting(spec_of(), RUN, GPU, use)


def test_a_shape_that_is_too_large_is_skipped() -> None:
    small = Device(True, "", 4 << 30, Path(), Path())
    with pytest.raises(Skipped, match=r"one layer has 1\.27e9 parameters"):
        shape_spec("8B", small)


@pytest.mark.parametrize("documents", [1, 2, 5])
def test_batches_predict_the_next_token_of_a_document(documents: int) -> None:
    batch = token_batch(50, 3, 32, documents)
    inside = batch["loss_mask"] > 0
    assert inside.sum() == 3 * (32 - documents)
    following = np.roll(batch["input_ids"], -1, 1)
    assert (batch["targets"][inside] == following[inside]).all()
    assert (batch["targets"][~inside] == -1).all()
    if documents > 1:
        segments, positions = batch["segments"], batch["positions"]
        assert segments.max() == documents and segments.min() == 1
        assert (positions[:, 1:] - positions[:, :-1] == 1).sum() == 3 * (32 - documents)


def test_parameters_are_the_same_at_every_reading() -> None:
    spec = shape_spec("MoE 8 x 1B", CPU)
    source = RandomParameters(spec, CPU)
    assert list(source) == [tensor.name for tensor in spec.tensors()]
    for tensor in spec.tensors():
        first = source[tensor.name]
        assert first.shape == tensor.shape and first.dtype == np.float32
        np.testing.assert_array_equal(first, source[tensor.name])
    assert not np.array_equal(source["layers.0.attn.q"], source["layers.1.attn.q"])
