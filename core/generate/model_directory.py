"""A model directory as a local engine, and the hash that names it in caches of finished calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.file_hashes import content_hash
from sabia.core.model.storage.peft_adapters import CONFIG, load_adapter
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.ops.product import A, Array, B
from sabia.core.options.shared import NGRAM, Drafting
from sabia.core.spec import load_spec
from sabia.core.text.tokenize.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from sabia.core.generate.draft.draft import Draft
    from sabia.core.generate.engine import Engine
    from sabia.core.ops.row_adapters import RowAdapters
    from sabia.core.parallel.split_interface import SplitModel
    from sabia.core.spec import ModelSpec

NONE: Mapping[str, str] = {}


def load_draft(
    options: Drafting, engine: Engine, dtype: str = "float32", backend: str = "torch"
) -> Draft | None:
    """What proposes tokens for an engine, by the options; None if nothing does. Raises
    UsageError."""
    from sabia.core.generate.draft.draft import Draft

    if not options.draft:
        return None
    if options.draft == NGRAM:
        return Draft(options.draft_tokens)
    if not Path(options.draft).is_dir():
        raise UsageError(f"--draft: {options.draft} (expected {NGRAM}, or a model directory)")
    beside: SplitModel | None = None
    if engine.split is not None:
        from sabia.core.parallel.split_model import Beside

        beside = Beside(backend, load_spec(options.draft), engine.split)
    made = load_engine(options.draft, dtype, backend=backend, split=beside)
    draft = Draft(options.draft_tokens, made)
    draft.check(engine)
    return draft


def draft_fingerprint(options: Drafting) -> str:
    """What of the options changes which tokens are drawn; '' if nothing does."""
    if options.draft in ("", NGRAM):
        return ""
    return f"{model_fingerprint(options.draft, '--draft')} {options.draft_tokens}"


def load_engine(
    directory: str | Path,
    dtype: str = "float32",
    adapters: Mapping[str, str] = NONE,
    backend: str = "torch",
    split: SplitModel | None = None,
) -> Engine:
    """An `Engine` over the model and tokenizer of a Hugging Face directory.

    adapters: directories of LoRA adapters in the format of peft, by the name that a request gives.
    split: the devices that hold it together.
    """
    from sabia.core.generate.engine import Engine
    from sabia.core.parallel.build_ops import ops_as_served

    spec, params = load_stored(directory)
    tokenizer = load_tokenizer(directory)
    rule = _row_adapters(spec, dtype, adapters, backend, split)
    ops = ops_as_served(backend, spec, rule, split.ops if split else None)
    return Engine(spec, params, tokenizer, dtype=dtype, ops=ops, split=split)


def _row_adapters(
    spec: ModelSpec, dtype: str, directories: Mapping[str, str], backend: str,
    split: SplitModel | None,
) -> RowAdapters | None:  # fmt: skip
    """The rule of adapters by name; None without any."""
    from sabia.core.parallel.build_ops import load_ops

    if not directories:
        return None
    move, adapters = load_ops(backend).to_device, {}

    def placed(name: str, array: np.ndarray) -> Array:
        return split.to_mesh(name, array, dtype) if split else move({name: array}, dtype)[name]

    for name, directory in directories.items():
        arrays = load_adapter(directory, spec)
        absorbed = next((matrix for matrix in arrays if matrix.endswith("attn.kv_up")), None)
        if absorbed:  # decoding multiplies by it in another order
            raise UsageError(
                f"adapter: {directory} changes {absorbed} of latent attention (expected a merged "
                "model)"
            )
        adapters[name] = {
            matrix: (placed(matrix + A, a), placed(matrix + B, b))
            for matrix, (a, b) in arrays.items()
        }
    if backend == "jax":
        from sabia.core.ops.row_adapters_jax import JaxRowAdapters

        return JaxRowAdapters(adapters)
    from sabia.core.ops.row_adapters import RowAdapters

    return RowAdapters(adapters)


def model_fingerprint(directory: str | Path, option: str = "--model") -> str:
    """128-bit hash, 32 hex digits, of everything a model's output depends on: its JSON files and
    chat templates, and its weight files. Raises UsageError, which names the `option` that gave the
    path, if it is not a model directory."""
    root, digest = _root(directory, option), hashlib.blake2b(digest_size=16)
    for path in sorted([*root.glob("*.json"), *root.glob("*.jinja")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return _with_weights(digest, root)


def weights_fingerprint(directory: str | Path, option: str = "--model") -> str:
    """The same of config.json and the weights only: a trainer's starting point, whose tokenizer has
    a fingerprint of its own in the identity of a run."""
    root = _root(directory, option)
    digest = hashlib.blake2b((root / "config.json").read_bytes(), digest_size=16)
    return _with_weights(digest, root)


def adapter_fingerprint(directory: str | Path) -> str:
    """The same of a LoRA adapter in the format of peft."""
    root = Path(directory)
    if not (root / CONFIG).is_file():
        raise UsageError(f"--adapter: {directory}: not an adapter (expected {CONFIG} in it)")
    return _with_weights(hashlib.blake2b((root / CONFIG).read_bytes(), digest_size=16), root)


def _root(directory: str | Path, option: str) -> Path:
    root = Path(directory)
    if not (root / "config.json").is_file():
        raise UsageError(
            f"{option}: {directory}: not a model directory (expected config.json in it)"
        )
    return root


def _with_weights(digest: hashlib.blake2b, root: Path) -> str:
    """The digest, after names and contents of the weight files."""
    for path in sorted(root.glob("*.safetensors")):
        digest.update(f"{path.name} {content_hash(str(path))}".encode())
    return digest.hexdigest()
