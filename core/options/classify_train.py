"""Options of `sabia classify train`."""

from sabia.core.errors import UsageError
from sabia.core.options.classify import AskOptions
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
from sabia.core.options.training import Duration, Guards, Training

FAST = unless("model")
MODEL = needs("model")


class LabelOptions(Options, group="Data"):
    """The labels to learn."""

    label: str = text("Column that contains the labels", "COLUMN", common=True)
    """Rows without a label are ignored. With `--model` a label may be a list of names, so that a
    document has several labels. With `--ask`, a column of human labels to compare with the labels
    of the language model."""
    positive: str = text("Binary label: rows for which this expression is true are positive",
                         "EXPRESSION", only=unless("model", "ask"), common=True)  # fmt: skip
    """The positive label is the file name of `--out` without its ending, such as `spam` for
    `spam.bin`; the negative label is `not_spam`. The syntax is that of `sabia classify --where`."""


class FastText(Options, group="fastText"):
    """Hyperparameters of a fastText model."""

    quantize_model: bool = switch("Compress the model by product quantization (.ftz)", only=FAST)
    """The file has at most a quarter of the size."""
    dim: int = integer("Embedding dimension", 0, least=0, most=4096, only=FAST,
                       unset="from the number of labels")  # fmt: skip
    ngrams: int = integer("Maximum length of word n-grams", 2, least=1, most=9, only=FAST)
    subwords: str = text("Also use character n-grams of these lengths, such as 2-4", "MIN-MAX",
                         only=FAST)  # fmt: skip
    """Useful for languages with inflected words, and for words that are not in the training
    data."""
    epochs: float = integer("Number of passes over the data", 0, least=0, most=10_000, group="Data",
                            unset="from the data size; with --model 3")  # fmt: skip

    def letters(self) -> tuple[int, int]:
        """(minimum, maximum) length of `--subwords`; (0, 0) for none. Raises UsageError."""
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
        "lr", "batch", "micro_batch", "stage_micro_batches", "schedule", "warmup", "weight_decay",
        "optimizer", "betas", "eps", "momentum", "nesterov", "soap_every", "soap_max_dim", "freeze",
        "lora_rank", "lora_alpha", "lora_targets", "precision", "compile", "remat", "save_every",
        "eval_every", "mesh", *Guards.table,
    ),
):  # fmt: skip
    """How an encoder or decoder is trained; other settings are the defaults of `sabia sft`."""

    steps: int = changed(Duration.steps, unset="from --epochs")
    regression: bool = switch("Regression: the labels are numbers")
    """The loss is the mean squared error. Without this option the labels are classes."""
    class_weights: str = choice("Loss weights of labels: none, or balanced by frequency", "none",
                                "balanced")  # fmt: skip
    """`balanced` gives rarer labels a larger weight."""
    length: int = quantity("length", "Maximum tokens of a document; the rest is cut off", 512)


class ClassifyTrainOptions(
    InputOptions, Workers, Seeded, Redo, Call, LabelOptions, FastText, AskOptions, EncoderOptions,
    group="Model", only={EncoderOptions: MODEL, Backend: needs("model", "ask")},
):  # fmt: skip
    """Options of `sabia classify train`."""

    stdin = True

    inputs: tuple[str, ...] = changed(InputOptions.inputs,
                                      help="Labelled documents; none or - reads stdin")  # fmt: skip
    out: str | None = changed(
        Output.out, help="fastText model to write (MODEL.bin); with --model a run directory",
        required=True,
    )  # fmt: skip
    """The metrics on held-out documents and the settings are written next to a fastText model, to
    `MODEL.bin.json`. A run directory is as in `sabia sft`: the same command run again resumes an
    interrupted run, `final/` is the model, and `held_out.json` contains the metrics."""
    model: str = text("Fine-tune this encoder or decoder instead of fastText", "DIR", common=True,
                      recorded=False)  # fmt: skip
    """Its language-modelling head is replaced with a classification head."""
    sample: int = quantity("whole", "Number of documents that --ask labels", "10k",
                           only=needs("ask"), group="Language model")  # fmt: skip
    """The documents with the lowest hash of their `id`, so that a larger sample contains each
    smaller one."""
    jobs: int = changed(Workers.jobs, help="Number of threads that train a fastText model",
                        only=FAST)  # fmt: skip

    def check(self) -> None:
        """The labels must be given."""
        super().check()
        self.letters()
        if not (self.label or self.positive or self.ask):
            raise UsageError("--label: is missing; give --label, --positive or --ask")

    def needs_all_shards(self) -> bool:
        """One model is trained on all rows."""
        return True
