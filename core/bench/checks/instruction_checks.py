"""Checks of the form of an answer, named by the 25 instruction ids of IFEval (arXiv 2311.07911) and
the 45 of CAPITU (`capitu_checks`).

`follows(name, arguments, text)` is a pure function. Arguments have the names of the data set's
`kwargs`. Words, phrases and separators are compared as they are, and not as regular expressions.
Sentences are those of `text.sentences`, languages those of `text.classify.language`, and words in
capitals are runs of letters, digits, hyphens and apostrophes: the authors use NLTK and langdetect
there, whose results differ in some texts. A text whose language is not determined passes.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import eq, ge
from typing import Any

from sabia.core.bench.checks.capitu_checks import CAPITU_CHECKS, counts
from sabia.core.bench.metrics import NO_VERDICT
from sabia.core.errors import BadData
from sabia.core.judge.verifiers import VERIFIERS, verify
from sabia.core.text.sentences import split_lines

Arguments = Mapping[str, Any]
_FENCES = ("```json", "```Json", "```JSON", "```")
_FINAL_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_END_OF_WORD = re.compile(r"[.,?!'\"]")


def checks_text(names: Any, arguments: Any) -> str:
    """The checks of an item as JSON, [[name, arguments], …]. BadData."""
    valid = isinstance(names, list) and isinstance(arguments, list) and len(names) > 0
    if not valid or len(names) != len(arguments):
        raise BadData(f"checks {names!r:.60}, arguments {arguments!r:.60} (expected equal lists)")
    made = []
    for name, given in zip(names, arguments, strict=True):
        if not isinstance(name, str) or name not in {**CHECKS, **VERIFIERS}:
            raise BadData(f"no check {name!r} (expected one of {', '.join((*CHECKS, *VERIFIERS))})")
        if not isinstance(given, dict | None):
            raise BadData(f"check {name}: arguments {given!r:.60} (expected an object)")
        # the tables of data sets have all columns in each row
        kept = {key: value for key, value in (given or {}).items() if value is not None}
        made.append([name, kept])
        passed(name, kept, "x")  # missing arguments are reported before a model answers
    return json.dumps(made, ensure_ascii=False)


def check_scores(checks: str, text: str) -> tuple[dict[str, float], dict[str, Any]]:
    """(values of the metrics, details) of an answer: exact_match if all checks are passed, and the
    passed ones of all; `loose` where each is passed by one of the text's `variants`. There is no
    score without a verdict of one of them."""
    given = json.loads(checks)
    strict = [passed(name, arguments, text) for name, arguments in given]
    loose = [
        True if first else _any(passed(name, arguments, text) for text in variants(text))
        for first, (name, arguments) in zip(strict, given, strict=True)
    ]
    detail = {"failed": [name for (name, _), ok in zip(given, strict, strict=True) if not ok]}
    if None in strict or None in loose:
        return {NO_VERDICT: 1.0}, detail
    values: dict[str, float] = {}
    for ending, held in (("", strict), (",loose", loose)):
        values[f"exact_match{ending}"] = float(all(held))
        values |= {f"checks.0{ending}": float(sum(map(bool, held)))}
        values |= {f"checks.1{ending}": float(len(held))}
    return values, detail


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    different = set(verdicts)
    return True if True in different else None if None in different else False


def passed(name: str, arguments: Arguments, text: str) -> bool | None:
    """Whether a text passes an instruction check or a verifier; None without a verdict. BadData."""
    if name not in VERIFIERS:
        return follows(name, arguments, text)
    if not isinstance(reference := arguments.get("reference"), str):
        raise BadData(f"check {name}: no argument 'reference' (expected a text)")
    return verify(name, text, reference)


def follows(name: str, given: Arguments, text: str) -> bool:
    """Whether a text passes the check; an empty one never does. BadData."""
    if name not in CHECKS:
        raise BadData(f"no check {name!r} (expected one of {', '.join(CHECKS)})")
    try:
        return bool(text.strip()) and CHECKS[name](text, given)
    except KeyError as error:
        raise BadData(f"check {name}: no argument {error}") from error
    except (TypeError, AttributeError) as error:
        raise BadData(f"check {name}: arguments {dict(given)!r:.80}: {error}") from error


def variants(text: str) -> list[str]:
    """The texts of which one must pass in the loose form of a check: without the first line, the
    last one, or both, and each also without asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(part.replace("*", "") for part in cut)]


def _related(count: int, given: Arguments, limit: str, relation: str = "relation") -> bool:
    """count < the limit, or count ≥ it, as the relation says."""
    if given[relation] not in ("less than", "at least"):
        raise TypeError(f"{relation} {given[relation]!r} (expected 'less than' or 'at least')")
    less = given[relation] == "less than"
    return count < given[limit] if less else count >= given[limit]


def _occurrences(text: str, phrases: Sequence[str], pattern: str = "{}") -> list[int]:
    """How often each phrase occurs, in either case."""
    if isinstance(phrases, str):
        raise TypeError(f"{phrases!r} (expected a list of texts)")
    return [
        len(re.findall(pattern.format(re.escape(phrase)), text, re.IGNORECASE))
        for phrase in phrases
    ]


def _sentences(text: str) -> int:
    # long runs of blanks would take time that grows with their square
    lines, _ = split_lines(re.sub(r"[^\S\n]+", " ", text))
    return sum(len(line.sentences) for line in lines)


def _paragraphs(text: str, given: Arguments) -> bool:
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == given["num_paragraphs"]


def _first_word(text: str, given: Arguments) -> bool:
    parts = text.split("\n\n")
    number, count = given["nth_paragraph"], sum(bool(part.strip()) for part in parts)
    if not 1 <= number <= count or not (wanted := parts[number - 1].split()):
        return False
    word = _END_OF_WORD.split(wanted[0].lstrip("'").lstrip('"'))[0]
    return count == given["num_paragraphs"] and word.lower() == given["first_word"].lower()


def _placeholders(text: str) -> int:
    """Pairs of [ and ] on one line."""
    return sum("[" in part for line in text.split("\n") for part in line.split("]")[:-1])


def _postscript(text: str, given: Arguments) -> bool:
    marker = given["postscript_marker"]
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = known.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str) -> int:
    stars, dashes = r"^[^\S\n]*\*[^*].*$", r"^[^\S\n]*-.*$"
    return sum(len(re.findall(pattern, text, re.MULTILINE)) for pattern in (stars, dashes))


def _highlights(text: str) -> int:
    single, double = (re.findall(p, text) for p in (r"\*[^\n*]*\*", r"\*\*[^\n*]*\*\*"))
    return sum(bool(part.strip("*").strip()) for part in (*single, *double))


def _json(text: str) -> bool:
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    """<<title>> on one line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_answers(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    kept = [part for part in parts if part]
    return all(parts[1:-1]) and len(kept) == 2 and kept[0] != kept[1]


def _in_language(text: str, language: str) -> bool:
    from sabia.core.text.classify.language import UNDETERMINED, names_of  # large tables

    return names_of([text])[0] in (language.partition("-")[0], UNDETERMINED)


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in re.findall(r"\w[\w'’-]*", text))


CHECKS: dict[str, Callable[[str, Arguments], bool]] = {
    "keywords:existence": lambda text, given: all(_occurrences(text, given["keywords"])),
    "keywords:frequency": lambda text, given: _related(
        _occurrences(text, [given["keyword"].strip()])[0], given, "frequency"
    ),
    "keywords:forbidden_words": lambda text, given: (
        not any(_occurrences(text, given["forbidden_words"], r"\b{}\b"))
    ),
    "keywords:letter_frequency": lambda text, given: _related(
        text.lower().count(given["letter"].strip().lower()), given, "let_frequency", "let_relation"
    ),
    "language:response_language": lambda text, given: _in_language(text, given["language"]),
    "length_constraints:number_sentences": lambda text, given: _related(
        _sentences(text), given, "num_sentences"
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, given: _related(
        len(re.findall(r"\w+", text)), given, "num_words"
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": counts(_placeholders, ge, "num_placeholders"),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": counts(_bullets, eq, "num_bullets"),
    "detectable_format:constrained_response": lambda text, _: any(
        answer in text for answer in _FINAL_ANSWERS
    ),
    "detectable_format:number_highlighted_sections": counts(_highlights, ge, "num_highlights"),
    "detectable_format:multiple_sections": lambda text, given: (
        len(re.findall(rf"{re.escape(given['section_spliter'].strip())}\s?\d+", text))
        >= given["num_sections"]
    ),
    "detectable_format:json_format": lambda text, _: _json(text),
    "detectable_format:title": lambda text, _: _title(text),
    "combination:two_responses": lambda text, _: _two_answers(text),
    "combination:repeat_prompt": lambda text, given: (
        text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda text, given: (
        text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda text, _: (
        len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"'
    ),
    "change_case:capital_word_frequency": lambda text, given: _related(
        _capital_words(text), given, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, _: text.isupper() and _in_language(text, "en"),
    "change_case:english_lowercase": lambda text, _: text.islower() and _in_language(text, "en"),
    "punctuation:no_comma": lambda text, _: "," not in text,
    **CAPITU_CHECKS,
}
