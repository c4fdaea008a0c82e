#!/usr/bin/env python3
"""A script that asks one question after the other with urllib, as small harnesses do, directly and
through `evalrt gateway`: every answer is the same.

    sequential_client.py --evalrt PROGRAM --server PROGRAM --model FOLDER
"""

import json
import os
import sys
import unittest
import urllib.request
from pathlib import Path

QUESTIONS = [f"What is the capital of {country}? Answer in one sentence." for country in
             """France Norway Italy Spain Japan Egypt Kenya Peru Chile India Greece Cuba Austria Poland
             Hungary Portugal""".split()]


def child():
    answers = []
    for question in QUESTIONS:
        body = {"model": "default_model", "temperature": 0, "max_tokens": 16,
                "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            answers.append(json.load(answer)["choices"][0]["message"]["content"])
    Path("answers.json").write_text(json.dumps(answers))


if sys.argv[1:] == ["--child"]:
    sys.exit(child())

import harness

args, rest = harness.read_arguments()


class Sequential(unittest.TestCase):
    def test_the_answers_are_the_same(self):
        folder = harness.scratch(self)
        command = [sys.executable, os.path.abspath(__file__), "--child"]
        direct = harness.directly(args, command, folder / "direct")
        gateway = harness.through_gateway(args, command, folder / "gateway")
        answers = []
        for done in (direct, gateway):
            self.assertEqual(done.code, 0, done.err)
            answers.append(json.loads((done.folder / "answers.json").read_text()))
        same = harness.compare("urllib, one at a time", *answers, direct, gateway)
        self.assertEqual(same, len(QUESTIONS))
        self.assertEqual(gateway.summary["answered"], len(QUESTIONS))
        self.assertEqual(gateway.summary["failed"], 0)

    def test_rehearsed_the_answers_are_the_same_and_come_sooner(self):
        folder = harness.scratch(self)
        command = [sys.executable, os.path.abspath(__file__), "--child"]
        direct = harness.directly(args, command, folder / "direct")
        rehearsed = harness.through_gateway(args, command, folder / "rehearsed",
                                            gateway=["--rehearse"])
        answers = []
        for done in (direct, rehearsed):
            self.assertEqual(done.code, 0, done.err)
            answers.append(json.loads((done.folder / "answers.json").read_text()))
        # The goal is 2.5x on a machine of its own; how often batches change an answer is counted.
        same = harness.compare("urllib, one at a time, rehearsed", *answers, direct, rehearsed)
        self.assertGreaterEqual(same, len(QUESTIONS) - 2)
        self.assertEqual(rehearsed.summary["answered"], len(QUESTIONS))
        self.assertLess(rehearsed.wall, direct.wall)
        for file in rehearsed.folder.rglob("*"):
            self.assertNotIn(b"placeholder", file.read_bytes())


if __name__ == "__main__":
    unittest.main(argv=rest)
