"""Signs that rewards follow something else than quality: length, format, the judge's own family.

Length and format of an answer are compared with its reward within the answers to one prompt, as
ranks. With centred ranks x and y of the n answers to a prompt, S = Σ x·y; if rewards were assigned
at random within prompts, S would have mean 0 and variance Σx²·Σy² / (n - 1), also with ties. Over
all prompts the correlation is ΣS / √(ΣΣx² · ΣΣy²) and z = ΣS / √(sum of the variances). A warning
needs a correlation of MIN_CORRELATION and |z| of MIN_Z (p < 0.0001), which few samples cannot have.
These sums can be added over prompts, processes and steps; a run is judged by its last WINDOW steps.

Format is the share of the lines that are headings or entries of lists, or have bold words, in
Markdown. Break-outs are answers that hold what closes their part in the prompt of the judge, or
what looks like a verdict; such a text can not end its part (see `prompt`).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from sabia.core.judge.prompt import BREAK_OUT

MIN_CORRELATION, MIN_Z = 0.3, 4.0
MIN_SAMPLES = 3  # of a prompt
WINDOW = 20  # steps
TRAITS = ("length", "format")
_MARKUP = re.compile(r"\s{0,3}#{1,6}\s|\s*(?:[-*+]|\d{1,3}[.)])\s|.*(?:\*\*[^*]+\*\*|__[^_]+__)")
FAMILIES = (
    "apertus", "aya", "claude", "command", "deepseek", "ernie", "exaone", "falcon", "gemini",
    "gemma", "glm", "gpt", "granite", "grok", "hunyuan", "internlm", "jamba", "kimi", "llama",
    "minimax", "mistral", "nemotron", "nova", "olmo", "phi", "qwen", "sabia", "sabiá", "smollm",
    "tucano", "yi",
)  # fmt: skip
ALIASES = {"sabiá": "sabia", "qwq": "qwen"} | dict.fromkeys(
    ("mixtral", "ministral", "magistral", "codestral", "devstral", "pixtral"), "mistral"
)
_WORD = re.compile(r"[^\W\d_]+")


class RankSums(NamedTuple):
    """Sums over prompts of S, its variance, Σx² and Σy²."""

    product: float = 0.0
    variance: float = 0.0
    xx: float = 0.0
    yy: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float], rewards: np.ndarray) -> "RankSums":
        """Of the answers to one prompt; rewards[n] are NaN where there is none."""
        valid = ~np.isnan(rewards)
        n = int(valid.sum())
        if n < MIN_SAMPLES:
            return cls()
        x, y = (_ranks(np.asarray(part, float)[valid]) for part in (values, rewards))
        xx, yy = float(x @ x), float(y @ y)
        if not xx or not yy:
            return cls()
        return cls(float(x @ y), xx * yy / (n - 1), xx, yy)

    def plus(self, other: "RankSums") -> "RankSums":
        """The sums over the prompts of both."""
        return RankSums(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def correlation(self) -> float:
        """The rank correlation within prompts, -1 to 1; 0 where nothing varies."""
        return self.product / math.sqrt(self.xx * self.yy) if self.xx * self.yy else 0.0

    @property
    def z(self) -> float:
        """Standard deviations from no relation."""
        return self.product / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def sure(self) -> bool:
        """Whether there is a relation worth a warning."""
        return abs(self.correlation) >= MIN_CORRELATION and abs(self.z) >= MIN_Z


def _ranks(values: np.ndarray) -> np.ndarray:
    """Centred ranks; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[inverse]
    return ranks - ranks.mean()


def format_share(text: str) -> float:
    """The share of the non-empty lines that have Markdown of headings, lists or bold."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(bool(_MARKUP.match(line)) for line in lines) / len(lines) if lines else 0.0


def families(name: str) -> frozenset[str]:
    """The families of models that a name or path names; the name itself if it names none."""
    path = PurePath(name)
    base = path.parent.name if path.name == "final" else path.name
    words = {ALIASES.get(word, word) for word in _WORD.findall(base.casefold())}
    return frozenset(words & {*FAMILIES}) or frozenset([base.casefold()])


def same_family(judged: str, judges: Iterable[str]) -> str:
    """The first judge's model that shares a family with the judged model; '' if none does."""
    return next((judge for judge in judges if families(judge) & families(judged)), "")


def family_warning(judged: str, judges: Iterable[str]) -> str:
    """The warning that a judge's model shares a family with the judged model; '' if none does."""
    judge = same_family(judged, judges)
    return judge and (
        f"judge {judge} is of the family of {judged}: judges may prefer their own family; check it "
        "by --audit-judge with a judge of another one"
    )


@dataclass(frozen=True)
class Traits:
    """Sums over answers to be checked; `follows` by trait."""

    follows: Mapping[str, RankSums]
    answers: float = 0.0
    formatted: float = 0.0  # Σ format shares
    break_outs: float = 0.0

    @classmethod
    def of(
        cls, groups: Iterable[tuple[Sequence[str], np.ndarray]], attack: re.Pattern[str] = BREAK_OUT
    ) -> "Traits":
        """Of groups of (answers to one prompt, their rewards)."""
        follows = dict.fromkeys(TRAITS, RankSums())
        answers = formatted = break_outs = 0.0
        for texts, rewards in groups:
            formats = [format_share(text) for text in texts]
            for trait, values in (("length", [len(text) for text in texts]), ("format", formats)):
                follows[trait] = follows[trait].plus(RankSums.of(values, rewards))
            answers, formatted = answers + len(texts), formatted + sum(formats)
            break_outs += sum(attack.search(text) is not None for text in texts)
        return cls(follows, answers, formatted, break_outs)

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "Traits":
        """From `numbers`."""
        width = len(RankSums._fields)
        parts = [RankSums(*numbers[i * width : (i + 1) * width]) for i in range(len(TRAITS))]
        rest = numbers[width * len(TRAITS) :]
        return cls(dict(zip(TRAITS, parts, strict=True)), *rest)

    @property
    def numbers(self) -> list[float]:
        """All sums, which can be added."""
        sums = [value for trait in TRAITS for value in self.follows[trait]]
        return [*sums, self.answers, self.formatted, self.break_outs]

    def row(self) -> dict[str, object]:
        """The figures: correlations with the reward, mean format share, number of break-outs."""
        return {
            **{f"reward_{name}": sums.correlation for name, sums in self.follows.items()},
            "format": self.formatted / max(self.answers, 1),
            "break_outs": int(self.break_outs),
        }

    def warnings(self, where: str) -> dict[str, str]:
        """What is worth a warning, by kind."""
        lines = {
            name: f"{where}: rewards follow the {name} of answers (rank correlation within prompts "
            f"{sums.correlation:+.2f}, z {sums.z:+.1f}); look at samples, or check the judge by "
            "--audit-judge"
            for name, sums in self.follows.items()
            if sums.sure
        }
        if self.break_outs:
            lines["break_outs"] = (
                f"{where}: {int(self.break_outs):,} of {int(self.answers):,} answers hold what "
                "ends their part of the judge's prompt, or a verdict; they cannot end it, but the "
                "judge may be misled"
            )
        return lines


@dataclass
class RewardChecks:
    """The checks of a run's last steps; each kind of warning comes once."""

    window: list[list[float]] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)

    def add(self, numbers: Sequence[float]) -> dict[str, object]:
        """Add the sums of a step (`Traits.numbers`); returns its figures."""
        self.window = [*self.window, list(numbers)][-WINDOW:]
        return Traits.from_numbers(numbers).row()

    def warnings(self) -> list[str]:
        """The warnings that have not come before."""
        if not self.window:
            return []
        total = Traits.from_numbers(np.sum(self.window, axis=0).tolist())
        steps = len(self.window)
        lines = total.warnings("the last step" if steps == 1 else f"the last {steps} steps")
        fresh = {kind: line for kind, line in lines.items() if kind not in self.warned}
        self.warned |= fresh.keys()
        return list(fresh.values())

    def family(self, judged: str, judges: Iterable[str]) -> list[str]:
        """The warning that a judge is of the judged model's family, if it has not come before."""
        line = family_warning(judged, judges)
        if not line or "family" in self.warned:
            return []
        self.warned.add("family")
        return [line]
