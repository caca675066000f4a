"""What was compared with published steps, and the band of a plan outside of it."""

from dataclasses import replace

import pytest
from plain_models import attention_layer, decoder
from plan_calls import call
from step_cases import further_cases

from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import find_chip
from sabia.core.plan.device.layout import Workload
from sabia.core.plan.device.step_time import FEWEST, LONG, band_kind, outside
from sabia.core.plan.memory import RECIPES

H100 = find_chip("h100")
WORK = Workload(
    decoder("x", 2048, 1000, (attention_layer(2048, 16, 16, 128, 5632),)),
    4096, 8, RECIPES["adamw16"],
)  # fmt: skip


def test_a_usual_step_is_within_what_was_compared():
    assert outside(WORK, H100, 512) == "" and band_kind(WORK, H100) == "dense"
    long = replace(WORK, sequence=LONG)
    assert outside(long, H100, 512) == "" and band_kind(long, H100) == "long"


@pytest.mark.parametrize(
    ("changes", "chip", "words"),
    [
        ({}, "l40s", "on l40s"),
        ({"precision": "fp32"}, "h100", "in fp32"),
        ({"sequence": 1 << 20}, "h100", "rows of more than"),
        ({"adapter_params": 1000}, "h100", "steps with LoRA were"),
    ],
)
def test_what_was_not_compared_is_named_and_has_the_wide_band(changes, chip, words):
    work, chip = replace(WORK, **changes), find_chip(chip)
    assert words in outside(work, chip, 8) and band_kind(work, chip) == "mixture"


def test_each_band_is_of_enough_rows_or_not_used():
    """A band wider than 45 % either way says nothing."""
    bands = read_data("judged.toml")["band"]
    for band in (band for band in bands.values() if band["rows"] >= FEWEST):
        assert (band["slow"] - band["fast"]) / (band["slow"] + band["fast"]) < 0.45
        assert 0.5 < band["fast"] < 1 < band["slow"] < 2
    assert bands["lora"]["rows"] < FEWEST <= min(bands[k]["rows"] for k in ("dense", "long"))


def test_the_file_has_the_rows_that_were_seen_before():
    seen = read_data("judged.toml")["compared"]
    for case in further_cases():
        assert case.chip.name in seen["chips"] and case.layout.chips <= seen["most_chips"]


def test_a_plan_outside_says_so():
    words = "--params 8B --tokens 100B --chips 64 --search --deadline 52w --price 1"
    assert "no published step on l40s was compared with" in call(f"{words} --chip l40s").stderr
    assert "compared" not in call(f"{words} --chip h100").stderr
