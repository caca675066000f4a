"""Generates with models that several devices hold, and says how far they are from one device.

usage: split_engine.py BACKEND KIND[+FORMAT]… [RANK STORE]
FORMAT: of stored weights, which the devices keep their parts of.
torch: two gloo processes, RANK and its twin; JAX: two virtual devices. The first process prints
JSON: KIND/CASE → [whether the tokens are the same, largest difference of a log-probability, tokens
of a draft that were kept]. Drafts of the second process have other weights than those of the first,
as if rounding had led them elsewhere.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import mesh_cases
import numpy as np

from sabia.core.bench.loglikelihood import Row, Scorer
from sabia.core.generate.engine import Engine
from sabia.core.generate.model_directory import load_draft, load_engine
from sabia.core.generate.requests import Ended, Request
from sabia.core.model.lora import LoraConfig, lora_tensors
from sabia.core.model.storage import hub
from sabia.core.model.storage.peft_adapters import save_adapter
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.options.shared import Drafting
from sabia.core.parallel.build_ops import load_ops
from sabia.core.parallel.mesh import Mesh
from sabia.core.parallel.split_interface import SplitModel
from sabia.core.parallel.split_model import split_model
from sabia.core.parallel.world import World
from sabia.core.quant.export import export
from sabia.core.quant.hessians import batches
from sabia.core.quant.quantize import quantize
from sabia.core.quant.recipe import load_recipe
from sabia.core.serve.followers import served_session
from sabia.core.spec import from_config, load_spec
from sabia.core.text.tokenize.tokenizer_training import train_bpe

# the first of matrices that have files of their own in all kinds, the other of split inputs
Sample = tuple[list, list[float]]  # its tokens, perhaps with their versions; log-probabilities
MATRICES = ("attention", "mlp", "expert")
# whose parts are whole groups of 128
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
WIDE |= {"intermediate_size": 256}
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
    """A random model with its adapters, two drafts that resemble it, and another version of it."""
    tokenizer = train_bpe(["the quick brown fox"] * 4, 290)
    tokenizer.save(root / "t")
    kind, _, form = kind.partition("+")
    config = {**mesh_cases.model(kind)[0].config, "vocab_size": tokenizer.vocab_size}
    spec = from_config(config | WIDE if form else config)
    draw, scale = np.random.default_rng(0), 1.2 / spec.hidden_size**0.5

    def random(tensors: object, scale: float) -> dict[str, np.ndarray]:
        return {t.name: (draw.standard_normal(t.shape) * scale).astype(np.float32)
                for t in tensors}  # fmt: skip

    params, other = random(spec.tensors(), scale), random(spec.tensors(), scale)
    for name, arrays in {"m": params, "next": other}.items():
        if form:
            asked = replace(
                load_recipe(form), components=dict.fromkeys(MATRICES, form), rounding="rtn",
                scale="absmax",
            )  # fmt: skip
            rows = [draw.integers(0, spec.vocab_size, 20).tolist() for _ in range(8)]
            made = quantize(spec, arrays, asked, load_ops("torch"), batches(rows))
            export(root / name, made, root / "t")
        else:
            hub.save_model(root / name, spec, arrays, tokenizer_from=root / "t")
    for name, lora in LORA.items():
        save_adapter(root / name, spec, random(lora_tensors(spec, lora), 0.1), lora)
    for rank in (0, 1):
        near = {n: x + draw.standard_normal(x.shape).astype(np.float32) * 0.02 * (1 + 9 * rank)
                for n, x in params.items()}  # fmt: skip
        hub.save_model(root / f"draft{rank}", spec, near, tokenizer_from=root / "t")


def updated(engine: Engine, directory: Path) -> list[Sample]:
    """The samples of a server that replaces its weights while they are decoded."""
    session, done = served_session(engine, 8, 64), list[Ended]()
    params = engine.placed(load_stored(directory)[1])
    for request in requests():
        session.add(request)
    with session.runner.computing():
        for step in count():
            if step == 2:
                session.replace(params, 1)
            done += session.step()
            if not session.busy:
                break
    done.sort(key=lambda one: (one.ticket, one.completion.sample))
    assert {version for one in done for version in one.versions} == {0, 1}
    return [
        ([*zip(one.completion.tokens, one.versions, strict=True)], one.completion.raw_logprobs)
        for one in done
    ]


def cases(
    root: Path, backend: str, rank: int, split: SplitModel | None
) -> Iterator[tuple[str, list[Sample], int]]:
    """The samples of each case, and how many tokens of a draft were kept."""
    adapters = {name: str(root / name) for name in LORA}
    engine = load_engine(root / "m", adapters=adapters, backend=backend, split=split)

    def generated() -> list[Sample]:
        return [(one.tokens, one.raw_logprobs) for one in engine.generate(requests())]

    yield "adapters", generated(), 0
    for case, name in (("ngram", "ngram"), ("draft", str(root / f"draft{rank}"))):
        options = Drafting(draft=name, draft_tokens=3)
        engine.draft = load_draft(options, engine, backend=backend)
        before = engine.counts.accepted
        yield case, generated(), engine.counts.accepted - before
    yield "update", updated(engine, root / "next"), 0
    scorer = Scorer(*load_stored(root / "m"), backend, split=split)
    rows = [[Row((5, 9, 40, n, 7, 11 + n), 3)] for n in range(4)]
    yield "scores", [([], [float(one[0]) for one in scorer.score(rows)])], 0


def compared(backend: str, kind: str, world: World) -> dict[str, list]:
    """The cases of one kind of model."""
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        stored(kind, root := Path(folder))
        split = split_model(backend, load_spec(root / "m"), Mesh(tensor=2), world)
        pairs = zip(cases(root, backend, world.rank, split), cases(root, backend, 0, None),
                    strict=True)  # fmt: skip
        for (case, ours, kept), (_, theirs, _) in pairs:
            same = [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
            gap = max(np.abs(np.subtract(a, b)).max() if len(a) == len(b) else np.inf
                      for (_, a), (_, b) in zip(ours, theirs, strict=True))  # fmt: skip
            report[f"{kind}/{case}"] = [same, float(gap), kept]
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
