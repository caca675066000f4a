"""Checks of the form of an answer in Portuguese, named by the 45 instruction ids of CAPITU.

Arguments have the names of the data set's `kwargs`, and counts are those of the authors' program
(github.com/maritaca-ai/capitu): words are runs without white space, sentences end with . ! or ?,
paragraphs are separated by blank lines, and connectives and markers are found inside of the text in
lower case, each counted once.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import eq, ge, le
from string import punctuation
from typing import Any

Arguments = Mapping[str, Any]


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split(";")]


FIRST_PERSON = _phrases(
    "eu; me; mim; comigo; meu; minha; meus; minhas; nós; conosco; nosso; nossa; nossos; nossas"
)
CONNECTIVES = _phrases(
    "portanto; por isso; logo; então; assim; dessa forma; desse modo; deste modo; por conseguinte; "
    "consequentemente; sendo assim; em consequência; em decorrência; diante disso; por essa razão; "
    "com isso; além disso; ademais; outrossim; da mesma forma; do mesmo modo; contudo; todavia; "
    "entretanto; porém; no entanto; em contrapartida; por outro lado; apesar disso; não obstante; "
    "ainda assim; mesmo assim; ao contrário; em suma; em síntese; em resumo; enfim; por fim; "
    "em conclusão; finalmente; afinal; em última análise; primeiramente; em primeiro lugar; "
    "em segundo lugar; em seguida; posteriormente; nesse sentido; neste sentido; ou seja; isto é; "
    "em outras palavras; de fato; com efeito; sobretudo; por sua vez; de qualquer forma"
)
TEMPORAL = _phrases(
    "primeiro; primeiramente; depois; em seguida; a seguir; por fim; finalmente; inicialmente; "
    "posteriormente; antes; após; enquanto; durante; simultaneamente; ao mesmo tempo; mais tarde; "
    "anteriormente; em breve"
)
CONTRAST = _phrases(
    "por outro lado; em contrapartida; no entanto; porém; contudo; todavia; entretanto; apesar de; "
    "embora; enquanto; ao contrário; diferentemente; ao passo que"
)
_VERBS_LIKE_PLURALS = _phrases(
    "vamos; vemos; temos; somos; estamos; fazemos; dizemos; sabemos; podemos; queremos"
)
_ABBREVIATIONS = re.compile(
    r"(?:Dra?|Sra?|Profa?|S\.M|S\.A|Ltda|etc|vol|n\.º|pp?|ed|org|coord)\.", re.IGNORECASE
)
_NUMBERED = re.compile(r"^\s*\d+\.\s*", re.MULTILINE)
_BULLETED = re.compile(r"^\s*[•*-]\s*", re.MULTILINE)
_NUMBERED_LINE = re.compile(r"\s*\d+[.)]\s+")
_LETTER = re.compile(r"[a-záàâãéèêíìîóòôõúùûç]", re.IGNORECASE)
_BULLETS = "•-*→►▪●○"
_QUOTE = re.compile(r'"[^"]+"')
_LEAST_QUOTE = 8  # characters, with the quotation marks


def _sentences(text: str) -> int:
    """Sentences of more than two characters; numbers of lists and abbreviations end none."""
    text = _ABBREVIATIONS.sub("abbreviation", _BULLETED.sub("", _NUMBERED.sub("", text)))
    return sum(len(part.strip()) > 2 for part in re.split(r"[.!?]+", text.strip()))


def _split(text: str) -> list[str]:
    """Sentences, where white space follows . ! or ?"""
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part.strip()]


def _paragraphs(text: str) -> int:
    return sum(bool(part.strip()) for part in re.split(r"\n\s*\n", text.strip()))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _bare(word: str) -> str:
    return word.strip(punctuation)


def _times(word: str, text: str) -> int:
    """How often a word stands alone in a text, in either case."""
    return len(re.findall(rf"\b{re.escape(word.lower())}\b", text.lower()))


def _all_are(present: bool, words: object, text: str) -> bool:
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise TypeError(f"{words!r:.60} (expected a list of texts)")
    return all((_times(word, text) > 0) is present for word in words)


def counts(
    measure: Callable[[str], int], fits: Callable[[int, Any], bool], argument: str
) -> Callable[[str, Arguments], bool]:
    """A check that compares a count with an argument."""
    return lambda text, given: fits(measure(text), given[argument])


def _ending(endings: str) -> Callable[[str], int]:
    """How many words of a text end so."""
    return lambda text: len(re.findall(rf"\b\w+(?:{endings})\b", text.lower()))


def _present(markers: Sequence[str], text: str) -> int:
    lower = text.lower()
    return sum(marker in lower for marker in markers)


def _no_first_person(text: str) -> bool:
    """`nos` counts unless a plural follows: then it is the contraction of `em os`."""
    if any(_times(pronoun, text) for pronoun in FIRST_PERSON):
        return False
    lower = text.lower()
    for match in re.finditer(r"\bnos\b", lower):
        word = re.match(r"[a-záéíóúâêôãõç]+", lower[match.end() :].lstrip())
        plural = word and word[0].endswith(("os", "as", "es", "is", "ões", "ães"))
        if not (plural and word and word[0] not in _VERBS_LIKE_PLURALS):
            return False
    return True


def _at_edge(number: int, text: str, wanted: str) -> bool:
    """Whether the first (0) or last (-1) word of a text is the wanted one, in either case."""
    words = (text.strip().rstrip(".!?") if number else text).split()
    return (_bare(words[number]).lower() if words else "") == wanted.lower()


def _same_edges(text: str) -> bool:
    words = re.findall(r"\w+", text.lower())
    return len(words) > 1 and words[0] == words[-1]


def _starts_differ(text: str) -> bool:
    starts = [_bare(sentence.split()[0].lower()) for sentence in _split(text)]
    return not any(a and a == b for a, b in pairwise(starts))


def _cased(text: str, fits: Callable[[str], bool]) -> bool:
    letters = _LETTER.findall(text)
    return bool(letters) and all(map(fits, letters))


def _acrostic(text: str, word: str) -> bool:
    return "".join(line[0] for line in _lines(text)[: len(word)]).upper() == word.upper()


def _word_counts(text: str) -> Counter[str]:
    return Counter(filter(None, map(_bare, text.lower().split())))


def _within(count: int, given: Arguments, of: str) -> bool:
    return given[f"min_{of}"] <= count <= given[f"max_{of}"]


CAPITU_CHECKS: dict[str, Callable[[str, Arguments], bool]] = {
    "count:character_count_range": lambda text, given: _within(len(text), given, "chars"),
    "count:exact_line_count": lambda text, given: len(_lines(text)) == given["N"],
    "count:exact_paragraph_count": counts(_paragraphs, eq, "num_paragraphs"),
    "count:exact_sentence_count": counts(_sentences, eq, "N"),
    "count:exact_word_count": lambda text, given: len(text.split()) == given["target_words"],
    "count:max_word_count": lambda text, given: len(text.split()) <= given["max_words"],
    "count:min_paragraph_count": counts(_paragraphs, ge, "min_paragraphs"),
    "count:min_sentence_count": counts(_sentences, ge, "N"),
    "count:min_word_count": lambda text, given: len(text.split()) >= given["min_words"],
    "count:sentence_count_range": lambda text, given: _within(_sentences(text), given, "sentences"),
    "count:unique_word_count": counts(lambda text: len(_word_counts(text)), ge, "N"),
    "count:word_count_range": lambda text, given: _within(len(text.split()), given, "words"),
    "forbidden:no_exclamations": lambda text, _: "!" not in text,
    "forbidden:no_first_person": lambda text, _: _no_first_person(text),
    "forbidden:no_numbers": lambda text, _: not re.search(r"\d", text),
    "forbidden:no_questions": lambda text, _: "?" not in text,
    "forbidden:word": lambda text, given: not _times(given["forbidden_word"], text),
    "forbidden:words_list": lambda text, given: _all_are(False, given["forbidden_words"], text),
    "format:all_caps": lambda text, _: _cased(text, str.isupper),
    "format:all_lowercase": lambda text, _: _cased(text, str.islower),
    "format:bullet_list": lambda text, given: (
        sum(line[0] in _BULLETS for line in _lines(text)) >= given.get("min_items", 1)
    ),
    "format:numbered_list": lambda text, given: (
        sum(bool(_NUMBERED_LINE.match(line)) for line in text.split("\n"))
        >= given.get("min_items", 1)
    ),
    "format:title_case_start": lambda text, _: all(
        sentence[0].isupper() or not sentence[0].isalpha() for sentence in _split(text)
    ),
    "pattern:terminacao_ando_endo_indo_limit": counts(_ending("ando|endo|indo"), le, "max_count"),
    "pattern:terminacao_ando_endo_indo_min": counts(_ending("ando|endo|indo"), ge, "min_count"),
    "pattern:terminacao_ao_oes_min": counts(_ending("ão|ões|onas?"), ge, "min_count"),
    "pattern:terminacao_inho_inha_min": counts(_ending("inh[oa]s?"), ge, "min_count"),
    "pattern:terminacao_mente_limit": counts(_ending("mente"), le, "max_count"),
    "pattern:terminacao_mente_min": counts(_ending("mente"), ge, "min_count"),
    "pattern:terminacao_mente_proibido": lambda text, _: not _ending("mente")(text),
    "punctuation:include_question": lambda text, given: (
        text.count("?") >= given.get("min_questions", 1)
    ),
    "punctuation:include_quote": lambda text, _: any(
        len(quote) >= _LEAST_QUOTE for quote in _QUOTE.findall(text)
    ),
    "punctuation:use_semicolon": lambda text, given: text.count(";") >= given.get("min_count", 1),
    "structure:acrostic": lambda text, given: _acrostic(text, given["word"]),
    "structure:end_with_word": lambda text, given: _at_edge(-1, text, given["end_word"]),
    "structure:no_repeat_sentence_start": lambda text, _: _starts_differ(text),
    "structure:start_end_same_word": lambda text, _: _same_edges(text),
    "structure:start_with_word": lambda text, given: _at_edge(0, text, given["start_word"]),
    "words:connective": lambda text, given: _present(CONNECTIVES, text) >= given["min_connectives"],
    "words:contrast_marker": lambda text, _: _present(CONTRAST, text) > 0,
    "words:include_word": lambda text, given: _times(given["word"], text) > 0,
    "words:include_words": lambda text, given: _all_are(True, given["words"], text),
    "words:max_word_repeat": lambda text, given: (
        max(_word_counts(text).values(), default=0) <= given["N"]
    ),
    "words:temporal_marker": lambda text, given: _present(TEMPORAL, text) >= given["min_markers"],
    "words:word_frequency": lambda text, given: _times(given["word"], text) == given["min_count"],
}
