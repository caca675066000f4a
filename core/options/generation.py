"""Options of the generation engine in the process."""

from sabia.core.options.option import integer, needs, text
from sabia.core.options.table import Options

NGRAM = "ngram"  # a value of --draft that is no directory


class Drafting(Options, group="Generation"):
    """Speculative decoding."""

    draft: str = text("What proposes tokens that the model checks together: ngram, or a model",
                      "ngram|DIR", unset="nothing")  # fmt: skip
    """Speculative decoding (arXiv 2211.17192): one pass of the model checks several tokens, and
    keeps those before the first that it does not draw. The samples have the same distribution as
    without, and the log-probabilities are those of the model. `ngram` proposes what followed the
    last three tokens of the sample before, in its prompt or its own text; it pays where text
    repeats, and the tokens are those that the same seed gives without it. DIR is a smaller model
    with the same tokenizer, which draws the tokens. Greedy answers are the same in all cases.
    Requests with penalties, biases or a grammar, and tokens that close reasoning, are decoded token
    by token."""
    draft_tokens: int = integer("Number of tokens that are proposed at a time", 4, least=1, most=64,
                                only=needs("draft"))  # fmt: skip
