"""Rules, grades and verdicts over the figures, on texts that are plainly good or bad, and on the
texts with which datatrove tries its own filters."""

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.shards.arrow_arrays import text_buffers, type_of
from sabia.core.text.classify import heuristics, language

PROSE = (
    "The mill stood at the end of the valley, where the road turned away from the river. In the"
    " autumn its wheel was repaired by two brothers, who had learnt the trade from their father"
    " and who never agreed on anything except the price. That was to be expected.\nWhen the work"
    " was done they sat on the wall, shared a loaf of bread, and talked about the winter that was"
    " coming. Nobody else came along the road. It rained."
)


def measure(texts: list[str]) -> dict[str, np.ndarray]:
    data, offsets = text_buffers(pa.array(texts, pa.string()))
    return heuristics.measure(data, offsets, language.identify(data, offsets))


def reason(name: str, text: str) -> str:
    got = measure([text])
    return heuristics.first_failure(name, {key: values[0] for key, values in got.items()})


BAD = {
    "keyword spam": "cheap pills online buy cheap pills now " * 30,
    "navigation": "Home\nAbout us\nContact\nLog in\nRegister\nPrivacy\nTerms\nSite map\nHelp\nShop",
    "links": "see http://a.example/b and http://c.example/d or " * 20,
    "shouting": PROSE.upper(),
    "a repeated block": (PROSE + "\n") * 6,
    "a table of numbers": "\n".join(f"{i} {i * 7} {i * i} {i + 3}" for i in range(60)),
    "too short": "Page not found.",
    "nothing": "",
}


def test_quality_is_one_for_prose_and_low_for_what_is_not() -> None:
    quality = measure([PROSE, *BAD.values()])["quality"]
    assert quality[0] == pytest.approx(1.0)
    for name, value in zip(BAD, quality[1:], strict=True):
        assert value < 0.5, name
    assert np.all((quality >= 0) & (quality <= 1))


def test_prose_passes_every_filter_and_nothing_fails_all() -> None:
    got = measure([PROSE, ""])
    for name in heuristics.FILTERS:
        assert got[name].tolist() == [1.0, 0.0]
    assert {reason(name, PROSE) for name in heuristics.FILTERS} == {""}
    assert reason("fineweb", "") == "fineweb: no words"


def test_each_grade_is_linear_between_its_bounds() -> None:
    for factor in heuristics.QUALITY_FACTORS:
        middle = (factor.good + factor.bad) / 2
        values = np.array([factor.good, middle, factor.bad, np.nan])
        expected = [1, 1 - factor.weight / 2, 1 - factor.weight, 1]
        assert factor.of(values) == pytest.approx(expected), factor.score


def test_a_rule_fails_beyond_its_threshold_only() -> None:
    for rule in (rule for rules in heuristics.RULES.values() for rule in rules):
        step = -0.001 if rule.below else 0.001
        values = np.array([rule.threshold, rule.threshold + step, rule.threshold - step, np.nan])
        assert rule.fails(values).tolist() == [False, True, False, False], rule.name


FRODO = (
    "I wish it need not have happened in my time,' said Frodo. 'So do I,' said Gandalf, 'and so do"
    " all who live to see such times. But that is not for them to decide. All we have to decide is"
    " what to do with the time that is given us.'"
)
REPEATED = {  # datatrove's own cases: text → the figure over its threshold
    "I am your father.\n" * 4: "gopher_dup_lines",
    "I am your father.\n\n" * 4: "gopher_dup_paragraphs",
    "I am groot.\n\nYou are a wizard.\n\nI am your father.\n\n" + f"{'x' * 30}.\n\n" * 2: (
        "gopher_dup_paragraph_chars"
    ),
    "I am groot.\nYou are a wizard.\nI am your father.\n" + f"{'x' * 40}.\n" * 2: (
        "gopher_dup_line_chars"
    ),
    "I am Frank, I am Frank, I am Frank": "gopher_top_2gram_share",
    "I am Frank, you are Jhon. I am Frank. I am Frank you are Jhon": "gopher_top_3gram_share",
    "I am a solo traveller " * 4 + FRODO: "gopher_dup_5gram_share",
}


def test_repetition_is_found_where_datatrove_finds_it() -> None:
    got = measure(list(REPEATED))
    rules = heuristics.RULES["gopher"][10:]
    for row, figure in enumerate(REPEATED.values()):
        failing = [rule.figure for rule in rules if rule.fails(got[rule.figure][row : row + 1])[0]]
        assert failing[0] == figure


def test_figures_of_datatroves_quality_cases() -> None:
    symbols = "the ./!*?<><> apple <?////> orange  ++ interconnection !<>??? have" * 20
    short = [word * 20 for word in ("I am ", "interconnection ", "# comment ", "... comment ")]
    got = measure([*short, FRODO, symbols])
    assert got["mean_word_length"][0] < 3 and got["mean_word_length"][1] > 10
    assert got["gopher_hash_ratio"][2] > 0.1 and got["gopher_ellipsis_ratio"][3] > 0.1
    assert got["gopher_stop_words"][4] >= 2 and got["gopher_alpha_words"][5] < 0.8


def test_stop_words_are_those_of_the_language() -> None:
    portuguese = (
        "O moinho ficava no fim do vale, onde a estrada se afastava do rio. No outono a roda foi"
        " consertada por dois irmãos, que tinham aprendido o ofício com o pai. Não choveu mais."
    )
    chinese = "磨坊位于山谷的尽头，那里的道路偏离了河流。秋天，两个兄弟修好了它的轮子。"
    got = measure([portuguese, chinese])
    assert got["gopher_stop_words"][0] >= 5
    assert np.isnan(got["mean_word_length"][1]) and got["word_count"][1] > 30


def test_reasons_name_the_first_rule_and_its_figure() -> None:
    assert reason("gopher", "Page not found.") == "gopher: too few words (word_count 3 < 50)"
    assert reason("c4", PROSE + " {").startswith("c4: ") is True
    scores = pa.array([{"word_count": 3.0}, None], type_of(["symbol_share", "word_count"]))
    reasons = heuristics.failures(scores, ["gopher"])
    assert reasons == [["gopher: too few words (word_count 3 < 50)"], []]


def test_huge_and_odd_texts() -> None:
    texts = ["x" * 3_000_000, "a " * 400_000, "\x00\x01", "👍🏽" * 50, "e\u0301" * 30, "one"]
    quality = measure(texts)["quality"]
    assert np.isfinite(quality).all() and quality[0] == 0
