"""Quantize: read calibration rows, round the model, write it, load it back, report the errors.

The written directory is loaded again and must contain exactly the values that were measured. Next
to the weights, quantization.json records recipe, calibration, sizes, divergence and the errors of
each matrix; a directory whose record matches model, calibration and options is not made again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest

from sabia.core import notes, units
from sabia.core.errors import UsageError
from sabia.core.generate.model_directory import model_fingerprint
from sabia.core.model.storage.layered_files import LayeredFiles
from sabia.core.notes import progress
from sabia.core.numerics.schemes import BITSANDBYTES, scheme_named
from sabia.core.options.quantize import QuantizeOptions
from sabia.core.quant import memory_bounds
from sabia.core.quant.finished import FinishedLayers
from sabia.core.quant.recipe import (
    Recipe,
    format_names,
    load_recipe,
    plan,
    stored_form,
    with_overrides,
)
from sabia.core.recipes.calibration.rows import CalibrationRows, read_rows
from sabia.core.recipes.machine.peaks import measure_peak_flops
from sabia.core.recipes.quantize_report import how_rounded, write_report
from sabia.core.recipes.report.quantized_card import FILE as CARD
from sabia.core.recipes.report.quantized_card import quantized_card
from sabia.core.shards.atomic import read_json, write_atomic, write_json
from sabia.core.shards.dry_run import planned
from sabia.core.shards.inputs import from_path, is_stream, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.lineage import run_record
from sabia.core.shards.manifest import provenance
from sabia.core.spec import ModelSpec, load_spec, parameter_count
from sabia.core.spec.families import TRAINED_FOR, read_config
from sabia.core.spec.model import check_predicts, training_flops_per_token
from sabia.core.text.tokenize.tokenizer import load_tokenizer

if TYPE_CHECKING:  # tasks and languages are loaded only with --task and --usage
    from sabia.core.recipes.calibration.usage_match import Match
    from sabia.core.recipes.quantize_proof import Suite

RECORD = "quantization.json"
FOUND_RECIPE = "recipe.toml"  # of --bits
PROCESS_BYTES = 350 << 20  # of Python and torch


def run(job: Job, options: QuantizeOptions) -> None:
    """Quantize or verify by the options; writes rows of errors, or with --json a report.

    Raises UsageError for options that do not fit, BadData for inputs that cannot be read, Failed
    where the written model is not the measured one.
    """
    if options.verify:
        from sabia.core.recipes.quantize_verify import verify

        verify(job, options)
        return
    out, model = Path(str(job.out)), model_fingerprint(options.model)
    if out.exists() and os.path.samefile(out, options.model):
        raise UsageError(f"--out: {out} is the model itself; give another directory")
    recipe = _recipe(options)
    suite = None
    if options.task:
        from sabia.core.recipes.quantize_proof import check_gate, load_suite, prove

        suite = load_suite(options)
    job = _with_inputs(job, recipe)
    if options.bits and not job.inputs:
        raise UsageError(
            "--bits: measures gradients on calibration records (expected them as INPUT)"
        )
    if not job.inputs:
        seed = () if suite else ("seed",)
        of_records = ("samples", "held_out", "length", *seed, "usage", "experts")
        options.refuse(of_records, "only with calibration records (INPUT)")
    fingerprint = _fingerprint(job, model, recipe, options)
    report = None if job.force else _matching_record(out, fingerprint)
    if job.dry_run:
        _dry_run(job, options, recipe, suite, done=bool(report))
        return
    if report:
        shutil.rmtree(_layers(out), ignore_errors=True)  # of a run that was killed at its end
        notes.note(f"{out} is already made; --force makes it again")
    else:
        report = _quantized(job, options, recipe, out, fingerprint) | {"fingerprint": fingerprint}
        if run_record.enabled():
            made = {"command": job.command, "fingerprint": fingerprint, "seed": job.seed}
            report[run_record.RUN] = run_record.of_process(made, job)
            run_record.keep_beside(str(out), report[run_record.RUN])
        write_atomic(out / CARD, quantized_card(report, out.name))
        write_json(out / RECORD, report)
        shutil.rmtree(_layers(out), ignore_errors=True)
        before, after = report["size_before_bytes"], report["size_after_bytes"]
        size = f"{units.format_bytes(before)} → {units.format_bytes(after)}"
        line = f"{size} ({report['bits_per_weight']:.2f} bits per weight)"
        if measured := report.get("divergence"):
            line += (
                f"; on {measured['tokens']:,} held-out tokens: KL mean {measured['kl_nats']:.2g}, "
                f"99 % {measured['kl_99_nats']:.2g}, largest {measured['kl_max_nats']:.2g} nats; "
                f"another top token {1 - measured['same_top_share']:.1%}; loss "
                f"{measured['loss_before_nats']:.4f} → {measured['loss_after_nats']:.4f} nats"
            )
        command = "sabia eval --model ORIGINAL --model QUANTIZED"
        if options.format == "gguf":
            command = f"llama-server -m {out / 'model.gguf'}"
        notes.note(f"{line}; loads back exactly; next: {command}")
    if suite is not None:
        report["evaluation"] = prove(job, options, suite, report, out)
        write_atomic(out / CARD, quantized_card(report, out.name))
        write_json(out / RECORD, report)
    write_report(job, report)
    if suite is not None:
        check_gate(options, report["evaluation"])


def _dry_run(
    job: Job, options: QuantizeOptions, recipe: Recipe, suite: Suite | None, done: bool
) -> None:
    """Show the plan: the calibration computes each layer twice, the comparison both models; the
    finished layers are written twice."""
    read = (options.model, *job.inputs)
    if done:
        nothing = {"cpu_seconds": 0.0, "bytes_written": 0, "basis": "nothing to do"}
        planned(job, read, keep=True, **nothing).show(job)
        return
    spec = load_spec(options.model)
    records = options.samples + options.held_out if job.inputs else 0
    n, tokens = parameter_count(spec), records * options.length
    flops = 4 * tokens * training_flops_per_token(spec, options.length, "causal") / 3
    peak = measure_peak_flops("torch", "fp32")
    quantized = [x for x in plan(stored_form(spec, recipe), recipe) if x.scheme.quantizes]
    elements = sum(math.prod(x.matrix) for x in quantized)
    written = 2 * (n - elements) + sum(x.stored_bytes for x in quantized)
    if options.bits:
        written = 2 * (n - elements) + int(options.bits * elements / 8)
        flops += 4 * min(memory_bounds.SENSITIVITY_TOKENS, tokens) * training_flops_per_token(
            spec, options.length, "causal"
        ) / 3  # fmt: skip
    if options.format == "dense":
        written = 4 * n
    figures = {"recipe": recipe.name, "parameters": f"{n:,}", "calibration tokens": tokens}
    if suite:
        from sabia.core.bench.task_files import items_of

        for task in suite.tasks:
            count = len(items_of(task, options.limit, job.seed))
            figures[f"task {task.name}"] = f"{task.kind}, {count} items; its time is not counted"
    planned(
        job,
        read,
        cpu_seconds=flops / peak,
        memory_bytes=_memory_bytes(spec, tokens),
        bytes_written=written,
        figures=figures,
        basis=f"{flops:.3g} FLOPs at {peak:.3g} FLOP/s of one device (products of the calibration "
        "alone); four copies of the largest layer in float32, Hessians, products of a batch, the "
        "states of all tokens; the recipe's formats",
    ).show(job)


def _memory_bytes(spec: ModelSpec, tokens: int) -> int:
    """An estimate, whatever the depth: see core.quant.directory."""
    layers: dict[int | None, int] = {}
    squares, rows = dict[int | None, int](), dict[int | None, int]()
    for tensor in spec.tensors():
        layers[tensor.layer] = layers.get(tensor.layer, 0) + tensor.size
        if tensor.linear and tensor.layer is not None:
            one = tensor.shape[-1] ** 2 * (tensor.shape[0] if tensor.stacked else 1)
            squares[tensor.layer] = squares.get(tensor.layer, 0) + one
            rows[tensor.layer] = rows.get(tensor.layer, 0) + tensor.shape[-2]
    hessians = min(4 * max(squares.values()), memory_bounds.HESSIAN_BYTES) if tokens else 0
    products = 4 * min(tokens, memory_bounds.BATCH_TOKENS) * max(rows.values())
    states = 2 * 4 * tokens * spec.hidden_size
    return PROCESS_BYTES + 16 * max(layers.values()) + hessians + products + states


def _recipe(options: QuantizeOptions) -> Recipe:
    """The recipe with the options' settings; UsageError where no format of it uses one."""
    trained = read_config(options.model).get(TRAINED_FOR, {}).get("precision", "")
    recipe = load_recipe(options.recipe or trained or "mixed")
    if trained and recipe.rounding != "trained":
        notes.warn(
            f"{options.model}: its training has simulated {trained}; recipe {recipe.name} rounds "
            "it otherwise (expected no --recipe)"
        )
    if options.format == "compressed-tensors" and not format_names(recipe):
        raise UsageError(
            f"recipe {recipe.name}: quantizes nothing (expected another recipe, or --format dense "
            "or gguf)"
        )
    if options.format == "gguf" and (options.bits or recipe.rounding == "trained"):
        why = "--bits" if options.bits else f"recipe {recipe.name} (rounded as in its training)"
        raise UsageError(
            f"--format: gguf has other groups than {why} (expected compressed-tensors or dense)"
        )
    schemes = [scheme_named(name) for name in format_names(recipe)]
    used_by = {
        "group_size": options.format != "gguf" and any(x.sizes_groups for x in schemes),
        "rounding": any(scheme.quantizes for scheme in schemes),
        "scale": any(scheme.searches for scheme in schemes),
    }
    unused = [name for name, used in used_by.items() if not used]
    options.refuse(unused, f"recipe {recipe.name} has no format that uses it")
    named = ("rounding", "scale", "smooth", "experts", "match")  # as the recipe names them
    changes = {name: getattr(options, name) for name in named}
    return with_overrides(recipe, group=options.group_size, container=options.format, **changes)


def _with_inputs(job: Job, recipe: Recipe) -> Job:
    """The job, reading stdin where it is a pipe or a file and no INPUT is named."""
    schemes = [scheme_named(name) for name in format_names(recipe)]
    static = any(scheme.inputs and scheme.inputs.part for scheme in schemes)
    measured = static or recipe.smooth != "none"
    if job.inputs or (recipe.rounding in ("rtn", "trained") and not measured):
        return job
    mode = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin and not sys.stdin.closed else 0
    if stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
        return replace(job, inputs=("-",))
    if recipe.rounding != "auto" or any(x.bits <= 4 and not x.bitsandbytes for x in schemes):
        notes.warn("no calibration records: weights are rounded to nearest, which reduces quality")
    return job


def _fingerprint(job: Job, model: str, recipe: Recipe, options: QuantizeOptions) -> str:
    piped = "-" in job.inputs
    sources = open_inputs(job, "document") if job.inputs and not piped else ()
    fingerprints = [source.fingerprint() for source in sources]
    sample: list[Any] = []
    if job.inputs:
        sample = [options.samples, options.held_out, options.length]
    sample += [options.bits, options.formats] if options.bits else []
    if options.usage:
        if is_stream(options.usage):
            raise UsageError(f"--usage: {options.usage} is a pipe (expected a file or directory)")
        used = from_path(options.usage, "document", "--usage")
        sample += [source.fingerprint() for source in used]
    salt = json.dumps([model, asdict(recipe), options.format, piped, *sample], default=str)
    record = provenance(replace(job, options={}), "layer_error", fingerprints, salt)
    return str(record["fingerprint"])


def _matching_record(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """The record of a directory with this fingerprint; piped calibration never matches."""
    try:
        report = read_json(out / RECORD)
    except (OSError, ValueError):
        return None
    matches = report.get("fingerprint") == fingerprint and not report.get("piped")
    return report if matches else None


def _quantized(
    job: Job, options: QuantizeOptions, recipe: Recipe, out: Path, fingerprint: str
) -> dict[str, Any]:
    # torch is loaded only when a model is quantized
    from sabia.core.parallel.build_ops import load_ops
    from sabia.core.quant import hessians
    from sabia.core.quant.directory import quantize_directory
    from sabia.core.quant.loaders import loaders

    files = LayeredFiles(options.model)
    spec = files.spec
    check_predicts(spec)
    if "quantization_config" in spec.config:
        raise UsageError(f"{options.model} is already quantized (expected the original model)")
    has_tokenizer = (Path(options.model) / "tokenizer.json").is_file()
    if recipe.container == "gguf":
        _check_gguf(options.model, spec, has_tokenizer)
    read = CalibrationRows("none", [], [])
    if job.inputs:
        tokenizer = load_tokenizer(options.model) if has_tokenizer else None
        read = read_rows(
            job, tokenizer, options.samples, options.held_out, options.length, options.usage
        )
    if options.bits:
        recipe = _found_in_budget(options, recipe, files, read, job.seed)
        fingerprint += json.dumps(asdict(recipe))
    form = stored_form(spec, recipe)
    linears = plan(form, recipe)
    if recipe.experts == "all" and not any(x.index is not None for x in linears):
        raise UsageError(f"--experts: {options.model} has no experts (expected no --experts)")
    if read.match is not None:
        _tell_match(read.match)
    finished = FinishedLayers(_layers(out), _with_rows(fingerprint, read))
    made = quantize_directory(
        files,
        out,
        recipe,
        load_ops("torch"),
        finished,
        hessians.batches([row.ids for row in read.rows]) if read.rows else (),
        hessians.batches([row.ids for row in read.held_out]) if read.held_out else (),
        [row.source for row in read.held_out],
        options.model if has_tokenizer else None,
    )
    if options.bits:
        _write_recipe(out, recipe, options)
    quantization = made.config.get("quantization_config")
    results = loaders(form, linears, quantization) if quantization else ()
    report: dict[str, Any] = {
        "schema_version": 1,
        "model": options.model,
        "recipe": asdict(recipe),
        "format": (quantization or {}).get("quant_method", options.format),
        "calibration": {
            "kind": read.kind,
            "rows": len(read.rows),
            "tokens": sum(len(row.ids) for row in read.rows),
            "held_out": len(read.held_out),
            "usage": None if read.match is None else asdict(read.match),
        },
        "size_before_bytes": files.size_bytes,
        "size_after_bytes": made.size_bytes,
        "bits_per_weight": round(8 * made.size_bytes / parameter_count(spec), 4),
        "piped": "-" in job.inputs,
        "loaders": [asdict(loader) for loader in results],
        "layers": made.rows,
    }
    if spec.tied and recipe.components.get("head", "bf16") != "bf16":
        notes.note("the head is the embedding (tied weights) and stays bf16")
    if recipe.name in BITSANDBYTES and any(x.index is not None for x in linears):
        notes.note("experts stay bf16: bitsandbytes in transformers reads no others")
    if recipe.smooth != "none":
        less = " where this lowers their error" if recipe.smooth == "awq" else ""
        notes.note(f"{recipe.smooth}: scales of channels were moved into the matrices first{less}")
    for line in how_rounded(made.rows):
        notes.note(line)
    usual = results[0] if results else None
    if usual is not None and usual.result != "loads":
        notes.warn(f"{usual.loader} {usual.result} this model: {usual.why}")
    if made.divergence is not None:
        report["divergence"] = made.divergence
    elif read.rows:
        notes.warn("the divergence is not measured: no record is held out from calibration")
    return report


def _tell_match(match: Match) -> None:
    """Say how far the calibration is from the use, and what it lacks."""
    parts = (f"{trait} {distance:.2f}" for trait, distance in match.distance.items())
    notes.note(f"calibration beside --usage, distance of distributions: {', '.join(parts)}")
    lacks: dict[str, list[str]] = {}
    for trait, value, share, own in match.missing():
        lacks.setdefault(trait, []).append(f"{value} ({share:.0%} of the use, {own:.0%} of it)")
    for trait, values in lacks.items():
        notes.warn(f"calibration lacks {trait} {', '.join(values)}; give records of this kind")


def _check_gguf(model: str, spec: ModelSpec, has_tokenizer: bool) -> None:
    from sabia.core.quant.gguf_file import check_family
    from sabia.core.quant.gguf_vocabulary import check_vocabulary

    check_family(spec)
    if has_tokenizer:
        check_vocabulary(load_tokenizer(model))
    else:
        notes.warn(f"{model} has no tokenizer.json: the GGUF file is without a tokenizer")


def _layers(out: Path) -> Path:
    """The folder of the finished layers, until the model is written."""
    return out.with_name(f"{out.name}.layers")


def _with_rows(fingerprint: str, read: CalibrationRows) -> str:
    """The fingerprint of a run on these tokens, which a pipe may give anew each time."""
    rows = [[(row.ids, row.source) for row in part] for part in (read.rows, read.held_out)]
    return str(xxh3_128_hexdigest(json.dumps([fingerprint, rows]).encode()))


def _found_in_budget(
    options: QuantizeOptions, recipe: Recipe, files: LayeredFiles, read: CalibrationRows, seed: int
) -> Recipe:
    """The recipe with formats chosen for `options.bits`, a function of model, records, recipe,
    options and seed. Raises UsageError, Infeasible."""
    # torch is loaded only when a model is quantized
    from sabia.core.parallel.build_ops import load_ops
    from sabia.core.quant import allocation, hessians, sensitivity

    assert options.bits is not None
    choices = allocation.parse_choices(options.formats)
    recipe = allocation.with_components_of(recipe, files.spec)
    blocks = allocation.units(files.spec, recipe, choices)
    allocation.allocate(blocks, options.bits)  # a budget that is too small is refused first
    of = frozenset(t.name for unit in blocks for t in unit.tensors)
    first = _first_rows([row.ids for row in read.rows])
    batches = hessians.batches(first, memory_bounds.SENSITIVITY_BATCH)
    parts = sensitivity.fisher(files.spec, files.read, of, batches, seed, load_ops("torch"))
    with progress(len(files.spec.layers) + 1, "sensitivity", "layers") as bar:
        for part in parts:
            allocation.add_losses(files.spec, blocks, part, recipe)
            bar.advance(layer=part.layer)
    chosen = allocation.allocate(blocks, options.bits)
    shares = allocation.by_format(blocks, chosen)
    expected = sum(unit.losses[choice] for unit, choice in zip(blocks, chosen, strict=True))
    notes.note(
        f"--bits {options.bits:g}: {allocation.stored_bits(blocks, chosen):.4f} stored bits per "
        f"weight of {len(blocks)} parts ("
        + ", ".join(f"{share:.0%} {name}" for name, share in sorted(shares.items()))
        + f"); expected KL {expected:.2g} nats"
    )
    return allocation.found_recipe(recipe, blocks, chosen, f"{recipe.name}-{options.bits:g}-bits")


def _write_recipe(out: Path, recipe: Recipe, options: QuantizeOptions) -> None:
    """Write the recipe that was found next to the weights; given as `--recipe`, it quantizes to the
    same bytes."""
    from sabia.core.quant.allocation import to_toml

    comment = f"Found by sabia quantize --bits {options.bits:g} --formats {options.formats}"
    write_atomic(out / FOUND_RECIPE, to_toml(recipe, comment))


def _first_rows(rows: Sequence[Any]) -> list[Any]:
    """The first rows with memory_bounds.SENSITIVITY_TOKENS tokens, one at least."""
    kept: list[Any] = []
    for row in rows:
        if kept and sum(map(len, kept)) + len(row) > memory_bounds.SENSITIVITY_TOKENS:
            break
        kept.append(row)
    return kept
