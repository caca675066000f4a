"""Verify a quantized directory: matrices, names of tensors, divergence, logits of a peer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage.layered_files import LayeredFiles
from sabia.core.options.quantize import QuantizeOptions
from sabia.core.recipes.calibration.rows import CalibrationRows, read_rows
from sabia.core.recipes.quantize_report import write_report
from sabia.core.shards.job import Job
from sabia.core.text.tokenize.tokenizer import load_tokenizer

PEER_TOKENS = 64
CLOSE = 1e-3  # of the largest logit: the same model


def verify(job: Job, options: QuantizeOptions) -> None:
    """Compare `--verify` with `--model`; writes rows of errors, or with --json a report, to stdout.

    Raises UsageError for directories that cannot be compared, BadData for matrices that cannot be
    decoded and, after the rows, for tensors that no module takes or that are missing.
    """
    from sabia.core.quant.hessians import batches
    from sabia.core.quant.verify import READS, verify_directory, with_transformers

    original, made = LayeredFiles(options.model), LayeredFiles(options.verify, any_names=True)
    config = made.spec.config.get("quantization_config") or {}
    method = config.get("quant_method")
    if method not in READS:
        raise UsageError(
            f"--verify: {options.verify} is no compressed-tensors directory (expected one, 4 bits "
            "of bitsandbytes, or GPT-OSS in mxfp4)"
        )
    if not job.inputs:
        options.refuse(("held_out", "length"), "only with records to compare on (INPUT)")
    read = CalibrationRows("none", [], [])
    if job.inputs:
        has_tokenizer = (Path(options.model) / "tokenizer.json").is_file()
        tokenizer = load_tokenizer(options.model) if has_tokenizer else None
        read = read_rows(job, tokenizer, options.held_out, 0, options.length)
    tokens = [row.ids for row in read.rows]
    verified = verify_directory(
        original, made, batches(tokens) if tokens else (), [row.source for row in read.rows]
    )
    report: dict[str, Any] = {
        "schema_version": 1,
        "model": options.model,
        "verified": options.verify,
        "recipe": {"name": config.get("format", method)},
        "size_before_bytes": original.size_bytes,
        "size_after_bytes": made.size_bytes,
        "unused_tensors": verified.unused,
        "missing_tensors": verified.missing,
        "layers": verified.rows,
        "divergence": verified.divergence,
    }
    for name, names in (("no module takes", verified.unused), ("is missing", verified.missing)):
        for tensor in names:
            notes.warn(f"{options.verify}: {name} {tensor}")
    if not verified.missing and not verified.unused:
        ids = np.array(tokens[0][:PEER_TOKENS] if tokens else _random_ids(made, job.seed))
        peer = with_transformers(options.verify, ids[None])
        report["transformers"] = None if peer is None else asdict(peer)
        _tell(options.verify, peer, READS[method])
        worst = max(verified.rows, key=lambda row: row["relative_error"], default=None)
        if worst is not None:
            notes.note(
                f"{len(verified.rows):,} matrices decoded; largest relative error "
                f"{worst['relative_error']:.3g} ({worst['module']}, {worst['scheme']})"
            )
    if verified.divergence is not None:
        measured = verified.divergence
        notes.note(
            f"on {measured['tokens']:,} tokens: KL mean {measured['kl_nats']:.2g}, 99 % "
            f"{measured['kl_99_nats']:.2g} nats; another top token "
            f"{1 - measured['same_top_share']:.1%}"
        )
    write_report(job, report)
    if verified.unused or verified.missing:
        raise BadData(
            f"{options.verify}: {len(verified.unused):,} tensors that no module takes, "
            f"{len(verified.missing):,} missing (expected those of its quantization_config)"
        )


def _random_ids(files: LayeredFiles, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, files.spec.vocab_size, PEER_TOKENS)


def _tell(directory: str, peer: Any, package: str) -> None:
    """Say what transformers does with the directory."""
    if peer is None:
        notes.note(f"transformers or {package} is not installed: not compared with it")
    elif peer.error:
        notes.warn(f"transformers does not load {directory}: {peer.error}")
    elif peer.difference > CLOSE or peer.unused or peer.missing:
        notes.warn(
            f"transformers loads {directory} with other values: logits differ by up to "
            f"{peer.difference:.2g} of the largest; {len(peer.unused):,} tensors unused, "
            f"{len(peer.missing):,} missing"
        )
    else:
        notes.note(
            f"transformers loads it; its logits differ by {peer.difference:.2g} of the largest"
        )
