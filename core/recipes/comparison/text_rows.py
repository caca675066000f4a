"""Documents in place of token rows, as candidates or held-out set of a comparison.

Their text is tokenized beside the runs, as `sabia tokenize --tokenizer DIR --length N` does it, and
not again while documents, tokenizer and length are the same.
"""

from dataclasses import replace
from pathlib import Path

from sabia.core.errors import UsageError
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.options.tokenize import TokenizeOptions
from sabia.core.recipes.comparison.candidates import names_of
from sabia.core.recipes.model_source import find_tokenizer
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.spec import load_spec, parse_shape
from sabia.core.text.tokenize import stage

ROW_LENGTH = 2048  # tokens, where the model's context is not shorter


def with_rows(job: Job, options: PretrainOptions, folder: Path) -> tuple[Job, PretrainOptions]:
    """The job and the options with token rows, made in a folder, in place of documents.

    Raises UsageError where no tokenizer is known, and what `sabia tokenize` raises.
    """
    held = [options.validation] if options.validation else []
    given = {
        **{path: folder / "tokens" / name
           for path, name in zip(job.inputs, names_of(job.inputs), strict=True)},
        **dict.fromkeys(held, folder / "held-out"),
    }  # fmt: skip
    sources = {path: from_path(path, "tokens", "--validation" if path in held else "")
               for path in given if path != "-"}  # fmt: skip
    texts = [path for path, of_path in sources.items() if all(map(_has_text, of_path))]
    if not texts:
        return job, options
    rows = [one for path, of_path in sources.items() if path not in texts for one in of_path]
    tokenizer = find_tokenizer(options.tokenizer, options.model, rows)
    if not tokenizer:
        raise UsageError(f"--tokenizer: is missing (expected that of the text of {texts[0]})")
    tokenize = TokenizeOptions(tokenizer=tokenizer, length=_row_length(options))
    for path in texts:
        out = str(given[path])
        stage.run(Job("tokenize", (path,), out, jobs=job.jobs, force=job.force), tokenize)
    made = {path: str(given[path]) if path in texts else path for path in given}
    inputs = tuple(made[path] for path in job.inputs)
    return replace(job, inputs=inputs), options.replace(validation="".join(made[p] for p in held))


def _row_length(options: PretrainOptions) -> int:
    if options.shape:
        context = parse_shape(options.shape).get("context", ROW_LENGTH)
    else:
        known = load_spec(options.config_json or options.model).max_positions
        context = options.context or known
    return min(int(context), ROW_LENGTH)


def _has_text(source: Source) -> bool:
    """Whether its first rows are documents, not token rows."""
    with source.reading():
        if source.form != "jsonl":
            return "input_ids" not in source.stored_schema().names
        first = next(replace(source, kind="document").raw(), None)
    return first is not None and "input_ids" not in first.schema.names
