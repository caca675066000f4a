"""Options of `sabia serve`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, choice, integer, quantity, several, text
from sabia.core.options.shared import Backend, Call, Drafting

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServeOptions(Call, Drafting, group="General"):
    """How a model is served."""

    model: str = text("Directory with the model and its tokenizer", "DIR", required=True,
                      common=True, group="Model")  # fmt: skip
    name: str = text("Name of the model in requests", "NAME", unset="that of the directory",
                     common=True, group="Model")  # fmt: skip
    adapter: tuple[str, ...] = several(
        "LoRA adapter (format of peft) that requests name as their model", "NAME=DIR", group="Model"
    )
    """Each request has the adapter of its model name, or none with the name of the model; those of
    one batch may differ. DIR has adapter_config.json and adapter_model.safetensors."""
    dtype: str = choice("Number format of the weights and the cache", "float32", "bfloat16",
                        group="Model")  # fmt: skip
    backend: str = changed(Backend.backend, group="Model")
    mesh: str = text("Devices that hold the model together: tensor=N", "tensor=N",
                     group="Model")  # fmt: skip
    """Each device has its share of the attention heads, MLP widths and vocabulary, and the keys and
    values of its heads; a `--draft` is whole on each. torch: one process per device (`torchrun
    --nproc-per-node N -m sabia.cli.main serve --mesh tensor=N …`), of which the first has the
    endpoint; if one dies, all end. JAX: one process. Of a quantized model each device keeps its
    part of what is stored (torch); groups that share a scale must be in one part."""
    host: str = text("Address to listen on", "ADDRESS", default="127.0.0.1", group="Endpoint")
    """Another address than loopback needs a token; see `--token-env`."""
    port: int = integer("Port to listen on; 0 takes a free one", 8000, least=0, most=65535,
                        common=True, group="Endpoint")  # fmt: skip
    token_env: str = text("Environment variable that holds the token of clients", "VARIABLE",
                          default="SABIA_SERVE_TOKEN", group="Endpoint")  # fmt: skip
    """Clients send the token as their API key. If the variable is not set, none is needed."""
    queue: int = integer("Maximum number of waiting requests", 1024, least=1, group="Endpoint")
    """Further requests get status 429 with `Retry-After`."""
    updates: str = text("Folder from which a trainer may load other weights", "DIR",
                        group="Endpoint")  # fmt: skip
    """Adds /pause, /resume and /update_weights. Without it the weights stay as they are."""
    context: int | None = quantity("whole", "Maximum tokens of a prompt and its completion",
                                   unset="what the model and --cache-memory allow for 8 samples",
                                   group="Generation")  # fmt: skip
    samples: int = integer("Maximum number of samples that are decoded together", 256, least=1,
                           group="Generation")  # fmt: skip
    """Fewer are where `--cache-memory` has no room for so many of `--context` tokens."""
    cache_memory: int | None = quantity("size", "Memory for keys and values",
                                        unset="a quarter of what is free, half on an accelerator",
                                        group="Generation")  # fmt: skip
    """It is reserved at the start. Requests wait for room in it. A fifth of it keeps what prompts
    have begun with, for later prompts that begin equally."""

    def check(self) -> None:
        """An address that others can reach needs a token."""
        super().check()
        if not self.model:
            raise UsageError("--model: is missing (expected a model directory)")
