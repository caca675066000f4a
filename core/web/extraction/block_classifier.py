"""Which blocks of a page are its main text: two small networks over the rows of `block_features`.

The first network scores each block alone; the second also uses the first one's scores of the
neighbouring blocks and of the elements around. Each is h = max(0, x W1 + b1),
p = sigmoid(h W2 + b2). The weights are in block_weights.tsv, one line per feature, fitted by
tests/bench/fit_extract.py on 1,438 pages of seven kinds (WCXB 1.0, dev split, CC-BY-4.0, commit
c039d5e) and on the 92 of the 181 news pages of article-extraction-benchmark (MIT, commit 4a3bc97)
whose id begins with an even digit. The threshold was chosen on the same pages, each
page scored by weights that were fitted without it, and the limit of doubt on the 990 pages of
trafilatura's evaluation (tests/bench/RESULTS.md): below it trafilatura does no better.
"""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from sabia.core.web.extraction.block_features import NAMES, SECOND_NAMES, features, second_features
from sabia.kernels.html.definitions import Page

THRESHOLD = 0.7
DOUBT = 0.35  # largest uncertain share of the bytes of text
WEIGHTS = "block_weights.tsv"


class Net(NamedTuple):
    """W1[features, hidden], b1[hidden], W2[hidden], b2."""

    inner: np.ndarray
    bias: np.ndarray
    outer: np.ndarray
    shift: np.float32

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Probabilities, float32[rows]."""
        hidden = np.maximum(rows @ self.inner + self.bias, 0)
        logits = np.clip(hidden @ self.outer + self.shift, -30, 30)
        return np.asarray(1 / (1 + np.exp(-logits)), np.float32)


@cache
def nets() -> tuple[Net, Net]:
    """Both networks, read once per process."""
    text = files("sabia.core.web.extraction").joinpath(WEIGHTS).read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return _net(rows, "1", NAMES), _net(rows, "2", SECOND_NAMES)


def _net(rows: list[list[str]], stage: str, names: tuple[str, ...]) -> Net:
    table = {row[1]: np.array(row[2:], np.float32) for row in rows if row[0] == stage}
    if set(table) != {*names, "(bias)", "(output)"}:
        raise ValueError(f"{WEIGHTS} does not fit the features of stage {stage}: fit it again")
    output = table["(output)"]
    inner = np.stack([table[name] for name in names])
    return Net(inner, table["(bias)"], output[:-1], np.float32(output[-1]))


def probabilities(page: Page) -> np.ndarray:
    """The probability that each block belongs to the main text, float32[blocks]."""
    first, second = nets()
    rows = features(page)
    return second(second_features(page, rows, first(rows)))


def doubt(page: Page, p: np.ndarray) -> float:
    """Expected bytes of misclassified blocks over expected bytes of text."""
    size = page.blocks[:, 2]
    return float((size * np.minimum(p, 1 - p)).sum() / max(float((size * p).sum()), 1.0))
