"""Personal data planted in text: every kind is found, look-alikes are not, time is linear."""

import random
import time

import pytest

from sabia.core.text.classify import pii

PLANTED = [
    ("write to ana.souza+x@mail.example.com.br, please", "email"),
    ("IBAN DE89 3704 0044 0532 0130 00 today", "iban"),
    ("GB82WEST12345698765432", "iban"),
    ("card 4111 1111 1111 1111 end", "card"),
    ("5500000000000004", "card"),
    ("amex 3782 822463 10005", "card"),
    ("CNPJ 11.222.333/0001-81.", "cnpj"),
    ("11222333000181", "cnpj"),
    ("CPF: 529.982.247-25,", "cpf"),
    ("52998224725", "cpf"),
    ("from 8.8.8.8 and", "ip"),
    ("at 2001:4860:4860::8888 now", "ip"),
    ("call +55 11 91234-5678", "phone"),
    ("(11) 91234-5678", "phone"),
    ("fixo (21) 2345-6789", "phone"),
    ("+1 (415) 555-2671", "phone"),
]
NOT = [
    "a@b", "user at host", "4111 1111 1111 1112", "529.982.247-26", "111.111.111-11",
    "11.222.333/0001-80", "192.168.0.1", "127.0.0.1", "version 1.2.3", "10:30:45", "::1", "1984",
    "DE88 3704 0044 0532 0130 00", "1.000.000,00", "2026-11-21 16:30", "fe80::1",
    "3.14159265358979",
    "ISBN 978-3-16-148410-0", "x4111111111111111", "1.2.3.4.5", "std::vector::size",
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), PLANTED)
def test_each_kind_is_found_once_and_masked(text: str, kind: str) -> None:
    spans = pii.find(text)
    assert [span[2] for span in spans] == [kind]
    masked = pii.mask(text, spans)
    assert f"[{kind}]" in masked and pii.find(masked) == []


@pytest.mark.parametrize("text", NOT)
def test_look_alikes_are_left(text: str) -> None:
    assert pii.find(text) == []


def test_planted_data_among_prose_and_numbers() -> None:
    source = random.Random(3)
    planted = dict.fromkeys(pii.KINDS, 0)
    words = [
        "o",
        "relatório",
        "de",
        "2026",
        "soma",
        "1.234,56",
        "reais",
        "em",
        "30/09",
        ",",
        "15",
        "%",
        "de",
        "420",
        "itens",
        "v2.10.3",
    ]
    parts = []
    for _ in range(2000):
        parts += source.choices(words, k=6)
        text, kind = source.choice(PLANTED)
        if source.random() < 0.3:
            parts += [text, ";"]
            planted[kind] += 1
    _, counts = pii.scan([" ".join(parts)])
    assert {kind: counts[f"pii_{kind}"][0] for kind in pii.KINDS} == planted


@pytest.mark.parametrize(
    "unit", ["1", "1 ", "1.", "a@", "a.", "+1", "(1", "0:", "AB12 ", "-", "a1-"]
)
def test_a_megabyte_of_one_thing_takes_linear_time(unit: str) -> None:
    start = time.process_time()
    pii.find(unit * (300_000 // len(unit)))
    assert time.process_time() - start < 3


def test_empty_and_odd_texts() -> None:
    texts = ["", "\x00", "٣٤٥٦٧٨٩٠١٢٣", "👍🏽" * 9, "e\u0301@e\u0301"]
    masked, counts = pii.scan(texts, masked=True)
    assert masked == texts and not sum(values.sum() for values in counts.values())
