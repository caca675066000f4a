"""The verifier `math`: the final answer of a text equals the reference, whatever its notation.

The final answer is what stands in the last \\boxed{}, after the last ####, in the last formula
between dollar signs, \\( \\) or \\[ \\], or else the last line. Texts and numbers are compared
here; other answers are read and compared by SymPy in a child (`maths_child`) with limits of CPU
time and memory: past them there is no verdict.
"""

import math
import re

from sabia.core.judge.numbers import HASHES, NUMBER, REL_TOLERANCE, boxed, plain_fractions, readings
from sabia.core.sandbox.isolated import Tested
from sabia.core.sandbox.limits import Child, PastLimitError, Pool

CPU_S = 5.0
MEMORY_BYTES = 1 << 29  # beyond what SymPy takes
MAX_ANSWER = 2000  # characters
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}")
_FORMAL = re.compile(r"[\d\\^_=<>+*/|{}\[\]]")
children = Pool(lambda: Child("sabia.core.judge.maths_child", CPU_S, MEMORY_BYTES))


def final_answer(text: str) -> str:
    """The part of a text that is its answer."""
    if (inside := boxed(text)) is not None:
        return inside.strip()
    if hashes := HASHES.findall(text):
        return hashes[-1].strip()
    if formulas := _FORMULA.findall(text):
        return "".join(formulas[-1]).strip()
    return (text.strip().splitlines() or [""])[-1].strip()


def _number(text: str) -> set[float]:
    """The possible values of a text that is one number."""
    plain = plain_fractions(text).strip()
    return readings(plain) if NUMBER.fullmatch(plain) else set()


def same_answer(text: str, reference: str) -> Tested:
    """Whether the final answer of a text equals that of the reference; None past the limits."""
    answer, wanted = final_answer(text), final_answer(reference)
    if not answer:
        return Tested(False, "no answer")
    if "".join(answer.split()) == "".join(wanted.split()):
        return Tested(True)
    pairs = ((value, other) for value in _number(answer) for other in _number(wanted))
    if any(math.isclose(*pair, rel_tol=REL_TOLERANCE, abs_tol=1e-12) for pair in pairs):
        return Tested(True)
    if max(len(answer), len(wanted)) > MAX_ANSWER:
        return Tested(False, f"the answer has more than {MAX_ANSWER} characters")
    with children.one() as child:
        try:
            reply = child.ask({"text": answer, "reference": wanted})
        except PastLimitError as error:
            return Tested(None, f"the comparison {error}")
    if "error" in reply:  # in SymPy itself
        return Tested(None, f"the comparison failed: {reply['error']}")
    if reply["equal"] is None and (words := _words(wanted)):
        return Tested(_words(answer) == words)
    return Tested(reply["equal"], reply["detail"])


def _words(text: str) -> str:
    """A text without digits and formulas, in lower case without punctuation; else nothing."""
    plain = _TEXT.sub(r"\1", text)
    return "" if _FORMAL.search(plain) else " ".join(re.findall(r"\w+", plain.casefold()))
