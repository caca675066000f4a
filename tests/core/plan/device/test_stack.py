"""Presets of training software: complete, sourced, found by name."""

import datetime

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.device.layout import find_stack, load_stacks


def test_every_preset_has_a_source_and_a_date():
    stacks = load_stacks()
    assert {"sabia", "fsdp", "megatron", "maxtext", "megatron-2021", "zero-2021"} <= set(stacks)
    for name, stack in stacks.items():
        assert stack.name == name and stack.source, name
        assert isinstance(stack.date, datetime.date), name
        assert 0 <= stack.expert_overlap <= 1 and stack.attention_slowdown >= 1, name


def test_the_default_is_this_project():
    assert find_stack(PlanOptions.assumed("stack")).name == "sabia"


def test_an_unknown_preset_is_refused_with_the_names():
    with pytest.raises(
        UsageError, match=r"--stack: 'megatronn' \(expected sabia, .* did you mean megatron"
    ):
        find_stack("megatronn")
