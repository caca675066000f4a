"""Option tables: values, conditions, inheritance, sources of values; wrong ones are refused."""

import pickle

import pytest

from sabia.core.errors import UsageError
from sabia.core.options import about
from sabia.core.options.option import (
    KINDS,
    choice,
    integer,
    needs,
    number,
    quantity,
    several,
    switch,
    text,
)
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.options.table import Options, resolve


class Paths(Options, group="Input and output"):
    inputs: tuple[str, ...] = several("Files", "[INPUT]...", positional=True)
    config: str = text("Options", "FILE.toml", recorded=False)


class Method(Options, group="Method"):
    method: str = choice("How", "near", "exact", "far")
    """The way it is done: `near` is the usual one."""
    ngram: int = integer("Words", 5, least=1, most=9, only=needs(method="near"))
    copies: int = integer("Copies", 2, only=needs(method=("near", "far")))
    mem: int = quantity("size", "Memory", "1GB", recorded=False)


class Calls(Options, group="Endpoint"):
    usd: float | None = quantity("money", "Cap", only=needs("prices"))
    prices: str = text("Table", "FILE")


class Stage(Paths, Method, Calls, defaults={"ngram": 4}, only={Calls: needs("url", method="far")}):
    url: str = text("Server", "URL", variable="SABIA_URL", group="Endpoint")
    verify: bool = switch("Check", default=True, negative=True, group="Method")
    steps: int = integer("Steps", 0, excludes=("epochs",), group="Method")
    epochs: float = number("Passes", 0.0, least=0, group="Method")
    many: tuple[str, ...] = several("Names", "NAME", group="Method")


class Needy(Options, group="Model"):
    model: str = text("Directory", "DIR", required=True)


def given(**flags: object) -> Stage:
    return resolve(Stage, "stage", flags, {})


def test_defaults_are_read_with_their_units() -> None:
    options = Stage()
    assert (options.ngram, options.mem, options.method) == (4, 10**9, "near")
    assert Method().ngram == 5  # a changed default stays with the class that changed it
    assert (options.verify, options.inputs, options.many, options.usd) == (True, (), (), None)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ngram", "7", 7), ("mem", "2GiB", 2 << 30), ("epochs", "1.5", 1.5), ("epochs", "2", 2.0),
        ("verify", False, False), ("many", ["a", "b"], ("a", "b")), ("method", "far", "far"),
    ],
)  # fmt: skip
def test_texts_are_read(name: str, text: object, value: object) -> None:
    assert getattr(given(**{name: text}), name) == value


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ngram": "x"}, ["--ngram: 'x' is not a whole number"]),
        ({"ngram": "10"}, ["--ngram: 10 is out of range (expected 1 to 9)"]),
        ({"ngram": "0"}, ["--ngram", "1 to 9"]),
        ({"epochs": "-1"}, ["--epochs", "0 or more"]),
        ({"epochs": "nan"}, ["--epochs", "not a finite number"]),
        ({"epochs": "inf"}, ["--epochs", "not a finite number"]),
        ({"mem": "5 parsecs"}, ["--mem", "parsecs", "expected"]),
        ({"method": "exakt"}, ["--method: 'exakt'", "near, exact or far", "did you mean exact?"]),
        ({"steps": "3", "epochs": "2"}, ["--steps: not together with --epochs"]),
        ({"ngram": "4", "method": "exact"}, ["--ngram: only with --method near"]),
        ({"copies": "2", "method": "exact"}, ["--copies: only with --method near or far"]),
        ({"usd": "4", "method": "far"}, ["--usd: only with --prices"]),
        ({"prices": "p"}, ["--prices: only with --url or --method far"]),
    ],
)
def test_what_is_wrong_or_has_no_meaning_is_refused(flags: dict, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        given(**flags)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_value_equal_to_the_default_is_refused_like_any_other() -> None:
    with pytest.raises(UsageError, match="--copies: only with"):
        given(method="exact", copies="2")


def test_conditions_that_hold_are_accepted() -> None:
    assert given(prices="p", url="http://x", usd="$3").usd == 3.0
    assert given(prices="p", method="far").prices == "p"


def test_a_required_option_is_named() -> None:
    with pytest.raises(UsageError, match="--model: is missing"):
        resolve(Needy, "needy", {}, {})


def test_flag_beats_variable_beats_file_beats_default(tmp_path) -> None:
    file = tmp_path / "o.toml"
    file.write_text('ngram = 1\nmany = ["a"]\n[stage]\nngram = 2\nmem = "3GB"\nepochs = 2\n')
    assert given(config=str(file)).ngram == 2
    assert given(config=str(file)).mem == 3 * 10**9
    assert given(config=str(file)).many == ()  # the command's own table hides the top level
    environment = {"SABIA_STAGE_NGRAM": "3", "SABIA_STAGE_CONFIG": str(file)}
    assert resolve(Stage, "stage", {}, environment).ngram == 3
    assert resolve(Stage, "stage", {"ngram": "6"}, environment).ngram == 6
    assert resolve(Stage, "stage", {}, {}).ngram == 4


def test_a_shared_variable_is_a_default_and_not_given() -> None:
    options = resolve(Stage, "stage", {}, {"SABIA_URL": "http://x"})
    assert options.url == "http://x" and "url" not in options.given


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngramm = 3", ["no option 'ngramm'", "did you mean ngram?"]),
        ("ngram = 30", ["--ngram", "1 to 9", "set by"]),
        ("ngram = [1, 2]", ["--ngram", "one value"]),
        ("ngram = true", ["--ngram", "expected a value"]),
        ('verify = "perhaps"', ["--verify", "true or false"]),
        ("ngram = ", ["expected TOML"]),
        ('method = "exact"\ncopies = 2', ["--copies: only with --method near or far"]),
    ],
)
def test_wrong_files_are_refused(tmp_path, text: str, words: list[str]) -> None:
    file = tmp_path / "o.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as refused:
        given(config=str(file))
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"--config: nowhere\.toml: No such file"):
        given(config="nowhere.toml")


def test_only_what_decides_and_has_a_meaning_is_recorded() -> None:
    near, exact = Stage().recorded(), Stage(method="exact").recorded()
    assert "ngram" in near and "ngram" not in exact and "copies" not in exact
    assert "mem" not in near and "config" not in near


def test_an_unknown_name_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="no option depth"):
        Stage(depth=3)


def test_options_travel_to_workers_and_compare_by_value() -> None:
    options = Stage(method="far", copies=3)
    assert pickle.loads(pickle.dumps(options)) == options
    assert options != Stage() and options.replace(copies=2) != options
    assert options.replace(copies=9).copies == 9 and options.copies == 3


def test_every_kind_reads_its_own_default_text() -> None:
    texts = {"text": "a", "regex": "a+", "flag": "true",
             "integer": "3", "number": "0.5", "count": "1.5k",
             "whole": "2k", "length": "8k", "size": "2MB", "duration": "3m", "share": "40%",
             "money": "$4"}  # fmt: skip
    values = {"text": "a", "regex": "a+", "flag": True,
              "integer": 3, "number": 0.5, "count": 1500.0,
              "whole": 2000, "length": 8192, "size": 2_000_000, "duration": 180.0, "share": 0.4,
              "money": 4.0}  # fmt: skip
    assert {name: kind.read(texts[name], "--x") for name, kind in KINDS.items()} == values


def test_long_help_stands_below_the_declaration() -> None:
    assert about.long_help(Stage) == {"method": "The way it is done: `near` is the usual one."}


def test_groups_and_conditions_are_described() -> None:
    assert list(about.by_group(Stage)) == ["Input and output", "Method", "Endpoint"]
    described = {one["name"]: one for one in about.described(Stage, "stage")}
    assert described["ngram"]["conditions"] == ["only with --method near"]
    assert described["usd"]["conditions"] == ["only with --prices and with --url or --method far"]
    assert described["steps"]["conditions"] == ["not with --epochs"]
    assert described["verify"]["flags"] == ["--verify", "--no-verify"]
    assert described["ngram"]["variable"] == "SABIA_STAGE_NGRAM"


def test_a_text_with_a_zero_byte_is_no_value():
    with pytest.raises(UsageError, match="--out: has a zero byte"):
        PlanOptions.table["out"].read("a\0b")
