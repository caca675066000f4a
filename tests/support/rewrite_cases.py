"""Calls of `sabia rewrite` against a stub of a server, whose answers depend on model and seed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from forked import Command
from kills import left_over, through_kills

sys.path.insert(0, str(Path(__file__).parents[1]))
from openai_stub import Stub

SABIA = Command()
PLAIN = [sys.executable, "-m", "sabia.cli.main"]
FAULTS = ["503", "429-ms", "garbage", "reset", *[""] * 36]  # 10 % of the first attempts fail


class Sampler(Stub):
    """Answers depend on the question, the model and the seed."""

    async def _perform(self, fault, request, content, text):
        body = json.loads(content)
        return await super()._perform(
            fault, request, content, f"{body['model']} {body.get('seed')}\n{text}"
        )


def fault(text, attempt):
    return random.Random(text).choice(FAULTS) if attempt == 0 else ""


def sabia(*words, **settings):
    settings = {"capture_output": True, "check": True, "timeout": 120} | settings
    return subprocess.run([*SABIA, *map(str, words)], **settings)


def written(path, records):
    pq.write_table(pa.Table.from_pylist(list(records)), path)
    return path


def kills_change_nothing(tmp_path, records, answer, asked, calls, most):
    """Kill a run over three shards of records four times; its output is that of a whole run, and no
    more than `most` of its calls, those in flight at a kill, are made again.

    asked: the words of the command, from a stub and the folder of its cache.
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "once").mkdir()
    for part, rows in enumerate(records):
        written(tmp_path / "in" / f"p{part}.parquet", rows)
    words = ("rewrite", tmp_path / "in", "-o")
    with Sampler(answer=answer, latency_s=0.01) as stub:
        sabia(*words, tmp_path / "whole", *asked(stub, tmp_path / "once"))
    with Sampler(answer=answer, fault=fault, latency_s=0.01, retry_after_s=0.1) as stub:
        line = [*PLAIN, *words, tmp_path / "made", *asked(stub, tmp_path)]
        through_kills([str(word) for word in line], 4, random.Random(3), 4.0, tmp_path / "t")
        assert calls <= sum(stub.delivered.values()) <= calls + most
    for part in range(len(records)):
        name = f"part-{part:05d}.parquet"
        whole, made = (pq.read_table(tmp_path / at / name) for at in ("whole", "made"))
        assert made.equals(whole)
    assert not left_over(tmp_path)
