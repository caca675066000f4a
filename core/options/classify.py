"""Options of `sabia classify` (`classify score`), and what it shares with `classify train`."""

from sabia.core.errors import UsageError
from sabia.core.options.model_calls import ApiCalls, EndpointOptions
from sabia.core.options.option import changed, choice, needs, quantity, several, switch, text
from sabia.core.options.shared import Appending, Backend, Executor, RowOptions, TextColumn
from sabia.core.options.table import Options

MODEL, ASK = needs("model"), needs("ask")


class ContentChecks(Options, group="Content checks"):
    """Scores of unwanted content, and edits that remove it."""

    pii: str = choice("Detect personal data: count it, or also mask it", "count", "mask",
                      default="", unset="off")  # fmt: skip
    """Adds the scores `pii_email`, `pii_iban`, `pii_card`, `pii_cnpj`, `pii_cpf`, `pii_ip` and
    `pii_phone`: the number of e-mail addresses, IBANs, payment cards and so on. `mask` also
    replaces each of them in the text with its kind, such as `[email]`."""
    bad_words: tuple[str, ...] = several(
        "Count the matches of this word list, or directory of word lists", "PATH"
    )
    """Adds the scores `bad_words` (number of matches) and `bad_word_share` (fraction of the words).
    A list has one word or phrase per line. A list whose file name is a language code, such as
    `pt.txt`, is used for texts in that language only."""
    block_urls: tuple[str, ...] = several(
        "Set the score blocked_url to 1 for URLs on this blocklist", "PATH"
    )
    """A file with domains and addresses, or a directory with one directory per category that
    contains a file `domains` or `urls`. Hosts files and the domain rules of ad blockers are also
    accepted, and files may be compressed with gzip."""
    c4_lines: bool = switch("Remove lines from the text by the rules of C4")
    """The text is edited before the scores are computed."""


class AskOptions(EndpointOptions, Backend, group="Language model", only={ApiCalls: needs("url")}):
    """A language model that labels documents: a model directory, or a server."""

    ask: str = text("Score each document with a language model and this prompt file", "FILE.toml",
                    recorded=False)  # fmt: skip
    """Required keys of the file: `name` (of the score), `instruction`, and either `scale` (such as
    `[0, 5]`) or `labels` (such as `["prose", "advert"]`). Optional keys: `examples` (tables with
    `text` and `answer`), `max_chars` (maximum characters of a document in the prompt, default 8000)
    and `max_tokens` (maximum tokens in the reply of a server, default 16)."""
    lm: str = text("Model for --ask: a directory, or a model name at --url", "MODEL", only=ASK,
                   recorded=False)  # fmt: skip
    """A model directory is run locally and gives the probability of each answer. From a server, the
    answer is parsed from the text of the reply."""
    url: tuple[str, ...] = changed(EndpointOptions.url, only=ASK)
    cache: str = changed(EndpointOptions.cache, only=ASK)

    def check(self) -> None:
        """`--ask` needs a model; the model of a server has no local backend."""
        super().check()
        if self.ask and not self.lm:
            raise UsageError("--lm: is missing (expected a model directory, or a name at --url)")
        if "backend" in self.given and self.url and not self.values()["model"]:
            raise UsageError("--backend: only without --url (the server computes the model)")


class ClassifyOptions(
    RowOptions, Executor, TextColumn, Appending, ContentChecks, AskOptions, group="Scores",
    only={Backend: needs("model", "ask")},
):  # fmt: skip
    """Options of `sabia classify`."""

    where: str = text("Keep only rows for which this is true, such as 'quality >= 0.5'",
                      "EXPRESSION", common=True)  # fmt: skip
    """Comparisons (`==`, `!=`, `<`, `<=`, `>`, `>=`, also chained) of columns, scores, numbers and
    strings, combined with `and`, `or` and `not`; also `language in ('pt', 'en')`, `'word' in text`,
    `url is None`, `len(text)`, `+`, `-`, `*` and `/`. A name refers to a column or, if there is no
    such column, to a score. Write `scores['a name']` for a score that some rows do not have. A
    comparison with a missing value is neither true nor false, and a row is kept only if the whole
    expression is true."""
    removed: str = text("Where to write the rows that --where removes, with the reason", "PATH",
                        only=needs("where"))  # fmt: skip
    """A file in the format of its ending, as with `--out`, or a directory, which gets one Parquet
    file for each input shard with removed rows. The column `reason` is added. Tasks that process a
    slice of the shards need a directory."""
    model: tuple[str, ...] = several("Add the scores of this trained classifier", "[NAME=]PATH",
                                     common=True)  # fmt: skip
    """A fastText model file, or the directory of a sequence classifier. There is a score for each
    label, the probability of the label. It has the name of the label, or with `NAME=` the name
    `NAME_LABEL`."""
    calibration: tuple[str, ...] = several("Apply a calibration file from `classify threshold`",
                                           "FILE.json")  # fmt: skip
    """Adds the scores `NAME_ok` (1 if the score `NAME` reaches the threshold, otherwise 0) and
    `NAME_probability` (the calibrated score)."""
    quality: bool = switch("Add the quality scores and detect the language", default=True,
                           negative=True, unset="--quality", common=True)  # fmt: skip
    length: int | None = quantity("length",
                                  "Maximum tokens of a text, or of a window with --long windows",
                                  group="Model", only=MODEL, unset="as trained")  # fmt: skip
    """Applies to `--model` directories, not to fastText models; so do `--long` and
    `--precision`."""
    long: str = choice("Texts longer than --length: truncate, or average over windows", "truncate",
                       "windows", group="Model", only=MODEL)  # fmt: skip
    precision: str = choice("Floating-point format of computations in --model directories", "fp32",
                            "bf16", group="Model", only=MODEL)  # fmt: skip
    price_per_hour: float = quantity(
        "money", "Price of one hour of a CPU core; prints the cost per 10^9 documents", 0.0,
        recorded=False, unset="no cost is printed",
    )  # fmt: skip
