"""CAPITU's 45 instruction ids: verdicts by hand for each, and the ids and arguments of its data."""

import json
import os
from pathlib import Path

import pytest

from sabia.core.bench.checks.capitu_checks import CAPITU_CHECKS
from sabia.core.bench.checks.instruction_checks import check_scores, checks_text, follows

DATA = os.environ.get("SABIA_TEST_DATA")
# name, arguments, texts that pass, texts that do not
CASES = [
    ("count:character_count_range", {"min_chars": 3, "max_chars": 5}, ["abc", "a b c"], ["ab"]),
    ("count:exact_line_count", {"N": 2}, ["um\n\n dois \n"], ["um", "um\ndois\ntrês"]),
    ("count:exact_paragraph_count", {"num_paragraphs": 2}, ["um\n \ndois"], ["um\ndois"]),
    ("count:exact_sentence_count", {"N": 2},
     ["O Dr. Assis veio. Saiu!", "1. Vim aqui.\n- Saiu."], ["O Dr. Assis veio."]),
    ("count:exact_word_count", {"target_words": 3}, ["um - dois"], ["um dois"]),
    ("count:max_word_count", {"max_words": 2}, ["um dois"], ["um dois três"]),
    ("count:min_paragraph_count", {"min_paragraphs": 2}, ["a\n\nb\n\nc"], ["a\nb"]),
    ("count:min_sentence_count", {"N": 2}, ["Vim. Vi tudo... Fui."],
     ["Fim, etc. e tal.", "A. B."]),
    ("count:min_word_count", {"min_words": 2}, ["um dois"], ["um"]),
    ("count:sentence_count_range", {"min_sentences": 1, "max_sentences": 2},
     ["Vim. Sim."], ["Vim. Sim. Fui."]),
    ("count:unique_word_count", {"N": 2}, ["Rio, rio mar"], ["Rio, rio. --"]),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, ["um dois"], ["um", "a b c d"]),
    ("forbidden:no_exclamations", {}, ["Sim."], ["Sim!"]),
    ("forbidden:no_first_person", {},
     ["Ela pensa nos livros.", "Nos dias antigos", "O meurismo"],
     ["Ela nos viu.", "MEU livro", "Eu vi", "entre nós", "nos vamos"]),
    ("forbidden:no_numbers", {}, ["dois"], ["2"]),
    ("forbidden:no_questions", {}, ["Sim."], ["Sim?"]),
    ("forbidden:word", {"forbidden_word": "Bom"}, ["bombom"], ["É bom."]),
    ("forbidden:words_list", {"forbidden_words": ["mar", "Sol"]}, ["amar"], ["o sol", "mar"]),
    ("format:all_caps", {}, ["ÁGUA 2!"], ["Água", "2"]),
    ("format:all_lowercase", {}, ["água 2!"], ["Água", "2"]),
    ("format:bullet_list", {}, ["x\n • a"], ["1. a"]),
    ("format:numbered_list", {"min_items": 2}, ["1. a\n 2) b"], ["1. a\n2.b", "- a\n- b"]),
    ("format:title_case_start", {}, ["Vim. 2 casas. Vi!"], ["Vim. vi."]),
    ("pattern:terminacao_ando_endo_indo_limit", {"max_count": 1},
     ["cantando", "andor"], ["Lendo e indo, saindo"]),
    ("pattern:terminacao_ando_endo_indo_min", {"min_count": 2}, ["LENDO e saindo"],
     ["lendo, indo"]),
    ("pattern:terminacao_ao_oes_min", {"min_count": 2}, ["coração, ações"], ["mãos, ação"]),
    ("pattern:terminacao_inho_inha_min", {"min_count": 2}, ["cafezinho, casinhas"], ["linho, lã"]),
    ("pattern:terminacao_mente_limit", {"max_count": 0}, ["mente"], ["Somente"]),
    ("pattern:terminacao_mente_min", {"min_count": 1}, ["Finalmente."], ["mentes"]),
    ("pattern:terminacao_mente_proibido", {}, ["mente"], ["realmente"]),
    ("punctuation:include_question", {}, ["Sim?"], ["Sim."]),
    ("punctuation:include_quote", {}, ['Disse "a rosa" ontem'], ['Disse "rosa"', "“a rosa toda”"]),
    ("punctuation:use_semicolon", {}, ["a; b"], ["a, b"]),
    ("structure:acrostic", {"word": "paz"}, ["Para\n\nalém\nZ\nx"], ["Para\nalém", "Para além z"]),
    ("structure:end_with_word", {"end_word": "Obra"}, ["A obra.", "a 'obra'!"], ["obra prima"]),
    ("structure:no_repeat_sentence_start", {}, ["O rio. A foz. O mar."], ["O rio. o mar."]),
    ("structure:start_end_same_word", {"word": "x"}, ["Rio é o rio."], ["rio", "Rio e mar"]),
    ("structure:start_with_word", {"start_word": "Certamente"}, ["'certamente', sim"],
     ["Sim, certamente"]),
    ("words:connective", {"min_connectives": 2}, ["Logo, portanto"], ["logo e logo"]),
    ("words:contrast_marker", {}, ["Porém, não"], ["mas não"]),
    ("words:include_word", {"word": "Obra"}, ["a obra"], ["obras"]),
    ("words:include_words", {"words": ["obra", "Autor"]}, ["Autor da obra"], ["o autor"]),
    ("words:max_word_repeat", {"N": 2}, ["a, A b"], ["a a. A"]),
    ("words:temporal_marker", {"min_markers": 2}, ["Antes e depois"], ["depois, depois"]),
    ("words:word_frequency", {"word": "Rio", "min_count": 2}, ["rio, RIO"], ["rio", "rio rio rio"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "right", "wrong"), CASES, ids=[c[0] for c in CASES])
def test_each_id(name: str, given: dict, right: list[str], wrong: list[str]) -> None:
    assert [follows(name, given, text) for text in right] == [True] * len(right)
    assert [follows(name, given, text) for text in wrong] == [False] * len(wrong)
    assert not follows(name, given, " \n")


def test_the_cases_are_all_45() -> None:
    assert {case[0] for case in CASES} == set(CAPITU_CHECKS) and len(CAPITU_CHECKS) == 45


@pytest.mark.skipif(not DATA, reason="SABIA_TEST_DATA is not set (shared test data)")
def test_every_instruction_of_the_data_can_be_checked() -> None:
    folder, seen = Path(DATA or ".") / "eval" / "capitu", set[str]()
    for name in ("input_questions.jsonl", "input_questions_multiturn.jsonl"):
        for line in (folder / name).read_text("utf-8").splitlines():
            row = json.loads(line)
            for turn in row.get("turns", [row]):
                checks = checks_text(turn["instruction_id_list"], turn["kwargs"])
                seen |= {check for check, _ in json.loads(checks)}
                values, _ = check_scores(checks, turn["prompt"])
                assert values["checks.1"] == len(turn["instruction_id_list"])
    assert seen == set(CAPITU_CHECKS)
