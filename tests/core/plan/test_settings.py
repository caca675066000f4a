"""Settings: the options of the command line under the same names, and the rows of a list."""

from dataclasses import fields

import pytest

from sabia.cli.plan_options import OPTIONS
from sabia.core.errors import UsageError
from sabia.core.plan import settings
from sabia.core.plan.settings import Settings

NOT_OPTIONS = {"seed"}  # shared by all commands


def test_every_option_is_a_setting_and_every_setting_an_option():
    assert {field.name for field in fields(Settings)} - NOT_OPTIONS == set(OPTIONS)


def test_readers_are_of_settings_that_exist():
    assert set(settings.UNITS) <= {field.name for field in fields(Settings)}


@pytest.mark.parametrize("name", sorted(set(settings.UNITS) - NOT_OPTIONS))
def test_a_row_reads_a_value_as_the_command_line_does(name):
    info = OPTIONS[name][0].__metadata__[0]
    text = {
        "seq": "8k", "hbm": "64GiB", "mfu": "40%", "utilisation": "90%", "failure_rate": "0.2%",
        "spot_share": "50%", "preempt": "6h", "capacity_wait": "6h", "restart": "6h",
        "repair": "6h", "job_limit": "6h", "queue": "6h", "reward_time": "6h",
        "max_cost": "$4.5",
    }.get(name, "3")  # fmt: skip
    told = getattr(Settings.from_row({name: text}), name)
    assert told == (info.parser or float)(text)


def test_a_row_may_use_hyphens_numbers_and_switches():
    row = {"batch-tokens": 4e6, "search": True, "chip": "h100", "chips": 8, "layers": None}
    asked = Settings.from_row(row)
    assert (asked.batch_tokens, asked.search, asked.chip, asked.chips) == (4e6, True, "h100", 8)
    assert asked.given() == ["batch_tokens", "chip", "chips", "search"]


def test_zero_is_said_and_none_and_false_are_not():
    assert Settings(failure_rate=0.0, spot=False).given() == ["failure_rate"]


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"token": 3}, "did you mean tokens"),
        ({"mfu": "400"}, "100 %"),
        ({"chips": "two"}, "not a number"),
        ({"objective": "speed"}, "time or cost"),
        ({"seq": "1.5"}, "whole number"),
        ({"search": "false"}, "true or false"),
        ({"chips": True}, "expected a value"),
    ],
)
def test_rows_that_say_nothing_sensible_are_refused(row, hint):
    with pytest.raises(UsageError, match=hint):
        Settings.from_row(row)
