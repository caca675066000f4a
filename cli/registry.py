"""The table of commands and subcommands; a command's module is imported only when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sabia.cli.command import Command

# command → one line of help; its module is sabia.cli.<command with _ for ->
COMMANDS = {
    "crawl": "Fetch web pages, or read WARC and other files, as documents.",
    "classify": "Score and filter documents: quality, language, classifiers.",
    "dedup": "Remove exact and near-duplicate documents.",
    "rewrite": "Rewrite documents so that reasoning precedes the answer.",
    "tokenize": "Train or load a tokenizer; pack documents into token rows.",
    "pretrain": "Train a model from scratch or from existing weights.",
    "sft": "Fine-tune a model on conversations or preferences.",
    "grpo": "Train a model by reinforcement learning (GRPO).",
    "quantize": "Quantize a model to 8 and 4 bits.",
    "eval": "Evaluate models on benchmark tasks and compare them.",
    "serve": "Serve a model behind an OpenAI-compatible endpoint.",
    "plan-cluster": "Estimate compute, memory, time and cost of a training run.",
    "show": "Look at rows: documents, removed rows, tokens, conversations, samples.",
    "report": "Show the graph of outputs, where tokens are from, and uses of documents.",
    "doctor": "List outputs that code with a known defect made.",
}
# command → its subcommands. The first is the default, in the command's module; the module of any
# other is sabia.cli.<command>_<subcommand>, or the command's (IN_MODULE). An input file with such a
# name is given as ./name.
SUBCOMMANDS: dict[str, dict[str, str]] = {
    "classify": {
        "score": "Score documents and filter them (the default).",
        "train": "Train a classifier on labelled documents.",
        "threshold": "Choose thresholds of a score and calibrate it.",
        "drift": "Compare the score distributions of two runs.",
    },
    "sft": {
        "train": "Fine-tune a model on conversations or preferences (the default).",
        "teacher": "Write a model's predictions of conversations as records to distil from.",
        "merge": "Merge models, or average the checkpoints of a run.",
    },
}

# calls that compute with a model on this machine
RUN_MODELS = {
    "classify train", "rewrite", "pretrain", "sft", "sft teacher", "grpo", "quantize", "eval",
    "serve",
}  # fmt: skip
IN_MODULE = ("sft merge", "sft teacher")


def find(name: str) -> Command:
    """The command of a name, 'dedup' or 'classify train'."""
    command, _, subcommand = name.partition(" ")
    module = command.replace("-", "_")
    if subcommand and subcommand != next(iter(SUBCOMMANDS[command])):
        module += f"_{subcommand}"
    folder = command if name in IN_MODULE else module
    declared: Command = getattr(import_module(f"sabia.cli.{folder}"), module)
    return declared


def called(words: Sequence[str]) -> tuple[str, list[str]]:
    """('classify train', its arguments); ('', all words) of a line that names no command."""
    if not words or words[0] not in COMMANDS:
        return "", list(words)
    subcommands = list(SUBCOMMANDS.get(words[0], {}))
    if len(words) > 1 and words[1] in subcommands:
        first = words[1] == subcommands[0]
        return (words[0] if first else f"{words[0]} {words[1]}"), list(words[2:])
    return words[0], list(words[1:])


def all_calls() -> list[str]:
    """Every command as it is called, subcommands included."""
    return [
        f"{name} {subcommand}" if n else name
        for name in COMMANDS
        for n, subcommand in enumerate(SUBCOMMANDS.get(name, [""]))
    ]
