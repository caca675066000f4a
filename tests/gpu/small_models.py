"""Small models of every family for the GPU run: configurations, batches, training on the CPU."""

from collections.abc import Iterator, Mapping
from typing import Any

import mesh_cases
import numpy as np

from sabia.core.model.init import init_params
from sabia.core.spec import ModelSpec, from_config, new_config
from sabia.core.train.optimizer.config import COUNT
from sabia.core.train.stepper import Stepper
from sabia.core.train.stepper_factory import make_stepper

LEARNING_RATE = 3e-3
LOW_PRECISIONS = ("fp8", "fp8-block", "nvfp4")
LOW_PRECISION_MODELS = ("llama", "qwen3_moe")  # of four layers: nvfp4 rounds none of the first two
MOE = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
FAMILIES = ("llama", "qwen3", "mistral", "olmo2", "gemma2", "gemma3", "mixtral", "qwen3_moe",
            "deepseek_v3", "gpt_oss", "qwen3_5", "qwen3_next", "modernbert")  # fmt: skip
DEEP = (*LOW_PRECISION_MODELS, "qwen3_5", "qwen3_next")  # every fourth layer of a hybrid attends
WIDE_HEADS = ("qwen3", "gemma2", "gemma3", "gpt_oss")


def config(name: str, tiny: bool) -> dict[str, Any]:
    """The config.json of a model of the family; heads of 64 or 128, or of 8 if tiny."""
    head, width = (8, 32) if tiny else (128 if name in WIDE_HEADS else 64, 256)
    shape: dict[str, Any] = {"hidden": width, "layers": 4 if name in DEEP else 2, "head_dim": head}
    shape |= {"heads": 4, "kv_heads": 2, "ffn": 48 if tiny else 384, "tied": name == "gemma3"}
    shape |= {"vocab": 131 if tiny else 515, "context": 64 if tiny else 512}
    window = 7 if tiny else 70
    if name == "modernbert":
        return _encoder(shape, window)
    if name in MOE:
        shape |= {"experts": 8, "chosen": 2, "expert_ffn": 16 if tiny else 128}
    if name == "deepseek_v3":
        del shape["kv_heads"]
        groups = {"n_group": 2, "topk_group": 1, "q_lora_rank": width // 2}
        return new_config(name, **shape) | groups
    if name == "gpt_oss":
        sinks = {"model_type": name, "architectures": ["GptOssForCausalLM"]}
        sinks |= {"attention_bias": True, "swiglu_limit": 0.5, "sliding_window": window}
        return new_config("mixtral", **shape) | sinks
    made = new_config(name, **shape)
    return made | {"sliding_window": window} if "sliding_window" in made else made


def _encoder(shape: Mapping[str, Any], window: int) -> dict[str, Any]:
    """A ModernBERT classifier; its heads have width / heads elements."""
    small = mesh_cases.ENCODER | mesh_cases.LABELS
    sizes = {
        "vocab_size": shape["vocab"],
        "hidden_size": shape["hidden"],
        "local_attention": window,
    }
    sizes |= {"intermediate_size": shape["ffn"], "num_attention_heads": shape["heads"]}
    return small | sizes | {"max_position_embeddings": shape["context"]}


def model(name: str, tiny: bool) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """(spec, initial parameters) of a family."""
    spec = from_config(config(name, tiny))
    params = init_params(spec, 3)
    for key in params:  # as in mesh_cases: states that fade fast have uncertain gradients
        if key.endswith("a_log"):
            params[key] = np.linspace(-1.2, 0, params[key].size, dtype=np.float32)
    return spec, params


def batch(spec: ModelSpec, step: int, tiny: bool) -> dict[str, np.ndarray]:
    """Packed rows with padding (a document a row for a classifier)."""
    rows, length = (2, 24) if tiny else (4, 264)
    return mesh_cases.batch(spec, step, rows, length)


def stepper_of(
    name: str, tiny: bool, precision: str = "fp32", compiled: bool = False
) -> tuple[Stepper, ModelSpec]:
    """A stepper at the initial parameters."""
    spec, params = model(name, tiny)
    loss, options = mesh_cases.loss(spec), {"precision": precision, "compiled": compiled}
    return make_stepper("torch", spec, params, loss, **options), spec


def load_params(stepper: Stepper, params: Mapping[str, np.ndarray]) -> None:
    """Set the parameters, with an optimizer state of zeros."""

    def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        part, _, tensor = name.partition("/")
        return params[tensor] if part == "param" else np.zeros(shape, np.float32)

    assert COUNT not in params
    stepper.load(read)


def curve(stepper: Stepper, spec: ModelSpec, steps: int, tiny: bool) -> Iterator[float]:
    """The loss of each training step, as it is made."""
    for number in range(steps):
        yield stepper.step(batch(spec, number, tiny), LEARNING_RATE, number=number).loss


def points(steps: int) -> tuple[int, int, int]:
    """The steps at which a run is compared."""
    return 0, steps // 2, steps


def reference(name: str, tiny: bool, steps: int) -> dict[str, np.ndarray]:
    """What a model's training in fp32 gives here, for cpu_process.

    `curve`, the losses; and after 0, half and all steps the parameters, and the losses and
    gradients of the next batch in fp32 and in the model's low precisions.
    """
    stepper, spec = stepper_of(name, tiny)
    losses, arrays = curve(stepper, spec, steps, tiny), dict[str, Any]()
    low = LOW_PRECISIONS if name in LOW_PRECISION_MODELS else ()
    made = []
    others = {precision: stepper_of(name, tiny, precision)[0] for precision in low}
    for point in points(steps):
        made += [next(losses) for _ in range(point - len(made))]
        data, params = batch(spec, point, tiny), stepper.params
        now = {key: value.detach().numpy() for key, value in params.items()}
        arrays |= {f"{point}/param/{key}": value.copy() for key, value in now.items()}
        for precision, other in {"fp32": stepper, **others}.items():
            if other is not stepper:
                load_params(other, now)
            head = f"{point}/{precision}"
            arrays[f"{head}/loss"] = np.array(other.evaluate(data).loss)
            gradients = other.gradients(data)
            arrays |= {f"{head}/gradient/{key}": value for key, value in gradients.items()}
    return arrays | {"curve": np.array(made)}
