"""Options of `sabia dedup`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    number,
    quantity,
    several,
    switch,
    text,
    unless,
)
from sabia.core.options.shared import Backend, RowOptions
from sabia.core.options.table import Options

INDEXED = needs(method=("minhash", "exact"))
LINE = needs(method="line")
SUBSTRING = needs(method="substring")


class NearDuplicates(Options, group="Near duplicates"):
    """Signatures of documents, and how candidates are compared."""

    ngram: int = integer("Words in an n-gram", 5, least=1)
    permutations: int = integer("Hashes in a signature", 128, least=1, most=4096)
    """The most that bands times rows may be; both follow from the threshold."""
    signatures: str = choice("Hash functions of signatures", "sabia", "datasketch")
    """`datasketch` gives the hash values of datasketch's `MinHash(num_perm, seed, hashfunc=int)`
    (2.0, scheme affine32) over our hashed n-grams, bit for bit, at about the same cost."""
    verify: bool = switch(
        "Compare the n-gram sets of candidates", default=True, negative=True, unset="--verify"
    )
    """With `--no-verify` the bands are trusted. The comparison reads candidates a second time and
    costs little; without it one removed document in ten has no twin at 0.7 (bands are then chosen
    to balance both errors)."""


class CopiedParts(Options, group="Copied parts"):
    """Parts of documents that occur before."""

    span: int = integer(
        "Minimum length of a copied span, in tokens or bytes", None, least=2, only=SUBSTRING,
        unset="50 tokens, or 200 bytes without --tokenizer",
    )  # fmt: skip
    """Bytes are those of UTF-8. A character is never cut in two."""
    tokenizer: str = text("Count spans in tokens of this tokenizer", "PATH", only=SUBSTRING)
    """A `tokenizer.json` or a directory with one."""
    unit: str = choice("What is compared", "line", "paragraph", "sentences", only=LINE)
    """A `paragraph` is the lines up to a blank one; `sentences` compares runs of three
    sentences."""
    min_copies: int = integer("Occurrences from which a line is removed", 2, least=2, only=LINE)
    """The first occurrence stays."""
    min_words: int = integer("Lines with fewer words are left alone", 1, least=0, only=LINE)
    """Short lines of code or verse are copies too; 3 or more spares most of them."""
    action: str = choice("What is done about copies", "cut", "drop", "mark")
    """`cut` removes the copies. `drop` removes documents by `--share` and leaves the others as they
    are. `mark` removes nothing and writes `duplicate_spans` and the score `duplicate_share`."""
    share: float = quantity(
        "share", "Drop documents of which more than this share is copied",
        unset="1; with --action drop 0.5", only=needs(action=("cut", "drop")),
    )  # fmt: skip
    """Shares are of bytes; with 1 no document is dropped. First occurrences in a dropped document
    go with it."""


class Embeddings(Options, group="Embeddings"):
    """Vectors of documents."""

    embeddings: str = text("Column that holds the vectors", "COLUMN", excludes=("model",))
    """A list of numbers for each document. Documents without one stay."""
    model: str = text("Model directory that computes the vectors", "DIR")
    """A document's vector is the mean of the model's last hidden states over its tokens, in windows
    of 512 tokens."""
    clusters: int = integer(
        "Number of k-means clusters to compare within", 0, least=0, unset="by document count"
    )
    """The clusters depend on `--seed`. Without the option their number is the root of the number of
    documents, and one up to 4,096 documents, when all are compared. Fewer clusters miss fewer pairs
    and take longer."""
    backend: str = changed(Backend.backend, recorded=True, only=needs("model"), group="Embeddings")


class BenchmarkItems(Options, group="Benchmark items"):
    """Which items of benchmarks count as found, and what is done about them."""

    verdict: str = choice("What is done about documents with items", "auto", "drop", "mask", "keep")
    """With `auto` a document with an item is dropped, and a long run alone is masked; `drop`,
    `mask` or `keep` does the same with both."""
    overlap: float = quantity("share", "Minimum weighted overlap to report a match", 0.6)
    """An item is found where this share of its question, by weight, stands in the document in
    order; moved sentences count."""
    run: int = integer("Length of a word run masked by itself; 0: none", 13, least=0)
    """Equal words in a row, of any part of an item; 5 or more."""


class IndexOptions(Options, group="Index"):
    """What earlier runs kept. The state of an index enters fingerprints, not its place."""

    against: str = text("Drop documents that are like one of this index", "DIR", recorded=False)
    """An indexed document stays whatever `--keep` says. Bands, n-grams, seed, verification and
    `--keep` have to be those that made the index."""
    replaced: str = text(
        "Let better documents replace indexed ones, listed here", "FILE.parquet", recorded=False,
        only=needs("against"),
    )  # fmt: skip
    """A new document stays if it is better by `--keep` than all indexed ones like it. The rows have
    `id`, `replaced_by` and `similarity`."""
    index: str = text("Add the documents kept to this index", "DIR", recorded=False)
    """The index is made if there is none; with `--against` the same directory, replaced documents
    leave it."""
    redis: str = text(
        "Use a datasketch index in Redis instead; 20x slower", "redis://HOST:PORT/DB?name=NAME",
        recorded=False, only=needs(signatures="datasketch"), excludes=("against", "index"),
    )  # fmt: skip
    """Drops documents that are like one of the index, and adds the documents kept to it. It takes
    three round trips for 256 documents."""


class Phases(Options, group="Parallelism"):
    """The work in parts."""

    scratch: str = text("Keep sketches here, to resume and for --phase", "DIR", recorded=False)
    """One directory for each input shard. A run that was killed goes on with them; remove the
    directory when you are done."""
    phase: str = choice(
        "Do one phase of the work, over a shared --scratch", "sketch", "compare", "write",
        default="", unset="all three", recorded=False, only=needs("scratch"),
    )  # fmt: skip
    """`sketch` and `write` do a slice of the shards, in a Slurm array for example, and `compare`
    between them is one job over all shards, which also writes `--removed`. All phases need the same
    inputs and options."""


class DedupOptions(
    RowOptions, NearDuplicates, CopiedParts, Embeddings, BenchmarkItems, IndexOptions, Phases,
    group="Method",
    only={
        NearDuplicates: needs(method="minhash"),
        CopiedParts: needs(method=("substring", "line")),
        Embeddings: needs(method="semantic"),
        BenchmarkItems: needs("decontaminate"),
        IndexOptions: INDEXED,
        Phases: INDEXED,
    },
):  # fmt: skip
    """Options of `sabia dedup`."""

    method: str = choice(
        "What counts as a duplicate", "minhash", "exact", "substring", "line", "url", "semantic",
        common=True, only=unless("decontaminate"),
    )  # fmt: skip
    """`minhash` finds exact and near-duplicate documents, `exact` exact ones only. `substring` and
    `line` find copied parts of documents, `url` pages that were fetched more than once, and
    `semantic` documents of other words and the same meaning."""
    decontaminate: tuple[str, ...] = several(
        "Remove the items of this benchmark instead", "BENCH", common=True
    )
    """A task file of `sabia eval`, a folder of them, or an index that `sabia eval --index` wrote.
    Question, options and answer are looked for apart, by 5-grams that lead to an alignment in which
    rare words weigh more (inverse document frequency among the items). No other shard is needed, so
    that it also runs in a Slurm array. Findings are kept as JSON in the column `contamination`,
    with task, item, part, share, longest run and bytes of the text."""
    threshold: float = number(
        "Minimum similarity of duplicates", None, least=0, most=1, common=True, metavar="S",
        unset="0.7; semantic: 0.95", only=needs(method=("minhash", "semantic")),
    )  # fmt: skip
    """With `minhash` this is the Jaccard similarity of the sets of word n-grams, with `semantic`
    the cosine of the vectors. For `minhash` it also decides how the hashes are cut into bands and
    rows; the chance to find a pair at each similarity is printed."""
    keep: str = text(
        "Document of a cluster to keep: longest, first, newest, best:SCORE", "RULE",
        default="longest", common=True,
        only=needs(method=("minhash", "exact", "url", "semantic")),
    )  # fmt: skip
    """`longest` goes by bytes of text, `first` by the order of the input, `newest` by `crawl_time`,
    and `best:SCORE` takes the document with the highest value of that name in `scores`. The earlier
    document wins ties."""
    removed: str = text(
        "Write removed rows here, with reason and kept_id", "FILE.parquet", common=True,
        recorded=False, group="Input and output",
    )  # fmt: skip
    """With `--decontaminate` and a directory as `--out` this is a directory too, with one part for
    each shard."""
    decisions: bool = switch(
        "Write what was decided of each document, without its text", only=INDEXED,
        excludes=("phase",),
    )  # fmt: skip
    """Writes the `id` of every document with `cluster`, `cluster_size`, `kept`, `reason` and
    `similarity`. The text is read once and not written again."""
    engine: str = choice(
        "Engine of the kernels", "auto", "numba", "numpy", recorded=False,
        only=needs("decontaminate", method=("minhash", "exact", "substring", "line")),
    )  # fmt: skip
    """`auto` takes `numba` (compiled; its cache is in `$XDG_CACHE_HOME/sabia`) where it is
    installed, else `numpy`, the reference, which is about ten times slower. Both give the same
    bits."""
    mem: int = quantity(
        "size", "Memory for sorting and comparing", "1GiB", least=1 << 20, recorded=False,
        only=needs(method=("minhash", "substring", "line")),
    )  # fmt: skip
    """The rest lies in `TMPDIR`: for `substring` the text itself, or 12 bytes a token, and about
    100 bytes for every `--span` units."""
    shard: str | None = changed(
        RowOptions.shard, only=needs("decontaminate", phase=("sketch", "write"))
    )
    seed: int = changed(RowOptions.seed, only=needs(method=("minhash", "semantic")))

    @property
    def with_shingles(self) -> bool:
        """Whether candidates are compared by their n-grams."""
        return self.method == "minhash" and self.verify

    def needs_all_shards(self) -> bool:
        """Slices are enough for two of the phases, and to look for benchmark items."""
        return self.phase not in ("sketch", "write") and not self.decontaminate

    def complete(self) -> None:
        """Defaults by method, units and action; there is no method to look for benchmark items."""
        if self.decontaminate and "method" not in self.given:
            self.method = ""
        if self.threshold is None:
            self.threshold = 0.95 if self.method == "semantic" else 0.7
        if self.span is None:
            self.span = 50 if self.tokenizer else 200
        if self.share is None:
            self.share = 0.5 if self.action == "drop" else 1.0

    def check(self) -> None:
        """Refuse rules, numbers and combinations that the table does not know. UsageError."""
        super().check()
        rule, colon, score = self.keep.partition(":")
        if not (score if rule == "best" else rule in ("longest", "first", "newest") and not colon):
            expected = "longest, first, newest or best:SCORE"
            raise UsageError(f"--keep: {self.keep!r} (expected {expected})")
        for name in ("threshold", "overlap"):
            if getattr(self, name) == 0:
                raise UsageError(f"--{name}: 0 is out of range (expected above 0, at most 1)")
        if 0 < self.run < 5:
            raise UsageError(f"--run: {self.run} is out of range (expected 5 or more, or 0)")
        if self.method == "semantic" and not (self.embeddings or self.model):
            raise UsageError("--embeddings: is missing (expected it, or --model, with semantic)")
        if self.removed and self.method in ("substring", "line") and self.action == "mark":
            raise UsageError("--removed: not together with --action mark, which removes nothing")
