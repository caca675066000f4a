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
from sabia.core.options.shared import Backend, Executor, RowOptions, TextColumn
from sabia.core.options.table import Options

INDEXED = needs(method=("minhash", "exact"))
LINE = needs(method="line")
SUBSTRING = needs(method="substring")


class NearDuplicates(Options, group="Near duplicates"):
    """MinHash signatures, and how candidate pairs are compared."""

    ngram: int = integer("Number of words in an n-gram", 5, least=1)
    permutations: int = integer("Maximum number of hashes in a MinHash signature", 128, least=1,
                                most=4096)  # fmt: skip
    """The numbers of bands and of rows per band are chosen for `--threshold`; their product is at
    most this number."""
    signatures: str = choice(
        "Hash functions of the signatures: sabia's, or those of the package datasketch", "sabia",
        "datasketch",
    )  # fmt: skip
    """`datasketch` gives the same hash values as `MinHash(num_perm, seed, hashfunc=int)` of
    datasketch 2.0 (scheme affine32) on sabia's hashed n-grams, at about the same speed."""
    verify: bool = switch("Verify candidate pairs by their exact n-gram sets", default=True,
                          negative=True, unset="--verify")  # fmt: skip
    """With `--no-verify` documents that share a band are duplicates, and the bands are chosen to
    balance missed and false pairs; at a threshold of 0.7, one removed document in ten is then not a
    duplicate. Verification reads the candidates a second time and costs little."""


class DuplicatedParts(Options, group="Duplicated parts"):
    """Parts of documents that already occurred."""

    span: int = integer("Minimum length of a duplicated span, in tokens or UTF-8 bytes", None,
                        least=2, only=SUBSTRING,
                        unset="50 tokens, or 200 bytes without --tokenizer")  # fmt: skip
    """The unit is tokens with `--tokenizer`, otherwise bytes. A character is never split."""
    tokenizer: str = text("Measure --span in tokens of this tokenizer", "PATH", only=SUBSTRING)
    """A `tokenizer.json`, or a directory that contains one."""
    unit: str = choice("Unit of text that is compared", "line", "paragraph", "sentences", only=LINE)
    """A `paragraph` ends at a blank line. `sentences` compares every three consecutive
    sentences."""
    min_copies: int = integer("Minimum number of occurrences of a line that is removed", 2, least=2,
                              only=LINE)  # fmt: skip
    """The first occurrence is kept. A line is the unit of text that `--unit` names."""
    min_words: int = integer("Minimum number of words of a line that is removed", 1, least=0,
                             only=LINE)  # fmt: skip
    """Short lines of code and of poems often repeat; 3 or more keeps most of them."""
    action: str = choice(
        "What to do with duplicated parts: cut them, drop the document, or only mark them", "cut",
        "drop", "mark",
    )  # fmt: skip
    """`cut` removes the duplicated parts from the text. `drop` removes whole documents according to
    `--share` and does not change the others. `mark` removes nothing and adds the column
    `duplicate_spans` and the score `duplicate_share`."""
    share: float = quantity(
        "share", "Drop a document if more than this fraction of it is duplicated",
        unset="1; with --action drop 0.5", only=needs(action=("cut", "drop")),
    )  # fmt: skip
    """The fraction is measured in bytes. With 1, no document is dropped. If a dropped document
    contains the first occurrence of a part, that occurrence is lost."""


class Embeddings(Options, group="Embeddings"):
    """Embeddings of documents."""

    embeddings: str = text("Column that contains the embeddings", "COLUMN", excludes=("model",))
    """A list of numbers for each document. Documents without an embedding are kept."""
    model: str = text("Model directory that computes the embeddings", "DIR")
    """The embedding of a document is the mean of the last hidden states over all of its tokens,
    which are processed in windows of 512 tokens."""
    clusters: int = integer("Number of k-means clusters; documents are compared within a cluster",
                            0, least=0, unset="from the number of documents")  # fmt: skip
    """The default is 1 up to 4,096 documents, so that all pairs are compared, and above that the
    square root of the number of documents. Fewer clusters miss fewer pairs and take longer. The
    clusters depend on `--seed`."""
    backend: str = changed(Backend.backend, recorded=True, only=needs("model"), group="Embeddings")


class BenchmarkItems(Options, group="Benchmark items"):
    """Which benchmark items count as matches, and what happens to the documents."""

    verdict: str = choice(
        "What to do with matching documents: drop, mask the match, keep, or by match (auto)",
        "auto", "drop", "mask", "keep",
    )  # fmt: skip
    """`auto` drops documents with a matched item, and masks a match of only a long word run
    (`--run`). `drop`, `mask` and `keep` treat both kinds of matches alike."""
    overlap: float = quantity("share", "Minimum weighted fraction of a question that matches", 0.6)
    """An item matches if this fraction of the words of its question, weighted by inverse document
    frequency, occurs in the document in the same order. Sentences that were moved still count."""
    run: int = integer("Minimum words of a run that is a match by itself; 0: no such matches", 13,
                       least=0)  # fmt: skip
    """A run is a sequence of equal words from any part of an item: question, options or answer. The
    length is 5 or more, or 0."""


class IndexOptions(Options, group="Index", recorded=False):
    """Documents that earlier runs kept. Fingerprints include the state of an index, not its
    path."""

    against: str = text("Drop documents that are duplicates of a document in this index", "DIR")
    """The indexed document is kept regardless of `--keep`. Threshold, permutations, n-grams, seed,
    verification and `--keep` must be those with which the index was created. The index contains
    only kept documents, so a document that is similar only to one that an earlier run removed is
    kept; a single run over all documents would remove it (in a test 2 or 3 of 8,500 documents)."""
    replaced: str = text("Let better documents replace indexed ones; list the replaced ones here",
                         "FILE.parquet", only=needs("against"))  # fmt: skip
    """A new document is kept if it is better according to `--keep` than all indexed documents that
    it duplicates. The file lists the replaced documents: `id`, `replaced_by` and
    `similarity`."""
    index: str = text("Add the kept documents to this index", "DIR")
    """The index is created if it does not exist. If `--against` names the same directory, replaced
    documents are removed from it."""
    redis: str = text("Use a datasketch index in Redis for --against and --index",
                      "redis://HOST:PORT/DB?name=NAME", only=needs(signatures="datasketch"),
                      excludes=("against", "index"))  # fmt: skip
    """Drops documents that are duplicates of a document in the index, and adds the kept documents
    to it. About 20 times slower than `--against` and `--index`."""


class Phases(Options, group="Parallelism", recorded=False):
    """The work divided into phases."""

    scratch: str = text("Directory for intermediate results, to resume and for --phase", "DIR")
    """It gets a file or directory for each input shard: signatures, hashes, units or vectors,
    depending on `--method`. An interrupted run continues from them. Delete the directory when the
    run is complete."""
    phase: str = choice("Run only this phase, over a shared --scratch directory", "sketch",
                        "compare", "write", default="", unset="all three",
                        only=needs("scratch"))  # fmt: skip
    """`sketch` and `write` can be divided into slices of the shards, for example as Slurm arrays.
    `compare` runs between them as one job over all shards and also writes `--removed`. All phases
    must be given the same inputs and options."""


class DedupOptions(
    RowOptions, Executor, TextColumn, NearDuplicates, DuplicatedParts, Embeddings, BenchmarkItems,
    IndexOptions, Phases,
    group="Method",
    only={
        NearDuplicates: needs(method="minhash"),
        DuplicatedParts: needs(method=("substring", "line")),
        Embeddings: needs(method="semantic"),
        BenchmarkItems: needs("decontaminate"),
        IndexOptions: INDEXED,
        Phases: unless("decontaminate"),
    },
):  # fmt: skip
    """Options of `sabia dedup`."""

    method: str = choice(
        "Duplicates to find: near (minhash), exact, parts (substring, line), url, semantic",
        "minhash", "exact", "substring", "line", "url", "semantic", common=True,
        only=unless("decontaminate"),
    )  # fmt: skip
    """`minhash` removes exact and near-duplicate documents, `exact` only exact duplicates.
    `substring` and `line` remove duplicated parts of documents, `url` pages that were fetched more
    than once, and `semantic` documents with the same meaning in other words."""
    decontaminate: tuple[str, ...] = several(
        "Remove benchmark items from documents instead of duplicates", "BENCH", common=True
    )
    """A task file of `sabia eval`, a directory of task files, or an index that `sabia eval --index`
    wrote. Question, options and answer are searched separately: shared 5-grams select passages,
    which are then aligned with the item; rare words have a larger weight (inverse document
    frequency among the items). Each shard is processed on its own, so this also runs as a Slurm
    array. The column `contamination` gets the matches as JSON: task, item, part, overlap, longest
    run and the byte range in the text."""
    threshold: float = number("Minimum similarity of duplicates", None, least=0, most=1,
                              common=True, metavar="S", unset="0.7; with --method semantic 0.95",
                              only=needs(method=("minhash", "semantic")))  # fmt: skip
    """With `minhash` the Jaccard similarity of the sets of word n-grams, with `semantic` the cosine
    similarity of the embeddings. With `minhash` it also determines the numbers of bands and rows;
    the probability of finding a pair is printed for several similarities."""
    keep: str = text("Document to keep of a cluster: longest, first, newest or best:SCORE", "RULE",
                     default="longest", common=True,
                     only=needs(method=("minhash", "exact", "url", "semantic")))  # fmt: skip
    """`longest` compares the number of characters of the text that deduplication compares, without
    white space and accents, `first` the order of the input, `newest` the column
    `crawl_time`, and `best:SCORE` that entry of the column `scores`, of which the highest value is
    kept. If two documents are equal, the earlier one is kept."""
    removed: str = text("Where to write removed rows, with the reason and kept_id", "PATH",
                        common=True, recorded=False, group="Input and output")  # fmt: skip
    """A file in the format of its ending, as with `--out`, or a directory, which gets one Parquet
    file for each input shard with removed rows."""
    decisions: bool = switch("Write the decision for each document instead of its text",
                             only=INDEXED, excludes=("phase",))  # fmt: skip
    """There is a row for every document: `id`, `cluster`, `cluster_size`, `kept`, `reason` and
    `similarity`. The text is then read only once."""
    engine: str = choice(
        "Kernel implementation: numba is fast, numpy the reference; same output", "auto", "numba",
        "numpy", recorded=False,
        only=needs("decontaminate", method=("minhash", "exact", "substring", "line")),
    )  # fmt: skip
    """`numba` is compiled when first used, and cached in `$XDG_CACHE_HOME/sabia`. `numpy` is the
    reference, which is about ten times slower. `auto` uses `numba` if it is installed; MinHash
    sketches are computed with `numpy` until they are compiled, in another process. The output is
    the same, bit for bit. `python -m sabia.kernels.compile` compiles all kernels beforehand."""
    mem: int = quantity(
        "size", "Maximum memory for sorting and comparing; larger data is kept on disk", "1GiB",
        least=1 << 20, recorded=False, only=needs(method=("minhash", "substring", "line")),
    )  # fmt: skip
    """Larger data is kept in temporary files in `TMPDIR`. With `substring` these are the text (or
    12 bytes per token) and about 100 bytes per `--span` units of text."""
    seed: int = changed(RowOptions.seed, only=needs(method=("minhash", "semantic")))

    @property
    def with_shingles(self) -> bool:
        """Whether candidates are compared by their n-grams."""
        return self.method == "minhash" and self.verify

    def needs_all_shards(self) -> bool:
        """Two of the phases, and the search for benchmark items, can process slices."""
        return self.phase not in ("sketch", "write") and not self.decontaminate

    def complete(self) -> None:
        """Set defaults by method, unit and action. Decontamination has no method."""
        if self.decontaminate and "method" not in self.given:
            self.method = ""
        if self.threshold is None:
            self.threshold = 0.95 if self.method == "semantic" else 0.7
        if self.span is None:
            self.span = 50 if self.tokenizer else 200
        if self.share is None:
            self.share = 0.5 if self.action == "drop" else 1.0

    def check(self) -> None:
        """Refuse rules, numbers and combinations that the table cannot describe. UsageError."""
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
            raise UsageError(
                "--embeddings: is missing (--method semantic needs --embeddings or --model)"
            )
        if self.removed and self.method in ("substring", "line") and self.action == "mark":
            raise UsageError("--removed: not together with --action mark, which removes nothing")
