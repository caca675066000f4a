"""A trainer without companions opens no connection, looks up no name and installs nothing."""

import json
import sys
from pathlib import Path

import pytest
from training_cases import LENGTH, SHAPE, make_tokens, sabia

REFUSE = """
import sys

def refuse(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"looks up {arguments[0]}")
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        raise SystemExit(f"connects to {arguments[1]}")
    if event == "subprocess.Popen" and "pip" in map(str, arguments[1]):
        raise SystemExit("installs")

sys.addaudithook(refuse)
"""
GUARDED = (sys.executable, "-c", REFUSE + "from sabia.cli.main import main\nmain()")


def test_the_guard_guards() -> None:
    for words, said in (
        ("import socket; socket.getaddrinfo('example.invalid', 80)", b"looks up example.invalid"),
        ("import socket; socket.socket().connect(('127.0.0.1', 9))", b"connects to ('127.0.0.1'"),
        ("import subprocess; subprocess.run(['pip', '--version'])", b"installs"),
    ):
        assert said in sabia(launcher=(sys.executable, "-c", REFUSE + words)).stderr


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_pretrain_and_sft_reach_nobody(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend, reason=f"the {backend} backend")
    tokens = make_tokens(tmp_path / "tokens", rows=16)
    words = ("--steps", 2, "--batch", 4, "--backend", backend, "--peak-flops", "1e9")
    run = tmp_path / "run"
    done = sabia("pretrain", tokens, "--shape", SHAPE, *words, "-o", run, launcher=GUARDED)
    assert done.returncode == 0, done.stderr
    turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(8)))
    words = (*words, "--model", run / "final", "--length", 4 * LENGTH, "-o", tmp_path / "tuned")
    done = sabia("sft", chats, *words, launcher=GUARDED)
    assert done.returncode == 0, done.stderr
