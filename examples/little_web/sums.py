"""Two-digit sums worked out in words, and which of them are held out for evaluation.

An exercise states its answer before its reasoning, one paragraph an exercise, each step one
sentence: question; answer; "First …"/"Primeiro …" units; "Then …"/"Depois …" tens;
"Finally …"/"Por fim …" hundreds. Operands have two digits and answers three. Of the 10,000 sums
2,500 are held out by a rule of their own: no page, training record or prompt contains them, and
37+58 is held out exactly when 58+37 is.
"""

import hashlib
import random
from functools import cache

from sabia.examples.little_web import prose

HELD_OUT_SHARE = 0.25

# (question, answer, units, tens, hundreds); the answers open with one of three fixed phrases
_QUESTIONS = {
    "en": ("How much is {q}?", "Add {wa} and {wb}: {q}=?", "What does {q} make?"),
    "pt": ("Quanto é {q}?", "Some {wa} e {wb}: {q}=?", "Quanto dá {q}?"),
}
_ANSWERS = {
    "en": ("The answer is {s}, {ws}.", "The answer is {s}.", "The result is {s}, {ws}."),
    "pt": ("A resposta é {s}, {ws}.", "A resposta é {s}.", "O resultado é {s}, {ws}."),
}
_STEPS = {
    "en": (
        "First add the units: {ua}+{ub}={u}, write {du} and carry {cu}.",
        "Then add the tens: {ta}+{tb}+{cu}={t}, write {dt} and carry {ct}.",
        "Finally write the hundreds: {ct}.",
    ),
    "pt": (
        "Primeiro some as unidades: {ua}+{ub}={u}, escreva {du} e vai {cu}.",
        "Depois some as dezenas: {ta}+{tb}+{cu}={t}, escreva {dt} e vai {ct}.",
        "Por fim escreva as centenas: {ct}.",
    ),
}


def words(n: int, language: str) -> str:
    """The number 0 ≤ n ≤ 198 in words of `en` or `pt`."""
    lexicon = prose.lexicon(language)
    if n < 20:
        return lexicon["below_twenty"][n]
    if n >= 100 and language == "en":
        return "one hundred" + (f" and {words(n - 100, language)}" if n > 100 else "")
    if n >= 100:
        return f"cento e {words(n - 100, language)}" if n > 100 else "cem"
    tens, units = divmod(n, 10)
    joint = "-" if language == "en" else " e "
    return lexicon["tens"][tens] + (joint + lexicon["below_twenty"][units] if units else "")


def expression(a: int, b: int) -> str:
    """`37+58`, both operands with two digits."""
    return f"{a:02d}+{b:02d}"


def answer(a: int, b: int) -> str:
    """The sum with three digits."""
    return f"{a + b:03d}"


@cache
def held_out_sums() -> tuple[tuple[int, int], ...]:
    """The sums kept for evaluation, in a fixed order; the same for every seed."""
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    pairs.sort(key=lambda p: hashlib.blake2b(expression(*p).encode(), digest_size=8).digest())
    chosen: list[tuple[int, int]] = []
    for a, b in pairs:
        if len(chosen) >= HELD_OUT_SHARE * 10_000:
            break
        chosen += [(a, b)] if a == b else [(a, b), (b, a)]
    return tuple(chosen)


@cache
def shown_sums() -> tuple[tuple[int, int], ...]:
    """Every sum that is not held out, in order."""
    hidden = frozenset(held_out_sums())
    return tuple((a, b) for a in range(100) for b in range(100) if (a, b) not in hidden)


def worked_exercise(a: int, b: int, language: str, choice: random.Random) -> str:
    """One paragraph: question, answer, then the steps in order."""
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = units // 10
    total = tens + carry
    values = {
        "q": expression(a, b), "s": answer(a, b),
        "wa": words(a, language), "wb": words(b, language), "ws": words(a + b, language),
        "ua": a % 10, "ub": b % 10, "u": units, "du": units % 10, "cu": carry,
        "ta": a // 10, "tb": b // 10, "t": total, "dt": total % 10, "ct": total // 10,
    }  # fmt: skip
    sentences = (choice.choice(_QUESTIONS[language]), choice.choice(_ANSWERS[language]))
    return " ".join(s.format(**values) for s in (*sentences, *_STEPS[language]))
