"""Calls of `sabia rewrite` against a stub of a server, whose answers depend on model and seed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from forked import Command

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
