"""Recipes as TOML files: what they may have, and the error for what they may not."""

import math
import random
import string
from dataclasses import replace
from pathlib import Path

import pytest

from sabia.core.errors import UsageError
from sabia.core.text.rewrite.model_engine import pieces_of
from sabia.core.text.rewrite.rewrite_recipe import SEPARATORS, built_in, load_recipe

BUILT_IN = load_recipe("reason-first")


def written(tmp_path, text, prompt='prompt = "p"\n'):
    path = tmp_path / "own.toml"
    path.write_text(prompt + text)
    return str(path)


def test_the_built_in_recipe_asks_for_the_text_alone():
    assert list(built_in()) == ["best-of", "constitution", "ensemble", "reason-first"]
    assert BUILT_IN.prompt.endswith("\nAnswer with the text alone.")
    assert "\\" not in BUILT_IN.prompt and BUILT_IN.rules == "reason-first"
    assert (BUILT_IN.pieces.most_chars, BUILT_IN.checks.length) == (6000, (0.6, 1.8))


def test_a_file_changes_what_it_names(tmp_path):
    recipe = load_recipe(written(tmp_path, "[checks]\nlength = [0, inf]\nwords = 0\n"))
    assert recipe.checks == replace(BUILT_IN.checks, length=(0, math.inf), words=0)
    assert (recipe.pieces, recipe.filters) == (BUILT_IN.pieces, BUILT_IN.filters)
    assert (recipe.name, recipe.prompt, recipe.rules) == ("own", "p", "")
    same = load_recipe(written(tmp_path, "checks = {words = 0, length = [0, inf]}"))
    assert same.digest == recipe.digest != BUILT_IN.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("promt = 1", "own.toml: key: 'promt' (expected base, rules, prompt,"),
        ("promt = 1", "did you mean prompt?"),
        ("[checks]\nnew_numbers = 1", "own.toml: checks: key: 'new_numbers'"),
        ("[checks]\nnew_numbers = 1", "did you mean new-numbers?"),
        ("[checks]\ndates = 1", "checks: dates = 1 (expected a value such as True)"),
        ("[checks]\nlength = [1.0]", "checks: length = [1.0] (expected the least"),
        ("[checks]\nlength = [true, 2]", "length = [True, 2] (expected a value such as [0.6"),
        ("[checks]\nwords = 60", "words = 60 (expected 0 to 1)"),
        ("[checks]\nwords = nan", "words = nan (expected 0 to 1)"),
        ("checks = 3", "checks = 3 (expected a table)"),
        ("[pieces]\nat = 'words'", "at = 'words' (expected one of blank-lines, lines, nowhere)"),
        ("[pieces]\nmost-chars = 0", "most-chars or tokens-per-char is not above 0"),
        ("[pieces]\nmost-chars = 1.5", "most-chars = 1.5 (expected a value such as 6000)"),
        ("[filters]\nmatches = '('", "matches = '(': missing )"),
        ("[filters]\nlanguages = 'pt'", "languages = 'pt' (expected a value such as [])"),
        ("[filters]\nmin-chars = 9\nmax-chars = 3", "min-chars = 9, max-chars = 3"),
        ("rules = 'reason-frst'", "did you mean reason-first?"),
        ("rules = [", "(expected TOML)"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_expected(tmp_path, text, message):
    with pytest.raises(UsageError) as error:
        load_recipe(written(tmp_path, text))
    assert message in str(error.value) and str(error.value).startswith("--recipe: ")


def test_a_prompt_is_needed(tmp_path):
    for prompt in ("", "prompt = '  '\n", "prompt = 3\n"):
        with pytest.raises(UsageError, match="expected the instructions for the model"):
            load_recipe(written(tmp_path, "", prompt))


def test_filters_choose_documents(tmp_path):
    text = "languages = ['pt']\nmin-chars = 5\nmax-chars = 200\nmatches = '(?i)gato'"
    excluded = load_recipe(written(tmp_path, f"[filters]\n{text}")).filters.excluded
    portuguese = "O Gato dorme na casa amarela perto do rio e acorda quando chove muito."
    assert excluded(portuguese) == ""
    assert excluded("gato") == "min-chars" and excluded(portuguese * 4) == "max-chars"
    assert excluded("The cat sleeps in the yellow house by the river all day.") == "languages"
    assert excluded(portuguese.replace("Gato", "cão")) == "matches"
    assert all(BUILT_IN.filters.excluded(one) == "" for one in ("", "x", "y" * 99_999))


@pytest.mark.parametrize("at", SEPARATORS)
def test_pieces_of_random_texts_join_to_them(at):
    draw = random.Random(at)
    for _ in range(300):
        text = "".join(draw.choices(string.ascii_letters + "\n\n\n \t", k=draw.randint(0, 300)))
        cut = replace(BUILT_IN.pieces, at=at, most_chars=draw.randint(1, 80))
        parts = pieces_of(text, cut)
        assert "".join(parts) == text and len(parts) % 2 == 1
        assert not "".join(parts[1::2]).strip()
        for piece in parts[::2]:
            assert len(piece) <= cut.most_chars or not cut.separator.search(piece)


@pytest.mark.parametrize(("name", "table"), [("reason-first", "pieces"), ("best-of", "samples")])
def test_the_manual_shows_the_tables_of_the_built_in_recipes(name, table):
    page = (Path(__file__).parents[3] / "man" / "sabia-rewrite.1").read_text()
    tables = built_in()[name].partition(f"\n[{table}]")[2]
    assert tables.strip().replace("-", "\\-") in page
