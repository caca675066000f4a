"""Options of `sabia pretrain`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    number,
    quantity,
    switch,
    text,
)
from sabia.core.options.shared import Trainer
from sabia.core.options.training import (
    Adapters,
    Checkpoints,
    Guards,
    Logging,
    Storage,
    Training,
)

RUN = needs(search_mix="")  # the proxies of a search are no runs: nothing is saved or resumed
SEARCH = needs("search_mix")


class PretrainOptions(
    Trainer, Training, group="Model",
    only={Adapters: RUN, Checkpoints: RUN, Storage: RUN, Guards: RUN, Logging: RUN},
):  # fmt: skip
    """Options of `sabia pretrain`."""

    model: str = text(
        "Model directory to continue from", "DIR", excludes=("config_json", "shape"), common=True
    )
    """Training goes on from its weights with a new optimizer."""
    config_json: str = text(
        "Start from scratch: a Hugging Face config.json", "FILE", excludes=("shape",)
    )
    shape: str = text("Start from scratch: d=256,layers=6,heads=8,…", "KEY=N,…", common=True)
    """`d` (width) and `layers` are needed; `heads`, `kv`, `head_dim`, `ffn`, `vocab`, `context`,
    `theta`, `init` (standard deviation of initial values), `tied` (`true` or `false`) and `family`
    have defaults, and so have `experts`, `chosen`, `expert_ffn` and `shared` in families with
    experts. `family` is `llama`, the default, or any other family but `gpt_oss` and
    `qwen3_5_moe`. The vocabulary is that of the rows' tokenizer."""
    tokenizer: str = text(
        "Tokenizer of the rows", "DIR", unset="the model's, else the one the rows record"
    )
    """It is written into `final/`. Where `sabia tokenize --extend` made it from the tokenizer of
    `--model`, the model grows: embedding and head get a row for each new token, the mean of the
    rows of the old tokens that it is made of (arXiv 2402.09977), up to the multiple of
    `--vocab-multiple`, and all rows that there were stay as they are. Such a tokenizer is taken
    without being named where the rows record it or have it beside them. Any other tokenizer with
    more tokens than the model is refused, and so is growth where layers that are copied unchanged
    have rows of tokens."""
    context: int = quantity(
        "length", "Extend --model to this context, such as 32k", 0, only=needs("model"),
        unset="the model's",
    )  # fmt: skip
    """It is for rows of up to that length, by YaRN (arXiv 2309.00071) with the factor that this
    takes, unless `--rope-theta` is given. The weights are trained to it by the run; `final/`
    carries the new fields."""
    rope_theta: float = number(
        "Rotary base for --context", 0.0, above=1, only=needs("context"), unset="YaRN"
    )
    """A larger base instead of YaRN, which models need whose rotations are scaled in another way
    already (Llama 3.1)."""

    mix: str = text("Weights of sources", "SOURCE=WEIGHT,…", group="Data", only=RUN)
    """Each source is read in epochs of its own; sources that are not named are not read. A row's
    source is that of its documents, `mixed` where it has several: keep sources in shards of their
    own before `sabia tokenize`. By default every row is read once an epoch."""
    then: str = text(
        "Other mixes later; WHEN is a step, 80% or decay", "WHEN:MIX;…", group="Data",
        only=needs("mix"),
    )  # fmt: skip
    """`WHEN` is a step (`5000`), a share of the steps (`80%`), or `decay`, where the learning rate
    begins to fall. A source goes on where it was: no row is read again before all of its source
    have been."""
    max_repeat: float = number(
        "Maximum passes over a source", 0.0, metavar="TIMES", least=0, group="Data",
        unset="no limit", only=needs("for_tokens", search_mix=""),
    )  # fmt: skip
    """What a scarce source may not give goes to the others by their weights; each stage of `--then`
    keeps its share of a scarce source. A mix that is not possible within the limit is refused."""
    validation: str = text("Token rows to validate on", "PATH", group="Data", only=RUN)
    eval_every: int = changed(Logging.eval_every, only=(RUN, needs("validation")))
    list_read: bool = switch(
        "List the rows that the run in -o has read; train nothing", group="Data", only=RUN,
        excludes=("force", "dry_run"), recorded=False,
    )  # fmt: skip
    """With the options of that run. The list has a row for each sample up to the last checkpoint,
    in the order of reading, on standard output; its columns are `step`, `sample`, `row`, `name`
    (shard and id), `source` and `left_out`."""
    mesh: str = changed(Trainer.mesh, only=RUN)

    search_mix: str = choice(
        "Search for a mix with small runs", "regression", "doremi", default="", group="Mixture"
    )
    """No large model is trained, but small ones. `regression` trains `--proxies` models on random
    mixes, fits a law to their held-out losses by source, and takes the mix that it predicts to be
    best; it reports how well the law ranks runs that it was not fitted on. `doremi` trains a
    reference model and one whose sources gain weight where its loss is above the reference's. Every
    20th row of each source is held out. Two more models, on the mix found and on the rows as they
    are, show what is gained. The run directory then holds `mixture.json` and `proxies.jsonl`; a
    search that was stopped goes on from there. Model, steps, batch and learning rate are the
    options of a run."""
    proxies: int = integer(
        "Small runs", 24, least=8, group="Mixture", only=needs(search_mix="regression")
    )
    target: str = text(
        "Sources whose loss is to fall", "SOURCE=WEIGHT,…", group="Mixture", unset="all alike",
        only=SEARCH,
    )  # fmt: skip
    """`regression` lowers their weighted held-out loss; `doremi` only reports it."""
    for_tokens: int | None = quantity(
        "whole", "Tokens of the run that the mix is for", group="Mixture",
        only=(SEARCH, needs("max_repeat")),
    )  # fmt: skip
    """No source gets a share that it cannot give within `--max-repeat`."""

    def check(self) -> None:
        """A model is needed, in one of three ways."""
        super().check()
        if not (self.model or self.config_json or self.shape):
            raise UsageError(
                "--model: is missing (expected --model DIR, --config-json FILE or --shape "
                "d=…,layers=…)"
            )
