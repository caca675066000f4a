"""Groups of options: what a command keeps of them, and when an option has a meaning."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.option import integer, needs, text, unless
from sabia.core.options.table import Options


class Group(Options, group="Data"):
    """Three options."""

    one: int = integer("One", 1)
    two: int = integer("Two", 2, excludes=("three",))
    three: int = integer("Three", 3)


class Kept(Group, keeps=("one",)):
    """One of them, and one more."""

    four: int = integer("Four", 4, only=unless("away", "off"))
    away: str = text("Away")
    off: str = text("Off")
    five: str = text("Five", only=needs("four", away="x"))


class Fewer(Group, without=("one",)):
    """Two of them."""


class Both(Fewer, Kept):
    """Two groups; what one of them keeps is there."""


def test_what_is_left_out_keeps_its_default() -> None:
    assert list(Kept.table) == ["one", "four", "away", "off", "five"]
    made = Kept(one=7)
    assert (made.one, made.two, made.three) == (7, 2, 3)
    assert "two" not in made.values() and "two" not in made.recorded()
    with pytest.raises(TypeError, match="no option two"):
        Kept(two=5)
    assert Fewer().one == 1 and list(Fewer.table) == ["two", "three"]
    assert list(Both.table)[:3] == ["two", "three", "one"] and not Both.left_out
    assert (Both(one=9).one, Both(one=9).two) == (9, 2)


def test_options_without_a_meaning_are_refused_whatever_their_value() -> None:
    assert Kept(four=4).four == 4
    for value in (4, 5):
        with pytest.raises(UsageError, match=r"^--four: only without --away or --off$"):
            Kept(four=value, off="yes")
    with pytest.raises(UsageError, match=r"^--five: only with --four or --away x$"):
        Kept.read({"five": "a", "four": "0"})
    assert Kept.read({"five": "a", "away": "x"}).five == "a"


def test_a_default_may_depend_on_other_options() -> None:
    class Chosen(Kept):
        def complete(self) -> None:
            self.off = self.off or self.away

    assert Chosen(away="x").off == "x" and Chosen(away="x", off="y").off == "y"
    with pytest.raises(UsageError):
        Chosen(four=4, away="x")
