"""Parse and format quantities with units: 1.6T, 500B, 8k, 64GiB, 30d, 40 %, $4.40.

Counts and bytes are decimal (K M B T; G means B). `KiB`, `MiB`, `GiB` and so on are binary, and so
are sequence lengths (8k = 8192), as is usual. A duration needs a unit. All parsers raise UsageError
with a hint.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from sabia.core.errors import UsageError

T = TypeVar("T")
COUNT_FACTORS = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
LENGTH_FACTORS = {"": 1, "k": 2**10, "K": 2**10, "M": 2**20}
MONEY_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9}
DURATION_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PREFIXES = "KMGTPE"
BYTE_FACTORS = (
    {"B": 1, "": 1}
    | {f"{p}B": 10.0 ** (3 * (i + 1)) for i, p in enumerate(_PREFIXES)}
    | {f"{p}iB": 2.0 ** (10 * (i + 1)) for i, p in enumerate(_PREFIXES)}
)
MOST = 1e24  # a larger quantity is a mistake, and calculations with it would overflow
_NUMBER = re.compile(r"\s*\$?\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")


def _split(text: str | float, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(str(text).replace(",", "").replace("_", ""))
    if not match:
        raise UsageError(f"{what}: {text!r} is not a number with a unit (expected {example})")
    value = float(match[1])
    if not value <= MOST:
        raise UsageError(f"{what}: {text!r} is too large (expected {example})")
    return value, match[2]


def _scaled(text: str | float, what: str, example: str, factors: Mapping[str, float]) -> float:
    value, unit = _split(text, what, example)
    if unit not in factors:
        known = " ".join(key for key in factors if key)
        alike = [known for known in factors if known and known.lower() == unit.lower()]
        hint = f"; did you mean {alike[0]}?" if alike else ""
        hint = "; did you mean M (million)?" if unit == "m" and "M" in factors else hint
        raise UsageError(f"{what}: unit {unit!r} in {text!r} (expected one of {known}){hint}")
    return value * factors[unit]


def parse_count(text: str | float, what: str = "count") -> float:
    """A count: '1.6T' → 1.6e12. Decimal; `m` is refused (M is million)."""
    return _scaled(text, what, "a count such as 1.6T, 500B, 4M or 1000", COUNT_FACTORS)


def parse_length(text: str | float, what: str = "length") -> int:
    """A sequence length: '8k' → 8192 (binary), '8000' → 8000."""
    value = _scaled(text, what, "a length such as 8k or 4096", LENGTH_FACTORS)
    if value != int(value) or value < 1:
        raise UsageError(f"{what}: {text!r} is not a whole number of tokens (expected 1 or more)")
    return int(value)


def parse_bytes(text: str | float, what: str = "size") -> int:
    """Bytes: '64GiB' → 64·2^30, '192GB' → 192·10^9; a number without a unit is bytes."""
    return round(_scaled(text, what, "a size such as 64GiB or 192GB", BYTE_FACTORS))


def parse_duration(text: str | float, what: str = "duration") -> float:
    """Seconds: '30d' → 2,592,000. Units: s, m (minutes), h, d, w; the unit is required."""
    value, unit = _split(text, what, "a duration such as 30d, 12h or 90s")
    if unit not in DURATION_S:
        hint = f"; did you mean {text}d?" if not unit else ""
        raise UsageError(f"{what}: {text!r} needs a unit of s, m, h, d or w{hint}")
    return value * DURATION_S[unit]


def parse_fraction(text: str | float, what: str = "fraction") -> float:
    """A fraction: '40%', '40' and '0.4' → 0.4 (numbers from 2 are percent, at most 100).

    '1' and '1.5' are refused: one is 100 % of something to some, and 1 % to others.
    """
    value, unit = _split(text, what, "a fraction such as 40% or 0.4")
    if unit not in ("", "%"):
        raise UsageError(f"{what}: unit {unit!r} in {text!r} (expected % or nothing)")
    if not unit and 1 <= value < 2 and (value > 1 or text == "1"):
        raise UsageError(
            f"{what}: {text!r} may be a share or percent (expected {value:g}%, or 100% or less)"
        )
    share = value / 100 if unit == "%" or value > 1 else value
    if share > 1:
        raise UsageError(f"{what}: {text!r} is more than 100 % (expected 0 to 100 %)")
    return share


def parse_money(text: str | float, what: str = "price") -> float:
    """US dollars: '$4.4', '4.4', '4.4usd', '4.4usd/h' → 4.4; '$100K' → 100,000."""
    value, unit = _split(text, what, "a price such as $4.40")
    factor = MONEY_FACTORS.get(unit[:1], 1.0)
    name = unit[1:] if unit[:1] in MONEY_FACTORS else unit
    if name.strip().lower() not in ("", "usd", "usd/h", "/h", "$/h"):
        raise UsageError(
            f"{what}: unit {unit!r} in {text!r} (expected US dollars, as $4.40 or $100K)"
        )
    return value * factor


def parse_list(text: str, parse: Callable[[str], T], what: str = "list") -> list[T]:
    """The parsed parts of a list such as '30d,14d,7d'; empty parts are refused."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(parts):
        raise UsageError(
            f"{what}: {text!r} has an empty part (expected values separated by commas)"
        )
    return [parse(part) for part in parts]


def _short(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_count(value: float, digits: int = 1) -> str:
    """1.6e12 → '1.6T'; values below 10,000 without a suffix."""
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor and abs(value) >= 1e4:
            return _short(value / factor, digits) + suffix
    return _short(value, digits)


def format_bytes(value: float, digits: int = 1) -> str:
    """Decimal bytes: 25.6e12 → '25.6 TB'."""
    step = min(int(math.log10(value) // 3), len(_PREFIXES)) if value >= 1000 else 0
    unit = f"{_PREFIXES[step - 1]}B" if step else "B"
    return f"{_short(value / 1000**step, digits)} {unit}"


def format_duration(seconds: float) -> str:
    """A duration in seconds as text: '12.4d', '3.1h', '45s'."""
    for unit in ("d", "h", "m"):
        if seconds >= DURATION_S[unit]:
            return f"{_short(seconds / DURATION_S[unit], 1)}{unit}"
    return f"{_short(seconds, 1)}s"


def format_money(usd: float) -> str:
    """US dollars: 199630 → '$199,630'; below 100 with cents."""
    return f"${usd:,.2f}" if abs(usd) < 100 else f"${usd:,.0f}"
