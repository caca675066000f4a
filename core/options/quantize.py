"""Options of `sabia quantize`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    number,
    quantity,
    several,
    text,
)
from sabia.core.options.shared import Call, InputOptions, Output, Redo, Seeded


class QuantizeOptions(InputOptions, Output, Seeded, Redo, Call, group="Precision"):
    """Options of `sabia quantize`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs,
        help="Calibration records (chats, documents or token rows); - reads stdin",
    )
    """Without it a pipe or a file on standard input is read; from a terminal nothing is read, and
    there is no calibration."""
    out: str | None = changed(Output.out, help="Model directory to write", metavar="DIR")
    """Required without `--verify`. It is written completely or not at all."""
    model: str = text("Model directory to quantize", "DIR", required=True, group="Model")
    verify: str = text(
        "Quantized directory to compare with --model, instead of quantizing", "DIR", group="Model",
        excludes=("out", "recipe", "format", "group_size", "rounding", "experts", "smooth", "scale",
                  "match", "bits", "formats", "samples", "usage", "task", "force", "dry_run"),
    )  # fmt: skip
    """Any compressed-tensors directory of the same architecture, from any program, one in NF4 or
    FP4 of bitsandbytes, or GPT-OSS with experts in MXFP4 as it is published. Its matrices are
    decoded and compared with those of `--model`, which the rows of the output list; tensors that no
    module takes and that are missing are named, and are an error (65). With INPUT, the divergence
    is measured on `--held-out` records, with activations rounded as servers do. Where transformers
    and what it reads the form with (compressed-tensors, bitsandbytes; accelerate for MXFP4) are
    installed, it is said whether it loads the directory, and how far its logits are from those
    computed here."""
    recipe: str = text(
        "Recipe: mixed, w8, w4, a number format such as nvfp4, or a TOML file", "NAME|FILE.toml",
        unset="the format that the weights were trained for, else mixed", common=True,
    )  # fmt: skip
    """A recipe defines the number format of each component of the model. `mixed` has 8 bits in
    attention and head, 4 bits in the feed-forward parts; `w8` and `w4` include the head. Weights
    of quantization-aware training (`--precision qat-int8`, `qat-int4`, `qat-nvfp4`, which their
    config.json records and which are names of recipes too) get the codes and scales that the
    training has simulated, in `w8a16`, `w4a16` and `nvfp4a16`. The name
    of a format applies it to attention and feed-forward parts: `w4a16` and `w4a16-asym` (4-bit
    integers, with zero points), `w8a16`, `w8a8`, `fp8` (a scale for each row and token),
    `fp8-static`, `fp8-block` (128 by 128, as DeepSeek-V3), `mxfp8`, `mxfp4`, `nvfp4`; `mxfp8a16`,
    `mxfp4a16` and `nvfp4a16` round no activations. `fp8-static` and `nvfp4` store scales of
    activations, which are measured on the calibration records. `nf4`, and `nf4-double` with double
    quantization (QLoRA), are NF4 in blocks of 64, rounded to nearest by the largest value of each:
    the directory is as transformers and bitsandbytes write it, with no other format beside them,
    and experts stay in BF16, because bitsandbytes reads no others. A recipe file may quantize
    experts too, for the programs here."""
    bits: float | None = number(
        "Choose formats by sensitivity within this many stored bits per weight", None, least=1,
        unset="the recipe's formats", common=True,
    )  # fmt: skip
    """The matrices that the recipe quantizes and that no rule of it names get formats of
    `--formats`, so that their stored bits, scales included, are at most this for each of their
    weights (4.8, say) and the expected divergence is least: matrices whose rounding changes the
    predictions more get more bits. The expectation is from gradients and inputs on the calibration
    records, for the rounding that `--rounding` asks for. Matrices that servers join get one format.
    `recipe.toml` in the output is the recipe that was found; given as `--recipe`, it makes the same
    files again."""
    formats: str = text(
        "Formats that --bits chooses from", "NAME[:GROUP],…", default="w4a16,w4a16:32,w8a16,bf16",
        only=needs("bits"),
    )  # fmt: skip
    """Names of number formats; `w4a16:32` has a scale for each 32 columns."""
    format: str = choice("Form of the written weights", "compressed-tensors", "dense", "gguf")
    """`compressed-tensors` holds the codes and scales; those of NF4 are in the form of
    bitsandbytes. `dense` holds the decoded values, in float32 because BF16 does not hold all of
    them, like a model that is not quantized: for programs that do not read compressed-tensors. It
    is not smaller, and no activations are rounded by what loads it. `gguf` is the file
    DIR/model.gguf with tokenizer and chat template, for llama.cpp: `w8a16` of a recipe is Q8_0,
    `w4a16` Q4_0, `mxfp4a16` MXFP4, and what is not quantized F16 (`--recipe bf16`: all of it).
    Models of llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma, gemma2 and gemma3 have this
    form, with byte-level BPE or the BPE of a SentencePiece model as tokenizer."""
    group_size: int | None = integer(
        "Columns that share the scale of a matrix of 4-bit integers", None, least=1,
        unset="the recipe's, or the largest of 128, 64 and 32 that divides the columns",
    )  # fmt: skip
    """It must divide the columns of every such matrix; the error lists the sizes that do. If none
    of 128, 64 and 32 divides the columns, there is one scale per row. The rows of the output name
    the group size of each matrix."""
    rounding: str | None = choice(
        "Rounding method",
        "auto",
        "gptq",
        "learned",
        "rtn",
        "trained",
        default=None,
        unset="the recipe's, or auto",
    )
    """`auto` uses GPTQ for 4-bit matrices (not NF4) with calibration inputs, and rounds the others
    to nearest; `gptq` uses GPTQ for 8 bits too; `learned` learns for each weight of
    4-bit matrices whether it is rounded up or down, by signed gradients (AutoRound), and is
    usually behind GPTQ; `rtn` rounds to nearest, without calibration;
    `trained` rounds to nearest from BF16, as quantization-aware training does.
    An expert that fewer than 32 tokens calibrate is rounded to nearest, which the summary and the
    rows of the output say."""
    experts: str | None = choice(
        "Tokens that calibrate an expert: those routed to it, or all", "routed", "all",
        default=None, unset="the recipe's, or routed",
    )  # fmt: skip
    """`routed` is what the expert will see; `all` calibrates experts that the router seldom chooses
    on these records too, and takes as many times longer in the MoE layers as there are experts for
    each that the router chooses, in the same memory. The model must have experts."""
    smooth: str | None = choice(
        "Move scales of channels from inputs into matrices first", "none", "awq", "smoothquant",
        default=None, unset="the recipe's, or none",
    )  # fmt: skip
    """Norms are divided by factors and the matrices that read them multiplied, which changes no
    result but that of rounding. `awq` searches the factors with the least error of the outputs
    after rounding the weights, and moves them where they lower it by 5 % or more; where 4-bit
    weights are rounded to nearest it also chooses the scale of each group (`--scale mse`) by the
    error of the outputs, which clips weights. `smoothquant` makes the largest activations smaller,
    for formats that round activations (`alpha` in a recipe file, 0.5, is the share of their size
    that is moved). Both need calibration records, and work with each `--rounding`."""
    scale: str | None = choice(
        "Scale of a group: least squared error, or largest value", "mse", "absmax", default=None,
        unset="the recipe's, or mse",
    )  # fmt: skip
    """`mse` is the scale with the least squared rounding error, `absmax` the smallest scale that
    clips no value. Scales of FP8 are not searched."""
    match: str | None = choice(
        "Program whose bytes are reproduced", "none", "llmcompressor", default=None,
        unset="the recipe's, or none",
    )  # fmt: skip
    """`llmcompressor`: codes and scales are those that the QuantizationModifier of llm-compressor
    0.14 writes for the model in BF16, which rounds each step of the arithmetic to BF16. It rounds
    to nearest (`--rounding rtn`; GPTQ is refused), in all formats but those that store scales of
    inputs; its preset W8A16 has groups of 128 columns, w8a16 a scale for each row. Without it
    steps are computed in float32, and errors are smaller."""
    samples: int = integer("Number of calibration records", 256, least=1, group="Data")
    """They are a uniform random sample of the input; `--seed` determines it."""
    usage: str = text(
        "Records of real use that the calibration has to be like", "PATH", group="Data"
    )
    """A sample of requests, in any form of INPUT. The calibration records, and those that are held
    out, are chosen from a random sample of INPUT that is 20 times as large, so that languages,
    sources, forms (documents, chats, several turns, tools) and lengths have their shares in the
    use. Both distributions and their distance (half the sum of all differences of shares) are in
    quantization.json; a warning names what the use has and INPUT lacks. Sources are compared only
    where both name the same."""
    held_out: int = integer("Records held out to compare the models on", 64, least=0, group="Data")
    """They are sampled like the calibration records and not among them: the reported divergence is
    that on text which the rounding has not seen. Of few records, a fifth at most is held out."""
    length: int = quantity("length", "Maximum tokens of a calibration record", "2k", group="Data")
    """Longer records are truncated. `2k` is 2048."""

    task: tuple[str, ...] = several(
        "Task to compare both models on: a file, folder or name, as in eval",
        "FILE.toml|FILE.yaml|FOLDER|NAME", group="Tasks", common=True, recorded=False,
    )  # fmt: skip
    """The model and the quantized model, named `original` and `quantized`, are evaluated as `sabia
    eval` does it, with the weights as stored and activations rounded where the formats say so.
    `evaluation.html` in the output has size, speed and quality, the share of its quality that each
    task and capability keeps (the worst first, next to the noise of the original), and the items;
    the rows of the output and quantization.json have the shares too, `scores.parquet` the scores.
    `capabilities` is a set of tasks that comes with sabia: function calls, maths, and a code in a
    long context. Finished answers are kept, so that a killed run goes on with the rest."""
    data: tuple[str, ...] = several(
        "Data of a task", "TASK=PATH", only=needs("task"), group="Tasks", recorded=False
    )
    """As in eval."""
    gate: str = text(
        "File of the largest falls allowed, as in eval", "FILE.toml|NAME", only=needs("task"),
        group="Tasks", common=True, recorded=False,
    )  # fmt: skip
    """Its baseline must be `original`. `capabilities`, which comes with sabia, allows each
    capability a fall of 5 points. If a larger fall is shown the exit code is 3; the model and the
    page are written."""
    task_seeds: int = integer(
        "Number of seeds that sampled answers are scored with", 3, least=1, only=needs("task"),
        group="Tasks", recorded=False,
    )  # fmt: skip
    """They are `--seed` and those after it, the same for both models. The original is also scored
    with as many others, and its difference to itself is the noise. Tasks without sampling and
    random examples are scored once."""
    limit: int = integer(
        "Number of items to take from each task", 0, least=0, unset="all", only=needs("task"),
        group="Tasks", recorded=False,
    )  # fmt: skip

    def check(self) -> None:
        """The output must be a directory. UsageError."""
        super().check()
        if not self.out and not self.verify:
            raise UsageError("--out: is missing (expected DIR)")
        if self.task and self.format == "gguf":
            raise UsageError(
                "--task: --format gguf is not evaluated here (expected another format)"
            )
        if self.out == "-":
            raise UsageError("--out: '-' (expected a directory)")
