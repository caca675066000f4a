"""Options of `sabia classify` (`classify score`), and what it shares with `classify train`."""

from sabia.core.errors import UsageError
from sabia.core.options.calls import ApiCalls, EndpointOptions
from sabia.core.options.option import changed, choice, needs, quantity, several, switch, text
from sabia.core.options.shared import Backend, RowOptions
from sabia.core.options.table import Options

MODEL, ASK = needs("model"), needs("ask")


class Screens(Options, group="Screens"):
    """What should not be in a corpus."""

    pii: str = choice("Personal data: count it, or mask it too", "count", "mask", default="")
    """Adds the scores `pii_email`, `pii_iban`, `pii_card`, `pii_cnpj`, `pii_cpf`, `pii_ip` and
    `pii_phone`. `mask` also puts `[email]` and the like in place of what was found."""
    bad_words: tuple[str, ...] = several("Count the words of a list, or of a DIR of lists", "PATH")
    """Adds the scores `bad_words` and `bad_word_share`. A list has a word or phrase on each line; a
    list named `pt.txt` is used for texts in that language only."""
    block_urls: tuple[str, ...] = several(
        "Domains and addresses that set blocked_url to 1: FILE or DIR", "PATH"
    )
    """A list of domains and addresses, or a directory of categories, each with a file `domains` or
    `urls`. Lists may be compressed with gzip, and may be hosts files or domain rules of ad
    blockers."""
    c4_lines: bool = switch("Keep only the lines that C4 keeps; edits the text")
    """The text is edited before figures are taken."""


class Asking(EndpointOptions, Backend, group="Language model", only={ApiCalls: needs("url")}):
    """A language model that is asked about documents: a model directory, or behind an endpoint."""

    ask: str = text("Ask a language model about each document", "FILE.toml", recorded=False)
    """The file has the keys `name` (of the score), `instruction`, and `scale` (such as `[0, 5]`) or
    `labels` (such as `["prose", "advert"]`). Optional are `examples` (tables with `text` and
    `answer`), `max_chars` (characters of a document that are shown, 8000) and `max_tokens` (of a
    server's answer, 16)."""
    lm: str = text(
        "Model to ask: a directory, or its name at --url", "MODEL", only=ASK, recorded=False
    )
    """A directory is computed here and says how likely each answer is; the answer of a server is
    read from its text."""
    url: str = changed(EndpointOptions.url, only=ASK)
    cache: str = changed(EndpointOptions.cache, only=ASK)

    def check(self) -> None:
        """Whoever asks needs a model; a server's model is not computed here."""
        super().check()
        if self.ask and not self.lm:
            raise UsageError("--lm: is missing (expected a model directory, or a name at --url)")
        if "backend" in self.given and self.url and not self.values()["model"]:
            raise UsageError("--backend: only without --url (the server computes the model)")


class ClassifyOptions(
    RowOptions, Screens, Asking, group="Scores", only={Backend: needs("model", "ask")}
):  # fmt: skip
    """Options of `sabia classify`."""

    where: str = text("Keep rows for which this holds (columns, scores)", "EXPRESSION", common=True)
    """Comparisons (`==`, `!=`, `<`, `<=`, `>`, `>=`, also chained) of columns, scores, numbers and
    strings, joined by `and`, `or` and `not`; `language in ('pt', 'en')`, `'word' in text`,
    `url is None`, `len(text)`, `+`, `-`, `*` and `/`. A name is a column, else a score;
    `scores['a name']` is a score that rows may lack. A comparison with a missing value is neither
    true nor false, and a row is kept only where the whole expression is true."""
    removed: str = text(
        "Write the other rows here: FILE.parquet, or a directory", "PATH", only=needs("where")
    )
    """A directory where `--out` is one. Each row gets a `reason`."""
    model: tuple[str, ...] = several("Classifier that adds its scores", "[NAME=]PATH", common=True)
    """A fastText model, or the directory of a sequence classifier. Its scores have the names of its
    labels; with `NAME=` they are called `NAME_LABEL`."""
    calibration: tuple[str, ...] = several(
        "Apply a calibration file of `classify threshold`", "FILE.json"
    )
    """Adds the scores `NAME_ok` and `NAME_probability`."""
    quality: bool = switch(
        "Add quality scores and the language", default=True, negative=True, common=True
    )
    length: int | None = quantity(
        "length", "Maximum tokens of a text or window", group="Model", only=MODEL,
        unset="as trained",
    )  # fmt: skip
    """For `--model` directories, as are `--long` and `--precision`."""
    long: str = choice(
        "Longer texts: read the start, or average windows", "truncate", "windows",
        group="Model", only=MODEL,
    )  # fmt: skip
    precision: str = choice(
        "Compute precision of --model directories", "fp32", "bf16", group="Model", only=MODEL
    )
    price_per_hour: float = quantity(
        "money", "Price of a core-hour; prints the cost per 10^9 documents", 0.0, recorded=False,
        unset="no cost is printed",
    )  # fmt: skip
