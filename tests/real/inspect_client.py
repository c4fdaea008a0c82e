#!/usr/bin/env python3
"""inspect_ai through `evalrt gateway`: a small task with a scorer and a tool.

    inspect_client.py --evalrt PROGRAM --server PROGRAM --model FOLDER
"""

PACKAGES = ["inspect_ai==0.3.285", "openai==3.57.0"]

import harness

args, rest = harness.read_arguments(PACKAGES)

import json
import sys
import unittest
from pathlib import Path

TASK = '''
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Egypt": "Cairo", "Peru": "Lima",
            "Spain": "Madrid", "Japan": "Tokyo", "Austria": "Vienna", "Greece": "Athens",
            "Portugal": "Lisbon", "Ireland": "Dublin", "Poland": "Warsaw"}


@task
def capitals():
    return Task(dataset=[Sample(f"What is the capital of {country}?", target=city, id=country)
                         for country, city in CAPITALS.items()],
                solver=generate(), scorer=includes())
'''


class Inspect(unittest.TestCase):
    def read(self, done):
        self.assertEqual(done.code, 0, done.err + done.out)
        log, = done.folder.glob("logs/*.json")
        log = json.loads(log.read_text())
        self.assertEqual(log["status"], "success")
        samples = sorted(log["samples"], key=lambda it: it["id"])
        return [(it["output"]["completion"], it["scores"]["includes"]["value"]) for it in samples]

    def test_a_small_task(self):
        folder = harness.scratch(self)
        (folder / "capitals.py").write_text(TASK)

        def command(at_once):
            return [Path(sys.executable).parent / "inspect", "eval", "../capitals.py", "--model",
                    "openai/default_model", "-M", "responses_api=false", "--max-connections", at_once,
                    "--temperature", "0", "--max-tokens", "16", "--log-dir", "logs", "--log-format",
                    "json", "--display", "none", "--no-log-realtime"]

        home = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "cache")}
        direct = harness.directly(args, command(1), folder / "direct", **home)
        gateway = harness.through_gateway(args, command(12), folder / "gateway", **home)
        before, after = self.read(direct), self.read(gateway)
        same = harness.compare("inspect_ai", before, after, direct, gateway)
        right = [sum(value == "C" for _, value in rows) for rows in (before, after)]
        print(f"right: {right[0]} and {right[1]} of 12", file=sys.stderr)
        self.assertGreaterEqual(same, 8)  # not promised
        self.assertLessEqual(abs(right[0] - right[1]), 12 - same)
        self.assertEqual((gateway.summary["answered"], gateway.summary["failed"]), (12, 0))


if __name__ == "__main__":
    unittest.main(argv=rest)
