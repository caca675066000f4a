"""Quantities as people write them."""

import pytest

from sabia.core import units
from sabia.core.errors import UsageError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_count, "1.6T", 1.6e12),
        (units.parse_count, "49B", 49e9),
        (units.parse_count, "500G", 500e9),
        (units.parse_count, 1000, 1000.0),
        (units.parse_count, "1,000", 1000.0),
        (units.parse_length, "8k", 8192),
        (units.parse_length, "8000", 8000),
        (units.parse_bytes, "64GiB", 64 * 2**30),
        (units.parse_bytes, "192GB", 192 * 10**9),
        (units.parse_duration, "30d", 30 * 86400),
        (units.parse_duration, "90m", 5400),
        (units.parse_fraction, "40%", 0.4),
        (units.parse_fraction, "40", 0.4),
        (units.parse_fraction, "0.4", 0.4),
        (units.parse_money, "$4.4", 4.4),
        (units.parse_money, "4.4usd/h", 4.4),
        (units.parse_money, "$100K", 1e5),
        (units.parse_money, "1.5M usd", 1.5e6),
    ],
)
def test_parse(parse, text, value) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (units.parse_count, "500m", "M (million)"),
        (units.parse_count, "many", "expected"),
        (units.parse_count, "", "expected"),
        (units.parse_length, "8.5", "whole number"),
        (units.parse_duration, "30", "30d"),
        (units.parse_fraction, "4000", "100 %"),
        (units.parse_bytes, "3 parsecs", "expected one of"),
        (units.parse_money, "4 euros", "US dollars"),
    ],
)
def test_refuse_with_a_hint(parse, text, hint) -> None:
    with pytest.raises(UsageError, match=hint.replace("(", r"\(").replace(")", r"\)")):
        parse(text)


def test_format() -> None:
    assert units.format_count(1.6e12) == "1.6T"
    assert units.format_bytes(25.6e12) == "25.6 TB"
    assert units.format_bytes(999) == "999 B"
    assert units.format_duration(12.4 * 86400) == "12.4d"
    assert units.format_money(199630) == "$199,630"
