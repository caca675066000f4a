"""Generates with models that several devices hold, and says how far they are from one device.

usage: split_engine.py BACKEND KIND… [RANK STORE]
torch: two gloo processes, RANK and its twin; JAX: two virtual devices. The first process prints
JSON: KIND/CASE → [whether the tokens are the same, largest difference of a log-probability, tokens
of a draft that were kept]. Drafts of the second process have other weights than those of the first,
as if rounding had led them elsewhere.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mesh_cases
import numpy as np

from sabia.core.generate.engine import Engine
from sabia.core.generate.model_directory import load_draft, load_engine
from sabia.core.generate.requests import Request
from sabia.core.model.lora import LoraConfig, lora_tensors
from sabia.core.model.storage import hub
from sabia.core.model.storage.peft_adapters import save_adapter
from sabia.core.options.shared import Drafting
from sabia.core.parallel.mesh import Mesh
from sabia.core.parallel.split_model import SplitModel, split_model
from sabia.core.parallel.world import World
from sabia.core.spec import from_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

# the first of matrices that have files of their own in all kinds, the other of split inputs
LORA = {"many": LoraConfig(4, 8.0, r"mlp|delta\.o|attn\.[kvo]"), "out": LoraConfig(5, 3.0, r"\.o$")}


def requests() -> list[Request]:
    """Of several lengths, with and without an adapter, greedy and drawn."""
    names = ["many", "", "out", "many", ""]
    return [
        Request([3 + n, 9, 40, 3 + n, 9, 40][: 2 + n], 8 + 2 * n, seed=n, n=1 + n % 2, id=str(n),
                stop_ids=(), adapter=name, temperature=n % 2)
        for n, name in enumerate(names)
    ]  # fmt: skip


def stored(kind: str, root: Path) -> None:
    """A random model with its adapters, and two drafts that resemble it."""
    tokenizer = train_bpe(["the quick brown fox"] * 4, 290)
    tokenizer.save(root / "t")
    spec = from_config({**mesh_cases.model(kind)[0].config, "vocab_size": tokenizer.vocab_size})
    draw = np.random.default_rng(0)

    def random(tensors: object, scale: float) -> dict[str, np.ndarray]:
        return {t.name: (draw.standard_normal(t.shape) * scale).astype(np.float32)
                for t in tensors}  # fmt: skip

    params = random(spec.tensors(), 0.2)
    hub.save_model(root / "m", spec, params, tokenizer_from=root / "t")
    for name, lora in LORA.items():
        save_adapter(root / name, spec, random(lora_tensors(spec, lora), 0.1), lora)
    for rank in (0, 1):
        near = {n: x + draw.standard_normal(x.shape).astype(np.float32) * 0.02 * (1 + 9 * rank)
                for n, x in params.items()}  # fmt: skip
        hub.save_model(root / f"draft{rank}", spec, near, tokenizer_from=root / "t")


def cases(
    root: Path, backend: str, rank: int, split: SplitModel | None
) -> Iterator[tuple[str, Engine]]:
    """One engine after the other."""
    adapters = {name: str(root / name) for name in LORA}
    engine = load_engine(root / "m", adapters=adapters, backend=backend, split=split)
    yield "adapters", engine
    for case, name in (("ngram", "ngram"), ("draft", str(root / f"draft{rank}"))):
        options = Drafting(draft=name, draft_tokens=3)
        engine.draft = load_draft(options, engine, backend=backend)
        yield case, engine


def compared(backend: str, kind: str, world: World) -> dict[str, list]:
    """The cases of one kind of model."""
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        stored(kind, root := Path(folder))
        spec = hub.load_model(root / "m")[0]
        split = split_model(backend, spec, Mesh(tensor=2), world)
        whole = cases(root, backend, 0, None)
        for case, engine in cases(root, backend, world.rank, split):
            ours, (_, one) = engine.generate(requests()), next(whole)
            theirs = one.generate(requests())
            gap = max(np.abs(np.subtract(a.raw_logprobs, b.raw_logprobs)).max()
                      for a, b in zip(ours, theirs, strict=True))  # fmt: skip
            same = [a.tokens for a in ours] == [b.tokens for b in theirs]
            report[f"{kind}/{case}"] = [same, float(gap), engine.counts.accepted]
    return report


def main(backend: str, *words: str) -> None:
    """Compare, in this process and perhaps its twin."""
    kinds, world = words, World()
    if backend == "torch":
        import torch

        *kinds, rank, store = words
        world = World(int(rank), 2, int(rank))
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=world.rank, world_size=2
        )
    else:
        import jax

        jax.config.update("jax_num_cpu_devices", 2)
    report = {}
    for kind in kinds:
        report |= compared(backend, kind, world)
    if world.leads:
        print(json.dumps(report))
    if backend == "torch":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
