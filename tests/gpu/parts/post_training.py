"""Speed and memory of post-training as a user calls it: GRPO, SFT and DPO of a 0.5B model in BF16.

The model has random weights and the shape of Qwen2.5 0.5B, with its vocabulary of 151,936, of which
the tokenizer, which is trained here, has only the first few hundred. Times are those that the
commands record in metrics.jsonl; the median of the steps after the first counts, which chooses
algorithms. `sabia grpo` records the time of a step and that of its samples with their grades; a
verifier grades while other samples are drawn, so grading has no time of its own.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from cases import Case, Device, Failed, Figures
from trainers import median
from user_commands import UserCommands, metrics
from workloads import TINY, TINY_LAYERS, RandomParameters

# as a Llama, which has the same layers; the output of attention has a bias too
QWEN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151_936,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "attention_bias": True, "initializer_range": 0.02,
}  # fmt: skip
TINY_MODEL = TINY | {"num_hidden_layers": TINY_LAYERS, "vocab_size": 4096}
STEPS, TINY_STEPS = 10, 3
RANK = 16
# nats between trainer and sampler, of any token; the tiny model's logits are smaller
LARGEST_GAP, TINY_LARGEST_GAP = 0.1, 0.01
# prompts, samples of each, new tokens
GRPO, TINY_GRPO = (64, 8, 256), (4, 4, 8)
# length of a row, rows of a step, rows of a micro-batch; a row of preferences is a pair
SFT, TINY_SFT = (2048, 16, 4), (96, 4, 2)
DPO, TINY_DPO = (1024, 32, 8), (128, 4, 2)


def cases(device: Device) -> Iterator[Case]:
    """GRPO first, then full and low-rank training on conversations and on preferences."""
    work = _Runs(device)
    try:
        yield Case("0.5B / bf16 / grpo", work.grpo)
        for rank in (0, RANK):
            how = f"rank {rank}" if rank else "full"
            yield Case(f"0.5B / bf16 / sft / {how}", lambda rank=rank: work.sft(rank))
            yield Case(f"0.5B / bf16 / dpo / {how}", lambda rank=rank: work.dpo(rank))
    finally:
        work.commands.close()


class _Runs:
    """The cases, which share a model directory."""

    def __init__(self, device: Device) -> None:
        self.device, self.commands, self.folder = device, UserCommands(device), device.scratch
        self.steps = TINY_STEPS if device.tiny else STEPS

    def model(self) -> Path:
        """The model with random weights, in BF16, and the trained tokenizer."""
        from sabia.core.model.storage.hub import save_model
        from sabia.core.numerics.floats import numpy_dtype
        from sabia.core.spec import from_config

        out = self.folder / "model"
        if not out.exists():
            config = QWEN | (TINY_MODEL if self.device.tiny else {})
            spec = from_config(config)
            drawn = RandomParameters(spec, self.device)
            params = {name: drawn[name].astype(numpy_dtype("bfloat16")) for name in drawn}
            save_model(out, spec, params, self.commands.tokens() / "_tokenizer")
        return out

    def words(self, number: int) -> str:
        """A text of a length that hardly varies, about 450 tokens (40 if tiny)."""
        random = np.random.default_rng(number)
        count = 3 if self.device.tiny else 34
        return " ".join(f"{n} and {n + 1} make {2 * n + 1}" for n in random.integers(0, 400, count))

    def run(self, *words: object) -> Figures:
        """Run a command for the steps; seconds of a step and peaks of memory.

        Raises Failed for a loss that is not finite, a step without an update, or too few steps.
        """
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        shared = ("--model", self.model(), "--steps", self.steps, "--precision", "bf16")
        self.commands(*words, *shared, "--export-dtype", "bfloat16", "-o", out)
        losses, norms, ends = (metrics(out, name) for name in ("loss", "grad_norm", "seconds"))
        seconds = np.diff(ends)
        figures: Figures = {
            "tokens_per_s": 0.0, "step_s": median(seconds.tolist()),
            "slowest_step_s": float(seconds.max()), "first_step_s": float(ends[0]),
            "host_bytes": int(metrics(out, "memory_bytes").max()),
            "losses": losses.round(4).tolist(), "grad_norm": float(norms.min()),
        }  # fmt: skip
        if self.device.cuda:
            figures["peak_bytes"] = int(metrics(out, "device_memory_bytes").max())
        sound = np.isfinite(losses).all() and np.isfinite(norms).all() and (norms > 0).all()
        if not len(losses) == len(norms) == self.steps or not sound:
            raise Failed(f"losses {losses}, norms of gradients {norms} "
                         f"(expected {self.steps} finite ones)", figures)  # fmt: skip
        return figures

    def grpo(self) -> Figures:
        """Samples of the engine in the process, rewarded for a letter or digit; some have one.

        Raises Failed where the trainer's log-probabilities are not the sampler's.
        """
        prompts, group, new = TINY_GRPO if self.device.tiny else GRPO
        rows = ({"messages": [{"role": "user", "content": self.words(n)}], "answer": "[a-z0-9]"}
                for n in range(prompts * self.steps))  # fmt: skip
        words = ["grpo", self.commands.records("prompts", rows), "--reward", "regex"]
        words += ["--prompts", prompts, "--group", group, "--max-new-tokens", new, "--lr", "1e-6"]
        figures = self.run(*words)
        out = self.folder / "run"
        sampled, rates = metrics(out, "sampled_tokens"), metrics(out, "tokens_per_s")
        sampling = (sampled / rates)[1:]  # s; of all but the first step, as `step_s`
        steps = np.diff(metrics(out, "seconds"))
        shares = sampling / steps
        figures |= {
            "tokens_per_s": float(sampled[1:].sum() / steps.sum()),
            "sampling_tokens_per_s": float(sampled[1:].sum() / sampling.sum()),
            "samples_per_s": float(metrics(out, "samples")[1:].sum() / steps.sum()),
            "sampling_share": median(shares.tolist()),
            "update_share": median((1 - shares).tolist()),
            "logprob_gap": float(metrics(out, "logprob_gap").max()),
            "logprob_gap_max": float(metrics(out, "logprob_gap_max").max()),
            "live_groups": float(metrics(out, "live_groups").mean()),
            "length": float(metrics(out, "length").mean()),
        }
        most = TINY_LARGEST_GAP if self.device.tiny else LARGEST_GAP
        if not figures["logprob_gap_max"] <= most:
            raise Failed(f"log-probabilities differ by {figures['logprob_gap_max']:.3g} "
                         f"(expected at most {most})", figures)  # fmt: skip
        return figures

    def sft(self, rank: int) -> Figures:
        """Packed conversations."""
        sizes = TINY_SFT if self.device.tiny else SFT
        count = self.steps * sizes[1] * (2 if self.device.tiny else 4)
        rows = ({"messages": [{"role": "user", "content": "count"},
                              {"role": "assistant", "content": self.words(n)}]}
                for n in range(count))  # fmt: skip
        return self.trained(self.commands.records("chats", rows), sizes, rank)

    def dpo(self, rank: int) -> Figures:
        """Pairs of a chosen and a rejected answer; the reference model scores all of them first."""
        sizes = TINY_DPO if self.device.tiny else DPO
        rows = ({"prompt": [{"role": "user", "content": "count"}], "chosen": self.words(2 * n),
                 "rejected": self.words(2 * n + 1)}
                for n in range(self.steps * sizes[1]))  # fmt: skip
        return self.trained(self.commands.records("pairs", rows), sizes, rank, "--loss", "dpo")

    def trained(self, data: Path, sizes: tuple[int, int, int], rank: int, *more: str) -> Figures:
        """`sabia sft` on records, all weights or adapters of a rank."""
        length, batch, micro = sizes
        words = ["sft", data, "--length", length, "--batch", batch, "--micro-batch", micro, *more]
        words += ["--lora-rank", rank] if rank else []
        figures = self.run(*words)
        rates = metrics(self.folder / "run", "tokens_per_s")
        return figures | {"tokens_per_s": median(rates[1:].tolist())}
