"""`sabia classify train`: a classifier from labelled documents, with held-out figures."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from sabia.cli.classifier_options import ASK, ENCODER, asked
from sabia.cli.grammar import command, count, option
from sabia.cli.shared_options import sharing
from sabia.core.shards.job import Job

if TYPE_CHECKING:
    from sabia.core.text.scorers import Scorer

EPOCHS = 3  # of an encoder or decoder, where nothing is said
FAST = {"positive": "", "quantize_model": False, "dim": 0, "ngrams": 2, "subwords": ""}
_OF_ENCODERS = {name: default for name, (_, default) in ENCODER.items() if name != "backend"}
_OF_ENCODERS |= {"length": 512}  # as it is read


@command(
    kind="fit",
    name="classify train",
    examples="""
    sabia classify train labelled.parquet --label kind -o kind.bin
    sabia classify train rated/ --label stars --positive "stars >= 4" -o good.bin --json
    sabia classify train rated/ --label stars --model encoder/ --regression -o run/
    sabia classify train pages/ --ask quality.toml --lm chat-model/ --sample 20k -o quality.bin
    """,
)
@sharing("asking", ASK)
@sharing("encoder", ENCODER)
def classify_train(
    job: Job,
    label: Annotated[
        str, option("Column with the labels; rows without one are left out.", metavar="COLUMN")
    ] = "",
    positive: Annotated[
        str, option("Two labels: where this holds (named as -o), and not.", metavar="EXPRESSION")
    ] = "",
    quantize_model: Annotated[
        bool, option("Write the model in its small form.", "--quantize-model")
    ] = False,
    dim: Annotated[
        int, option("Numbers for each word; 0 leaves it to the labels.", min=0, max=4096)
    ] = 0,
    ngrams: Annotated[int, option("Words in a row that count as a feature.", min=1, max=9)] = 2,
    subwords: Annotated[
        str, option("Also parts of words of so many letters, such as 2-4.", metavar="MIN-MAX")
    ] = "",
    epochs: Annotated[
        int, option("Passes over the data; 0 leaves it to its size.", min=0, max=10_000)
    ] = 0,
    model: Annotated[
        str, option("Train this encoder or decoder instead of fastText.", metavar="DIR")
    ] = "",
    sample: Annotated[float, count("Documents that --ask is to label.")] = "10k",  # type: ignore[assignment]
    *,
    encoder: dict[str, Any],
    asking: dict[str, Any],
) -> None:
    """Train a classifier; measure it on documents held out by a hash of their id.

    A fastText model, or with --model an encoder or decoder of the core, whose -o is a run directory
    as in sft. With --ask a language model labels a sample first, and --label may name the column
    of people's labels to compare with. Labels become the names of scores:
    sabia classify pages/ --model kind.bin
    """
    from sabia.core.errors import UsageError

    asker = asked(asking, str(encoder["backend"]))
    if not (label or positive or asker):
        raise UsageError("no --label COLUMN and no --positive EXPRESSION (expected one or both)")
    fast = {"positive": positive, "quantize_model": quantize_model, "dim": dim, "ngrams": ngrams,
            "subwords": subwords}  # fmt: skip
    if model:
        _refuse(fast, FAST, "with --model")
        train = partial(_encoder, model=model, settings=dict(encoder), epochs=epochs)
    else:
        _refuse(encoder, _OF_ENCODERS, "without --model DIR")
        train = partial(_fast, given=fast | {"epochs": epochs})
    if asker is None:
        train(job, label)
        return
    from sabia.core.recipes import distill

    number = bool(model) and asker.prompt.numeric
    if number:
        train.keywords["settings"]["regression"] = True
    _refuse(fast, {"positive": ""}, "with --ask")
    with asker:
        config = distill.DistillConfig(int(sample), label, number)
        distill.run(job, config, asker, train, partial(_opened, job, encoder if model else None))


def _refuse(given: dict[str, Any], usual: dict[str, Any], where: str) -> None:
    """UsageError where an option was given that has no meaning there."""
    from sabia.core.errors import UsageError

    odd = next((name for name, value in usual.items() if given[name] != value), None)
    if odd is not None:
        raise UsageError(f"--{'compile' if odd == 'compiled' else odd.replace('_', '-')}: {where}")


def _opened(job: Job, encoder: dict[str, Any] | None) -> "Scorer":
    """What was trained."""
    if encoder is None:
        from sabia.core.text.scorers import open_scorer

        return open_scorer(str(job.out))
    from sabia.core.recipes.classifier_model import ModelScorer

    return ModelScorer(f"{job.out}/final", encoder["backend"])


def _fast(job: Job, label: str, given: dict[str, Any]) -> None:
    """Train a fastText model."""
    from sabia.core.text import classifier_training as room

    letters = _letters(given["subwords"])
    wishes = room.Wishes(given["dim"], given["ngrams"], letters, given["epochs"])
    config = room.TrainConfig(label, given["positive"], given["quantize_model"], wishes)
    room.run(replace(job, options=given | {"label": label}), config)


def _encoder(job: Job, label: str, *, model: str, settings: dict[str, Any], epochs: int) -> None:
    """Train an encoder or decoder of the core."""
    from sabia.core.recipes import classifier as room
    from sabia.core.recipes.training_options import TrainOptions

    backend, mesh = settings.pop("backend"), settings.pop("mesh")
    own = {name: settings.pop(name) for name in ("regression", "class_weights", "length")}
    passes = 0 if settings["steps"] else epochs or EPOCHS
    options = TrainOptions(**settings, epochs=float(passes))
    config = room.ClassifierConfig(label, model, **own, options=options)
    room.run(replace(job, backend=backend, mesh=mesh), config)


def _letters(text: str) -> tuple[int, int]:
    """(least, most) of `MIN-MAX`; (0, 0) for none."""
    from sabia.core.errors import UsageError

    if not text:
        return 0, 0
    least, _, most = text.partition("-")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) <= 12):
        raise UsageError(f"--subwords: {text!r} (expected MIN-MAX, such as 2-4)")
    return int(least), int(most)
