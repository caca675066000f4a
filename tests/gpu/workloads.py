"""What the parts that measure speed run: shapes of models, parameters, rows of tokens, the chip."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from cases import Device, Failed, Skipped

from sabia.core.spec import ModelSpec, from_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "attention_bias": False, "initializer_range": 0.02,
}  # fmt: skip
ONE_B = LLAMA | {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
# sizes of Llama 3.2 1B and Llama 3.1 8B, without their scaling of rotary angles for long contexts
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "1B": ONE_B,
    "8B": LLAMA | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "MoE 8 x 1B": ONE_B | EXPERTS,
}  # fmt: skip
DEPTHS = {"1B": 16, "8B": 8, "MoE 8 x 1B": 5}  # layers in training, fewer on a small device
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
TINY_LAYERS = 2
STATE_BYTES = 18  # of a parameter: fp32 master, gradient, two moments, and a copy in BF16
STATE_SHARE = 0.75  # of the memory that the state may take


def shape_config(shape: str, device: Device, layers: int = 0, **changes: Any) -> dict[str, Any]:
    """The config.json of a shape; `layers` 0: the depth for training that fits the device."""
    config = {**CONFIGS[shape], **(TINY if device.tiny else {})}
    depth = TINY_LAYERS if device.tiny else layers or _depth(shape, device)
    return config | {"num_hidden_layers": depth} | changes


def shape_spec(shape: str, device: Device, layers: int = 0, **changes: Any) -> ModelSpec:
    """The same as a ModelSpec."""
    return from_config(shape_config(shape, device, layers, **changes))


def _depth(shape: str, device: Device) -> int:
    def count(layers: int) -> int:
        spec = from_config({**CONFIGS[shape], "num_hidden_layers": layers})
        return sum(tensor.size for tensor in spec.tensors())

    limit = STATE_SHARE * device.memory / STATE_BYTES
    per_layer = count(2) - count(1)
    layers = min(DEPTHS[shape], int((limit - count(1)) // per_layer) + 1)
    if layers < 1:
        raise Skipped(f"one layer has {count(1) / 1e9:.2f}e9 parameters of {STATE_BYTES} bytes, "
                      f"the device {device.memory / 2**30:.0f} GiB")  # fmt: skip
    return layers


class RandomParameters(Mapping[str, np.ndarray]):
    """fp32 parameters of a model, each drawn on the device when it is read (the same every time).

    Normal numbers of the table's standard deviation; norms are 1. NumPy would need a minute.
    """

    def __init__(self, spec: ModelSpec, device: Device, seed: int = 0) -> None:
        self.spec = spec
        self._tensors = {tensor.name: tensor for tensor in spec.tensors()}
        self._device, self._seed = device, seed
        self._number = {name: number for number, name in enumerate(self._tensors)}

    def tensor(self, name: str) -> Any:
        """The parameter as a tensor on the device."""
        import torch

        one = self._tensors[name]
        if one.init.kind in ("ones", "zeros"):
            return torch.full(one.shape, float(one.init.kind == "ones"), device=self._device.kind)
        generator = torch.Generator(self._device.kind)
        generator.manual_seed(self._seed * 10_000 + self._number[name])
        values = torch.randn(one.shape, generator=generator, device=self._device.kind)
        return values.mul_(one.init.std or one.shape[-1] ** -0.5)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensor(name).cpu().numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def llama(shape: str, device: Device) -> Any:
    """LlamaForCausalLM of `transformers` in fp32 on the device, with the weights of
    `RandomParameters`, in training mode. Raises Failed where the names of weights differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from sabia.core.model.storage.hub import to_hf

    spec = shape_spec(shape, device)
    config = shape_config(shape, device)
    kept = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    settings = LlamaConfig(**kept, attn_implementation="sdpa")
    with torch.device(device.kind):
        model = LlamaForCausalLM(settings)
    weights = to_hf(spec, RandomParameters(spec, device))
    tensors = {name: torch.as_tensor(np.array(array)) for name, array in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if name != "lm_head.weight"]  # tied to the embedding
    if missing or unexpected:
        raise Failed(f"weights missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().train()


def token_batch(vocab: int, rows: int, length: int, documents: int = 1) -> dict[str, np.ndarray]:
    """Rows of random tokens as the trainer makes them; packed where `documents` is above 1."""
    random = np.random.default_rng(0)
    ids = random.integers(0, vocab, (rows, length), dtype=np.int64)
    size = length // documents
    segments = np.minimum(np.arange(length) // size, documents - 1)  # [T]
    starts = np.flatnonzero(np.diff(segments, prepend=-1))
    ends = np.append(starts[1:], length) - 1
    targets = np.concatenate([ids[:, 1:], ids[:, :1]], 1)
    mask = np.ones((rows, length), np.float32)
    mask[:, ends] = 0
    targets[:, ends] = -1
    batch = {"input_ids": ids, "targets": targets, "loss_mask": mask}
    if documents > 1:
        positions = np.arange(length) - starts[segments]
        batch |= {"segments": np.tile(segments + 1, (rows, 1)),
                  "positions": np.tile(positions, (rows, 1))}  # fmt: skip
    return batch
