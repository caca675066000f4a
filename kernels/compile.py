"""Fill the cache of compiled text kernels: `python -m sabia.kernels.compile [KERNEL …]`.

Set-up scripts run it, so that no later run has to compile (runtime.first_runs says what runs do
where the cache is empty). Each kernel is called on a small example with the types that the commands
use, in a process of its own, as many at a time as there are processor cores.
"""

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from sabia.kernels.bpe.definitions import PREPEND_FIRST, Alphabet, Cache, Splitting, Tables
from sabia.kernels.fasttext import definitions
from sabia.kernels.language.definitions import Table
from sabia.kernels.minhash.definitions import SketchConfig
from sabia.kernels.runtime import cache_folder
from sabia.kernels.runtime.dispatch import KERNELS
from sabia.kernels.runtime.first_runs import end_with_stdin
from sabia.kernels.text.unicode_classes import class_table

_TEXT = b"One two, three.\nThe four. " * 9
_DATA = np.frombuffer(_TEXT, np.uint8)
_OFFSETS = np.array([0, 90, len(_TEXT)])
_N = "numba"


def _bpe(kernel: Any) -> None:
    ids = np.full(256, -1, np.int32)
    ids[:128] = np.arange(128)
    merges = np.array([[84, 104]])
    tries = (kernel.make_trie([(b"<a>", 130)]), kernel.make_trie([]))
    alphabet = Alphabet(ids, joins=kernel.join_bits(merges))
    pairs = kernel.pair_table(merges, np.array([129]))
    words = kernel.word_table({b"The": 131})
    tables = Tables(
        alphabet, pairs, Splitting(0, prepend=PREPEND_FIRST), class_table(), words, tries
    )
    data, offsets = kernel.padded(_DATA, _OFFSETS)
    kernel.document_flags(data, offsets, tables.classes)
    kernel.encode(data, offsets, tables, Cache())


def _fasttext(kernel: Any) -> None:
    from sabia.kernels.fasttext.numba_impl import fold_subwords

    i32, f32 = np.int32, np.float32
    vocabulary = definitions.Vocabulary(_DATA, np.array([0, 3, 6]), 1, np.zeros((4, 2), np.uint64))
    grams = definitions.Grams(2, 3, 4, 8, False, np.zeros(0, i32))
    rows = definitions.Rows(np.zeros((9, 4), f32), np.ones(1, i32), np.zeros((0, 1), np.uint8),
                            np.zeros((1, 256, 4), f32), np.zeros(0, f32))  # fmt: skip
    head = definitions.Head(definitions.SOFTMAX, 1, np.zeros((4, 1), f32), np.zeros(0, i32),
                            np.zeros(0, i32), definitions.sigmoid_table())  # fmt: skip
    model = definitions.Classifier(vocabulary, grams, rows, head)
    fold_subwords(model)
    kernel.score(_DATA, _OFFSETS, model, _N)


def _language(kernel: Any) -> None:
    table = Table(np.arange(1, 3, dtype=np.uint32), np.zeros((2, 3), np.int8),
                  np.zeros(2, np.uint64), np.ones(128, np.uint8))  # fmt: skip
    kernel.score(_DATA, _OFFSETS, table, _N)


def _minhash(kernel: Any) -> None:
    sketches = kernel.sketch(_DATA, _OFFSETS, SketchConfig(), _N)
    kernel.signatures(_DATA, _OFFSETS, SketchConfig(), _N)
    starts = np.concatenate(([0], np.cumsum(sketches.counts)))
    kernel.jaccard(sketches.shingles, starts, np.array([[0, 1]]), _N)
    nothing = np.zeros(0, np.int64)
    kernel.gather(0, nothing, nothing, np.zeros(0, np.uint32), _N)


def _quality(kernel: Any) -> None:
    stops = np.zeros(1, np.uint64), np.array([0, 1])
    kernel.measure(_DATA, _OFFSETS, stops, np.zeros(2, np.int64), _N)


def _substring(kernel: Any) -> None:
    for units in (_DATA, _DATA.astype(np.int32)):
        records = kernel.file_windows(units, _OFFSETS, 12, _N)
        records.sort(order=["value", "start"])
        starts = np.array([0, len(records)])
        kernel.find_repeats(units, records, starts, 12, engine=_N)


def _word_spans(kernel: Any) -> None:
    words = kernel.word_spans(_DATA, _OFFSETS, _N)
    hashes = kernel.ngram_hashes(words, 3, _N)
    kernel.Lookup(np.unique(hashes), _N).find(hashes)
    kernel.align(words.hash, np.ones(len(words.hash)), words.hash, _N)


def _row_products(kernel: Any) -> None:
    one = np.zeros((1, 1, 1, 1), np.float32)
    for dtype in (np.float32, np.uint16):
        numbers = np.zeros((1, 1, 1, 1), dtype)
        kernel.matrix_vector(numbers[0, 0], one[0, 0, 0], one[0, 0, 0], _N)
        none = np.zeros((1, 1), np.int64)
        kernel.scores(one, numbers, none[0], one, _N)
        kernel.weighted_sums(one, numbers, none[0], one, _N)
        kernel.attention(one, numbers, numbers, none, none, one, one[0], _N)


def _row_functions(kernel: Any) -> None:
    plain, cos = np.zeros((1, 2), np.float32), np.zeros((1, 1, 1, 2), np.float32)
    one = plain[0, :1]
    for dtype in (np.float32, np.uint16):
        x = np.zeros((1, 2), dtype)
        kernel.rms_norm(x, plain[0], 1e-6, x, one, _N)
        kernel.rms_norm_gradient(x, x, plain[0], one, x, plain[0], _N)
        kernel.silu_product(x[0], x[0], x[0], _N)
        kernel.silu_product_gradient(x[0], x[0], x[0], x[0], x[0], _N)
        kernel.rotate(x[None, None], cos, cos, 1.0, x[None, None], _N)
        kernel.log_sums(x, 0.0, one, _N)
        kernel.softmax_gradient(x, np.zeros(1, np.int64), 0.0, one, _N)
    made = np.zeros(cos.shape, np.uint16)
    given = cos, cos, cos[0], made, made, cos[0], 0, True, 1.0, made, made
    kernel.attention_gradient(*given, _N)
    kernel.attention_weights(cos, cos[0], 0, True, 1.0, made, cos[0], _N)


def _decoder_layer(kernel: Any) -> None:
    none, zero = np.zeros((1, 0), np.float32), np.zeros(1, np.int64)
    q = np.zeros((1, 1, 1, 1), np.float32)
    wide, narrow = np.zeros(0, np.float32), np.zeros(0, np.uint16)
    for norm, dtype in ((wide, np.float32), (narrow, np.uint16), (wide, np.uint16)):
        x, made, cache = (np.zeros(shape, dtype) for shape in ((1, 1), (1, 3), (1, 1, 1, 1)))
        cached = kernel.Cached(cache, cache, zero, zero, zero)
        factors = 1e-6, 0.0, 0.0, 1.0, 1.0
        weights = kernel.LayerWeights((x,) * 8, (x[0, :0],) * 8, (norm,) * 6, factors)
        kernel.decoder_layer(x, weights, none, none, cached, _N)
        kernel.normed(x, norm, 0.0, 1e-6, x, _N)
        kernel.added(x, x, norm, 0.0, 1e-6, 1.0, _N)
        kernel.gated(made[:, :2].copy(), x, _N)
        kernel.heads(made, (norm, norm), (0.0, 1e-6, 1.0), none, none, cached, q, _N)
        kernel.attend(q, cached, zero, q, q, _N)


def _panel_products(kernel: Any) -> None:
    x, out = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
    for dtype in (np.float32, np.uint16):
        weight = np.zeros((1, 1), dtype)
        panels = kernel.panels_for(weight, 1)
        kernel.fill(panels, weight, 0, _N)
        kernel.product(x, panels, out, _N)


def _html(kernel: Any) -> None:
    kernel.warm_up()


# kernel → a call of each of its functions, given its interface
EXAMPLES: Mapping[str, Callable[[Any], None]] = {
    "quality": _quality,
    "bpe": _bpe,
    "html": _html,
    "minhash": _minhash,
    "substring": _substring,
    "fasttext": _fasttext,
    "language": _language,
    "word_spans": _word_spans,
    "row_products": _row_products,
    "row_functions": _row_functions,
    "decoder_layer": _decoder_layer,
    "panel_products": _panel_products,
}


def compile_here(kernel: str) -> None:
    """Compile a kernel in this process; a line on stdout for each function."""

    def compiling(_function: str) -> None:
        print(kernel, flush=True)

    cache_folder.compile_listeners.append(compiling)
    try:
        EXAMPLES[kernel](KERNELS[kernel].module("interface"))
    finally:
        cache_folder.compile_listeners.remove(compiling)


def compile_all(kernels: Sequence[str], jobs: int) -> int:
    """Compile kernels in `jobs` processes at a time, with progress on stderr; how many functions
    were compiled. Raises CalledProcessError with a process's stderr where one fails."""
    total = sum(cache_folder.FUNCTIONS[kernel] for kernel in kernels)
    counts, started = dict.fromkeys(kernels, 0), time.monotonic()
    expected, lock = total, threading.Lock()

    def compile_one(kernel: str) -> None:
        nonlocal expected
        words = [sys.executable, "-P", "-m", "sabia.kernels.compile", "--here", kernel]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout and process.stderr
            for _ in process.stdout:
                with lock:
                    counts[kernel] += 1
                    _show(sum(counts.values()), expected, time.monotonic() - started)
            errors = process.stderr.read()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words, stderr=errors)
        with lock:  # functions that other kernels use too may have been there
            expected -= cache_folder.FUNCTIONS[kernel] - counts[kernel]

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, kernels))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return sum(counts.values())


def _show(done: int, total: int, seconds: float) -> None:
    if sys.stderr.isatty():
        share = cache_folder.compiled_share(done, total, seconds)
        line = f"compiling kernels, once per machine: {share}"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    summary, _, description = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m sabia.kernels.compile", description=f"{summary}\n\n{description}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names = ", ".join(EXAMPLES)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"of {names} (default: all)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--jobs", type=int, default=cores or 1, help="processes (default: cores)")
    for hidden in ("--here", "--until-stdin-ends"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    kernels = options.kernels or list(EXAMPLES)
    unknown = [kernel for kernel in kernels if kernel not in EXAMPLES]
    if unknown or options.jobs < 1:
        parser.error(
            f"kernel {unknown[0]!r} (expected {names})" if unknown
            else f"--jobs: {options.jobs} (expected 1 or more)"
        )  # fmt: skip
    if options.until_stdin_ends:
        end_with_stdin()
    if options.here or options.until_stdin_ends:
        for kernel in kernels:
            compile_here(kernel)
        return 0
    started = time.monotonic()
    try:
        count = compile_all(kernels, options.jobs)
    except subprocess.CalledProcessError as error:
        print(error.stderr, end="", file=sys.stderr)
        print(f"compiling failed: {shlex.join(error.cmd)}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    state = (
        f"{count} functions compiled in {seconds:.0f} s" if count else "all were compiled before"
    )
    print(f"kernels: {state}; cache: {cache_folder.compiled_folder()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
