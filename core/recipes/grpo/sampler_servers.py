"""How each kind of server that may draw samples is asked: `sabia serve`, vLLM and SGLang.

A server loads a directory of weights, and is then asked for samples of token ids. Each kind answers
in its own form; the choices given here have the fields of `sabia serve`: `index`, `token_ids`,
`logprobs.token_logprobs`, `weight_versions`, `finish_reason`. The forms of the others are those of
vLLM 0.33 (entrypoints/rl/online, with VLLM_SERVER_DEV_MODE=1) and of SGLang 0.5.23
(entrypoints/http_server.py); both label their weights with a version that a client gives, and say
for each sample which versions drew its tokens.
"""

from pathlib import Path
from typing import Any

from sabia.core.errors import Failed, UsageError
from sabia.core.generate.requests import Request
from sabia.core.recipes.grpo.server_calls import Json, ServerCalls

FLAG = "--sampler-url"


class SamplerServer:
    """`sabia serve`, which numbers its weights itself. `model`: the name of the served model."""

    def __init__(self, calls: ServerCalls, model: str) -> None:
        self.calls, self.url, self.model = calls, calls.url, model
        self.root = calls.url.removesuffix("/v1")

    def load(self, written: Path, label: str) -> int | str:
        """Have the server load a directory of weights; the version that its samples will have.
        label: a version of no other weights. Raises UsageError, Failed or Unavailable."""
        version = self._post("update_weights", {"path": written.name}).get("version")
        if not isinstance(version, int):
            raise UsageError(f"{FLAG}: {self.url} gives its weights no version")
        return version

    def call(self, request: Request, more: Json) -> tuple[str, Json]:
        """The URL and the body of a request for samples; more: fields that some servers know."""
        return f"{self.url}/completions", {
            "model": self.model, "prompt": list(request.prompt), "n": request.n,
            "max_tokens": request.max_new_tokens, "temperature": request.temperature,
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "seed": request.seed, "request_id": request.name, "logprobs": 0,
            "return_token_ids": True, **more,
        }  # fmt: skip

    def choices(self, reply: Json) -> list[Json]:
        """The samples of a reply."""
        return reply["choices"]

    def _post(self, route: str, body: Json) -> Json:
        (reply,) = self.calls.answers([(f"{self.root}/{route}", body)])
        return reply


class VllmServer(SamplerServer):
    """vLLM. Requests wait while weights are loaded; the prefix cache of the former ones is left."""

    def load(self, written: Path, label: str) -> str:
        try:
            self._post("pause?mode=wait", {})
        except UsageError as error:
            raise UsageError(f"{error} (vLLM has this with VLLM_SERVER_DEV_MODE=1)") from None
        paths = {"weights_path": str(written.resolve())}
        self._post("collective_rpc", {"method": "reload_weights", "kwargs": paths})
        if not self._post("reset_prefix_cache", {}).get("success"):
            raise Failed(f"{FLAG}: {self.url} keeps the prefix cache of the weights before")
        self._post("update_weight_version", {"new_version": label})
        self._post("resume", {})
        return label

    def call(self, request: Request, more: Json) -> tuple[str, Json]:
        return super().call(request, more | {"return_weight_versions": True})

    def choices(self, reply: Json) -> list[Json]:
        return [
            {name: x for name, x in choice.items() if name in SHARED}
            | {"weight_versions": _versions(choice)}
            for choice in reply["choices"]
        ]


class SglangServer(SamplerServer):
    """SGLang, whose own route takes and gives token ids. It waits for running requests before it
    loads weights, and then empties its prefix cache."""

    def load(self, written: Path, label: str) -> str:
        update = {"model_path": str(written.resolve()), "weight_version": label}
        self._post("update_weights_from_disk", update | {"flush_cache": True})
        return label

    def call(self, request: Request, more: Json) -> tuple[str, Json]:
        sampling = {
            "n": request.n, "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0,
        }  # fmt: skip
        body = {"input_ids": list(request.prompt), "sampling_params": sampling}
        return f"{self.root}/generate", body | {"return_logprob": True}

    def choices(self, reply: Json) -> list[Json]:
        outputs = reply.get("items") or [reply]  # one sample is no list
        return [self._choice(index, output) for index, output in enumerate(outputs)]

    def _choice(self, index: int, output: Json) -> Json:
        about = output["meta_info"]
        versions = _versions(about) or [about.get("weight_version")]
        raw = [entry[0] for entry in about.get("output_token_logprobs") or ()]
        return {
            "index": index, "token_ids": output.get("output_ids"),
            "logprobs": {"token_logprobs": raw}, "weight_versions": versions,
            "finish_reason": (about["finish_reason"] or {}).get("type"),
        }  # fmt: skip


# fields of a choice that mean the same in vLLM
SHARED = ("index", "token_ids", "logprobs", "finish_reason")
KINDS = {"vllm": VllmServer, "sglang": SglangServer}  # by the owner of the served model


def server_at(calls: ServerCalls) -> SamplerServer:
    """The server that is called, known by what it lists as its model."""
    model = calls.model()
    return KINDS.get(str(model.get("owned_by")), SamplerServer)(calls, str(model["id"]))


def _versions(spans: dict[str, Any]) -> list[str]:
    """The versions of the spans of tokens in which a server tells them."""
    return [span["version"] for span in spans.get("weight_versions") or ()]
