"""Options of `sabia pretrain`."""

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
)
from sabia.core.options.shared import Trainer, Workers
from sabia.core.options.training import (
    Adapters,
    Checkpoints,
    DistillationOptions,
    Guards,
    Logging,
    Storage,
    Training,
)

RUN = needs(search_mix="")  # a search trains proxy models, which have no checkpoints
SEARCH = needs("search_mix")
COMPARE = needs("compare")


class PretrainOptions(
    Trainer, Training, DistillationOptions, group="Model",
    only={Adapters: RUN, Checkpoints: RUN, Storage: RUN, Guards: RUN, Logging: RUN,
          DistillationOptions: RUN},
):  # fmt: skip
    """Options of `sabia pretrain`."""

    model: str = text(
        "Model directory to continue training from", "DIR", excludes=("config_json", "shape"),
        common=True,
    )  # fmt: skip
    """Its weights are the initial weights; the optimizer starts without state."""
    config_json: str = text(
        "Train from scratch: model of a Hugging Face config.json", "FILE", excludes=("shape",)
    )
    shape: str = text(
        "Train from scratch: model shape, such as d=256,layers=6,heads=8", "KEY=N,…",
        common=True,
    )  # fmt: skip
    """`d` (hidden size) and `layers` are required; `heads`, `kv`, `head_dim`, `ffn`, `vocab`,
    `context`, `theta`, `init` (standard deviation of initial values), `tied` (`true` or `false`)
    and `family` have defaults, and so have `experts`, `chosen` (experts per token), `expert_ffn`
    and `shared` in MoE families. `family` is `llama`, the default, or any other family but
    `gpt_oss`, `minicpm`, `minicpm3`, `phi3` and `qwen3_5_moe`. The vocabulary is by default that of
    the rows' tokenizer."""
    tokenizer: str = text(
        "Tokenizer directory of the rows", "DIR", unset="the model's, else the one the rows record"
    )
    """It is copied into `final/`. If `sabia tokenize --extend` made it from the tokenizer of
    `--model`, the model is extended: embedding and head get a row for each new token, the mean of
    the rows of the old tokens that it replaces (arXiv 2402.09977); all old rows stay as they are.
    The number of rows is a multiple of that command's `--vocab-multiple`. An extended tokenizer
    that the rows record, or that is stored beside them, is used without this option. It is an error
    if another tokenizer has more tokens than the model, or if layers that are copied unchanged have
    rows of tokens."""
    context: int = quantity(
        "length", "Extend the context of --model to this many tokens, such as 32k", 0,
        only=needs("model"), unset="the model's",
    )  # fmt: skip
    """The method is YaRN (arXiv 2309.00071) with the factor that this length needs, unless
    `--rope-theta` is given. The rows should be as long as the new context. `final/` has the new
    fields in its `config.json`."""
    rope_theta: float = number(
        "Rotary base (RoPE theta) for --context, instead of YaRN", 0.0, above=1,
        only=needs("context"), unset="YaRN",
    )  # fmt: skip
    """Models whose rotary frequencies are already scaled in another way (Llama 3.1) need it."""

    mix: str = text(
        "Sampling weights of the sources", "SOURCE=WEIGHT,…", group="Data", only=RUN,
        unset="every row once an epoch",
    )  # fmt: skip
    """Each source has its own epochs; sources that are not listed are not read. The source of a row
    is that of its documents, and `mixed` if they have several: to mix sources, tokenize each into
    shards of its own."""
    then: str = text(
        "Later mixes; WHEN is a step, a fraction (80%) or decay", "WHEN:MIX;…", group="Data",
        only=needs("mix"),
    )  # fmt: skip
    """`WHEN` is a step (`5000`), a fraction of the steps (`80%`), or `decay`, the step at which the
    learning rate begins to fall. Each source continues where it was: no row is read again before
    all rows of its source have been read."""
    max_repeat: float = number(
        "Maximum number of passes over a source", 0.0, metavar="TIMES", least=0, group="Data",
        unset="no limit", only=needs("for_tokens", search_mix=""),
    )  # fmt: skip
    """What a source cannot give within the limit is taken from the others in proportion to their
    weights; each stage of `--then` gets its part of such a source. It is an error if all sources
    together cannot fill the run."""
    row_cache: str = text("Directory of the row files of the shards", "DIR", group="Data",
                          recorded=False, unset="~/.cache/sabia/rows")  # fmt: skip
    """The rows of shards that are not uncompressed Arrow (`sabia tokenize --format arrow`) are
    unpacked there, 4 bytes per token, once on each host; later starts and other processes read
    these files. Files that no run has opened for 30 days are removed."""
    jobs: int = changed(Workers.jobs, help="Number of worker processes that unpack shards")
    validation: str = text("Token rows to validate on", "PATH", group="Data", only=RUN)
    eval_every: int = changed(Logging.eval_every, only=(RUN, needs("validation")))
    list_read: bool = switch(
        "List the rows that the run in -o has read, instead of training", group="Data", only=RUN,
        excludes=("force", "dry_run"), recorded=False,
    )  # fmt: skip
    """Give all options of that run too. The list is written to standard output, one row for each
    sample up to the last checkpoint, in reading order; its columns are `step`, `sample`, `row`,
    `name` (shard and id), `source` and `left_out` (skipped by `--on-spike`)."""
    mesh: str = changed(Trainer.mesh, only=RUN)

    search_mix: str = choice(
        "Search for the best mix with small proxy models, instead of training", "regression",
        "doremi", default="", group="Mixture",
    )  # fmt: skip
    """`regression` trains `--proxies` models on random mixes, fits a law to their held-out losses
    by source, and selects the mix with the lowest predicted loss; it reports how well the law ranks
    models that it was not fitted on. `doremi` trains a reference model and a proxy model whose
    sources gain weight where its loss is above the reference's. Every 20th row of each source is
    held out. Two more models, on the selected mix and on the rows as they are, show the
    improvement. The run directory then contains `mixture.json` and `proxies.jsonl`; an interrupted
    search resumes from there. Model, steps, batch and learning rate of the proxy models are set by
    the options of a run."""
    proxies: int = integer(
        "Number of proxy models", 24, least=8, group="Mixture", only=needs(search_mix="regression")
    )
    target: str = text(
        "Weights of the sources in the loss to minimize", "SOURCE=WEIGHT,…", group="Mixture",
        unset="equal", only=SEARCH,
    )  # fmt: skip
    """`regression` minimizes the weighted held-out loss; `doremi` only reports it."""
    for_tokens: int | None = quantity(
        "whole", "Training tokens of the run that the mix is for", group="Mixture",
        only=(SEARCH, needs("max_repeat")),
    )  # fmt: skip
    """No source gets a larger weight than `--max-repeat` passes over it can fill."""

    compare: bool = switch(
        "Compare the INPUTs as corpora by small runs with several seeds", group="Comparison",
        recorded=False,
        excludes=("search_mix", "list_read", "checkpoint_url"),
    )  # fmt: skip
    """Each INPUT is a candidate, token rows or documents, and each of the others is compared with
    the first. Documents, also those of `--validation`, are tokenized into the directory, with the
    tokenizer of `--tokenizer` or `--model`, in rows of the model's context, 2k at most. All runs
    have the same model and the same `--steps` or `--tokens`; the runs of a pair have the same seed,
    thus the same initial weights. They are scored by the loss of the documents of `--validation`,
    by the bits per byte of the answers of `--task`, or by both. Two pairs measure the noise between
    seeds. After each pair the comparison is tested, by intervals that hold at all looks together
    (confidence sequences, arXiv 1810.08240) and allow for the noise of seeds and for the choice of
    documents; it ends with `better`, `worse`, `equal` (within `--delta`, by two one-sided tests, so
    that each end of its interval has the confidence), or `cannot tell`, with the number of runs
    that are expected to tell and their cost. It ends before `--max-runs` if so many runs are not
    expected to tell. No candidate is read more than once, or `--max-repeat` times. The directory
    has the runs in `runs/` (of which finished ones are not repeated), `comparison.json` and
    `comparison.html`. If a comparison cannot tell, the exit code is 3; a later call with a larger
    `--max-runs` continues. All runs are trained in one process; a `--mesh` of several devices needs
    JAX."""
    delta: float = quantity(
        "share", "Relative difference of loss within which corpora are equal", "1%", above=0,
        group="Comparison", only=COMPARE, recorded=False,
    )  # fmt: skip
    max_runs: int = integer(
        "Maximum number of runs of each corpus", 5, least=2, group="Comparison", only=COMPARE,
        recorded=False,
    )  # fmt: skip
    confidence: float = quantity(
        "share", "Probability that no verdict of the call is wrong", "95%", least=0.5, most=0.9999,
        group="Comparison", only=COMPARE, recorded=False,
    )  # fmt: skip
    """All candidates and scores, and all times at which the comparison may end, are counted."""
    task: tuple[str, ...] = several(
        "Task of sabia eval by whose answers corpora are also compared", "FILE|FOLDER|NAME",
        group="Comparison", only=COMPARE, recorded=False,
    )  # fmt: skip
    """Its right choices or exact answers are scored as continuations of the prompt, or its texts if
    it is a task of perplexity. Tasks with a chat template and tasks of rubrics have no such
    answers. YAML files that need code of their own are errors."""
    data: tuple[str, ...] = several(
        "Data of a task, as in sabia eval", "TASK=PATH", group="Comparison",
        only=needs("task"), recorded=False,
    )  # fmt: skip
    price: float = quantity(
        "money", "US dollars for one hour of the device", 0.0, above=0, group="Comparison",
        only=COMPARE, recorded=False, unset="the lowest price on file, where the device is known",
    )  # fmt: skip

    def check(self) -> None:
        """One of --model, --config-json and --shape is required. UsageError."""
        super().check()
        if self.compare and not (self.validation or self.task):
            raise UsageError(
                "--validation: is missing (expected held-out token rows, or --task, to compare by)"
            )
        if self.compare and not (self.steps or self.tokens):
            raise UsageError(
                "--tokens: is missing (expected it, or --steps, the same for all corpora)"
            )
        if not (self.model or self.config_json or self.shape):
            raise UsageError(
                "--model: is missing (expected --model DIR, --config-json FILE or --shape "
                "d=…,layers=…)"
            )
