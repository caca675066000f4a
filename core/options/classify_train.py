"""Options of `sabia classify train`."""

from sabia.core.errors import UsageError
from sabia.core.options.classify import Asking
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    quantity,
    switch,
    text,
    unless,
)
from sabia.core.options.shared import (
    Backend,
    Call,
    InputOptions,
    MeshOptions,
    Output,
    Redo,
    Seeded,
    Workers,
)
from sabia.core.options.table import Options
from sabia.core.options.training import Duration, Training

FAST = unless("model")
MODEL = needs("model")


class LabelOptions(Options, group="Data"):
    """What is learnt."""

    label: str = text("Column with the labels", "COLUMN", common=True)
    """Rows without a label are left out. With `--model`, lists of names are any of several labels.
    With `--ask`, a column with people's labels to compare with."""
    positive: str = text(
        "Binary label: rows where this holds are positive", "EXPRESSION",
        only=unless("model", "ask"), common=True,
    )  # fmt: skip
    """The labels are the model's name without its ending where the expression holds, and `not_`
    with that name where it does not. The language is that of `sabia classify --where`."""


class FastText(Options, group="fastText"):
    """The settings of a fastText model."""

    quantize_model: bool = switch("Write a product-quantized model (.ftz)", only=FAST)
    """A quarter of the size or less."""
    dim: int = integer(
        "Embedding dimension", 0, least=0, most=4096, only=FAST, unset="by number of labels"
    )
    ngrams: int = integer("Maximum word n-gram length", 2, least=1, most=9, only=FAST)
    subwords: str = text("Also use character n-grams, such as 2-4", "MIN-MAX", only=FAST)
    """They serve languages that inflect, and words never seen."""
    epochs: float = integer(
        "Passes over the data", 0, least=0, most=10_000, group="Data",
        unset="by the data's size; with --model 3",
    )  # fmt: skip

    def letters(self) -> tuple[int, int]:
        """(least, most) letters of `--subwords`; (0, 0) for none. Raises UsageError."""
        least, _, most = self.subwords.partition("-")
        if not self.subwords:
            return 0, 0
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) <= 12):
            raise UsageError(f"--subwords: {self.subwords!r} (expected MIN-MAX, such as 2-4)")
        return int(least), int(most)


class EncoderOptions(
    Training, MeshOptions, group="Model",
    defaults={"lr": 5e-5, "warmup": "6%", "weight_decay": 0.01},
    keeps=(
        "lr", "batch", "micro_batch", "schedule", "warmup", "weight_decay", "optimizer", "freeze",
        "lora_rank", "lora_alpha", "lora_targets", "precision", "compile", "remat", "save_every",
        "eval_every", "mesh",
    ),
):  # fmt: skip
    """How an encoder or decoder is trained; all else is as `sabia sft` does it by default."""

    steps: int = changed(Duration.steps, unset="by --epochs")
    regression: bool = switch("Regression: labels are numbers")
    """The loss is the mean squared error."""
    class_weights: str = choice(
        "Weights of labels: none, or balanced by frequency", "none", "balanced"
    )
    """`balanced` gives a label the more weight the rarer it is."""
    length: int = quantity("length", "Maximum tokens of a document", 512)
    """A longer document is truncated."""


class ClassifyTrainOptions(
    InputOptions, Workers, Seeded, Redo, Call, LabelOptions, FastText, Asking, EncoderOptions,
    group="Model", only={EncoderOptions: MODEL, Backend: needs("model", "ask")},
):  # fmt: skip
    """Options of `sabia classify train`."""

    stdin = True

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Labelled documents; none or - reads stdin"
    )
    out: str | None = changed(
        Output.out, help="fastText model (MODEL.bin), or run directory with --model", required=True
    )
    """Beside a fastText model is `MODEL.bin.json`, with the settings and the figures on documents
    held out. A run directory is as in `sabia sft`: the same command again resumes or is done,
    `final/` is the model and `held_out.json` has the figures."""
    model: str = text(
        "Train this encoder or decoder instead of fastText", "DIR", common=True, recorded=False
    )
    """Its vocabulary head gives way to one over the labels."""
    sample: int = quantity(
        "whole", "Documents that --ask labels", "10k", only=needs("ask"), group="Language model"
    )
    """Those with the least hashes of their `id`, so that a larger sample holds a smaller one."""
    jobs: int = changed(Workers.jobs, help="Threads that train a fastText model", only=FAST)

    def check(self) -> None:
        """There must be labels."""
        super().check()
        self.letters()
        if not (self.label or self.positive or self.ask):
            raise UsageError("--label: is missing; give --label, --positive or --ask")

    def needs_all_shards(self) -> bool:
        """One model is made of all of them."""
        return True
