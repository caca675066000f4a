"""Every field of every family: its effect is that in transformers, or a change of it is refused.

The fields are those that the family reads, those of transformers' configuration and those of the
file, at every depth. Each is set to other values of its type. A change that gives another model is
computed by transformers too; changes that give the same model are applied together, and
transformers must then compute the same as without them. Null is what it is in transformers, where
that computes with it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import ModelSpec, from_config
from sabia.core.spec.fields import Fields

from .conftest import CONFIGS, perturbed
from .test_modernbert import BIASED
from .test_modernbert import CONFIG as MODERNBERT
from .test_transformers import relative

transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
torch = pytest.importorskip("torch", reason="transformers needs torch")

IDS = np.random.default_rng(7).integers(0, 200, (2, 33))
FAMILIES = CONFIGS | {"modernbert": MODERNBERT, "modernbert-biased": MODERNBERT | BIASED}
# other configurations of families that are there already
SECOND = {"llama3", "llama-bias", "qwen3", "deepseek-plain", "modernbert-biased"}
# what transformers returns, or which class it builds, not what the model computes
OUTPUTS = {"return_dict", "output_attentions", "output_hidden_states", "torchscript"}
OUTPUTS |= {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version"}
EXAMPLES: dict[type, Any] = {bool: True, int: 3, float: 0.7, str: "gelu", list: [], dict: {}}


def alternatives(value: Any) -> list[Any]:
    """Other values of the type of `value`, some of them impossible."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, 0, -1]
    if isinstance(value, float):
        return [value * 1.7 + 0.01, 0.0, -1.0]
    if isinstance(value, str):
        return ["gelu", "gelu_pytorch_tanh", "silu", "relu", "default", "linear"]
    return [value[::-1]] if isinstance(value, list) else []


def changes(values: dict[str, Any], read: dict[str, type]) -> Iterator[tuple[str, Any]]:
    """(field, other value) of the fields of `values`, and of those in `read` that it lacks."""
    for name in sorted({*values, *read} - OUTPUTS):
        value = values.get(name)
        if value is None:
            value = EXAMPLES.get(read.get(name, dict))
            yield name, value
        if isinstance(value, dict):
            yield from ((name, value | {key: new}) for key, new in changes(value, {}))
        if read and values.get(name) is not None:
            yield name, None  # as if the file did not have it, or what the family makes of null
        yield from ((name, new) for new in alternatives(value))


def read_by_family(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """The names that the family's reader asks for, each with its type."""
    read: dict[str, type] = {}

    def take(self: Fields, name: str, kind: type, *default: Any) -> Any:
        read[name] = kind
        return original_take(self, name, kind, *default)

    def expect(self: Fields, name: str, allowed: Any, default: Any) -> Any:
        read[name] = type(default)
        return original_expect(self, name, allowed, default)

    original_take, original_expect = Fields.take, Fields.expect
    with monkeypatch.context() as patch:
        patch.setattr(Fields, "take", take)
        patch.setattr(Fields, "expect", expect)
        from_config(config)
    return read


def our_logits(spec: ModelSpec, arrays: dict[str, np.ndarray]) -> np.ndarray:
    ops = load_ops("torch")
    params = ops.to_device(arrays, "float32")
    return forward.logits(spec, params, forward.hidden(spec, params, IDS, ops), ops).numpy()


def their_logits(
    config: dict[str, Any], spec: ModelSpec, arrays: dict[str, np.ndarray], directory: Path
) -> np.ndarray | None:
    """Logits of transformers for the files as they are; None: it refuses the configuration."""
    hub.write_checkpoint(directory, config, hub.to_hf(spec, arrays))
    kind = transformers.AutoModelForCausalLM if spec.causal else transformers.AutoModelForMaskedLM
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        model, report = kind.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, **implementations
        )
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(IDS)).logits.numpy()
    except Exception as error:
        if "alidation" in type(error).__name__ or None in config.values():
            return None
        raise
    wrong = {key: report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    return logits


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SECOND)) for name in FAMILIES],
)
def test_every_field_has_its_effect_or_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {name: value for name, value in FAMILIES[family].items() if value is not None}
    base, same, compared, refused = from_config(config), dict[str, Any](), 0, 0
    theirs = transformers.AutoConfig.for_model(**config).to_dict()
    read = read_by_family(config, monkeypatch)
    for name, value in changes(theirs | config, read):
        changed, what = config | {name: value}, f"{name}={value!r}"
        try:
            spec = from_config(changed)
        except UsageError as error:
            assert "expected" in str(error) and "\n" not in str(error), what
            refused += 1
            continue
        if spec == base and value is not None:
            together = config | same | {name: value}
            if value != -1 and _accepted(changed) and _same_model(together, base):
                same[name] = value
            continue
        arrays = perturbed(spec)
        logits = their_logits(changed, spec, arrays, tmp_path / f"{compared}")
        if logits is not None:
            assert relative(our_logits(spec, arrays), logits) <= 4e-6, what
            compared += 1
    assert compared >= 12 and refused >= 20 and len(same) >= 10
    arrays = perturbed(base)
    logits = their_logits(config | same, base, arrays, tmp_path / "same")
    assert logits is not None
    assert relative(our_logits(base, arrays), logits) <= 4e-6, same


def _same_model(config: dict[str, Any], spec: ModelSpec) -> bool:
    """Whether the fields, each of which alone changes nothing, change nothing together."""
    try:
        return from_config(config) == spec
    except UsageError:
        return False


def _accepted(config: dict[str, Any]) -> bool:
    """Whether transformers reads the configuration."""
    try:
        transformers.AutoConfig.for_model(**config)
    except Exception:
        return False
    return True
