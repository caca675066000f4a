"""Dates and names that a rewriting states: only those of its source are allowed."""

import random

import pytest

from sabia.core.text.rewrite.faithfulness import unfaithful
from sabia.core.text.rewrite.rewrite_recipe import load_recipe
from sabia.core.text.rewrite.stated_facts import dates, new_date, new_name

CHECKS = load_recipe("reason-first").checks


@pytest.mark.parametrize(
    ("source", "text", "new"),
    [
        ("em 3 de\nabril de 1820", "on April 3, 1820", ""),
        ("el 3 de abril de 1820", "1820-04-03 and 3/4/1820", ""),
        ("em 3 de abril de 1820", "em abril de 1820, em 3 de abril e em 1820", ""),
        ("on 13/04/2020", "13 April 2020", ""),
        ("on 13/04/2020", "4 March 2020", "2020-03-04"),
        ("on 03/04/2020", "4 de março de 2020, 3 de abril de 2020", ""),
        ("on 03/04/2020", "5 de março de 2020", "2020-03-05"),
        ("on 13/04/20", "13 April 2020", ""),
        ("em 1º de maio de 1990", "em 1º de maio de 1991", "1991-05-01"),
        ("em maio de 1990", "em 1º de maio de 1990", "1990-05-01"),
        ("born in 1839", "born in 1840", "1840"),
        ("1839 pages", "$1840 and 1840.5 and 1840 %", "1840"),
        ("nothing", "May I go? Agosto.", ""),
    ],
)
def test_dates_of_all_forms_are_compared(source, text, new):
    assert new_date(source, text) == new


def test_every_day_of_a_year_is_read_in_every_form():
    months = (
        "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro"
    )
    for month, name in enumerate(months.split(), 1):
        for day in range(1, 29):
            expected = (1987, month, day)
            forms = (f"{day} de {name} de 1987", f"1987-{month:02d}-{day:02d}",
                     f"{day:02d}/{month:02d}/1987", f"{month}.{day}.1987")  # fmt: skip
            for form in forms:
                assert any(expected in date for date in dates(f"Foi em {form}, disse.")), form


@pytest.mark.parametrize(
    ("source", "text", "new"),
    [
        ("Ontem o João Souza viu Maria da Silva.", "Viu João Souza. Maria da Silva viu.", ""),
        ("Ontem o João Souza viu Maria da Silva.", "Viu João da Silva.", "João da Silva"),
        ("I saw John Fitzgerald Kennedy.", "Then John Kennedy left.", ""),
        ("I saw JOHN KENNEDY.", "Yes, John Kennedy's hat.", ""),
        ("a man left", "Quickly a man left. Then he went.", ""),
        ("a man left", "a man called Vincent van Gogh left", "Vincent van Gogh"),
        ("Это Иван Петров.", "вот Иван Сидоров", "Иван Сидоров"),
        ("Der Mann sah das alte Haus und ging dann langsam wieder nach dem Wald zurück.",
         "Der Mann sah das alte Gebäude und ging dann langsam wieder nach dem Wald zurück.", ""),
        ("東京に行った", "大阪に行った", ""),
        ("the end of Mab\nAnd then Rome.", "the end of Mab And then Rome.", ""),
    ],
)  # fmt: skip
def test_names_that_the_source_lacks_are_found(source, text, new):
    assert new_name(source, text) == new


def test_a_long_list_of_names_in_one_line_takes_no_exponential_time():
    listed = [chr(65 + n % 26) + chr(97 + n // 26) * 3 for n in range(200)]
    source, line = "\n".join(listed), " ".join(reversed(listed))
    assert new_name(source, line) == ""
    assert new_name(source, f"{line} Xyz") == f"{' '.join(reversed(listed))} Xyz"
    assert new_name(source + "\nbig Xyz here", f"{line} Xyz").endswith("Xyz")


def test_an_altered_rewriting_is_unfaithful_and_a_reordered_one_is_not():
    draw = random.Random(0)
    people = ["Ana Prado", "Rui de Castro", "Lia Mendes", "Otto von Braun", "Eva Lima"]
    for _ in range(200):
        sentences = [
            f"In {draw.randint(1500, 1600)} the merchant {one} bought a small house by the river."
            for one in people
        ]
        source = " ".join(sentences)
        draw.shuffle(sentences)
        assert unfaithful(source, " ".join(sentences), "stop", CHECKS) == ""
        other = " ".join(sentences).replace("Lia Mendes", "Lia Moraes", 1)
        assert unfaithful(source, other, "stop", CHECKS) == "new name: Lia Moraes"
        later = f"{source} That was in 1999."
        assert unfaithful(source, later, "stop", CHECKS) == "new date: 1999"
