#!/usr/bin/env python3
"""The evalrt program against a real vLLM on the CPU with a real small model.

    vllm_server.py --evalrt PROGRAM --vllm PROGRAM --model FOLDER
"""

import argparse
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
import real_server  # noqa: E402

parser = argparse.ArgumentParser()
for name in ("--evalrt", "--vllm", "--model"):
    parser.add_argument(name, required=True)
args, rest = parser.parse_known_args()
SYSTEM = "You know the capitals of all countries and answer in one short sentence. " * 8


def line(custom_id, question, **body):
    return real_server.line(custom_id, question, SYSTEM, **body)


class Vllm(real_server.RealServer):
    evalrt = args.evalrt
    patience = 900  # it compiles at its first start
    more = []

    @classmethod
    def command(cls, port):
        return ([args.vllm, "serve", args.model, "--served-model-name", "smol", "--host", "127.0.0.1",
                 "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "32", *cls.more],
                {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"})


class Silent(Vllm):
    def test_it_is_recognised_and_batched_and_says_how_cached_tokens_would_be_reported(self):
        rows, err = self.run_lines([line(f"{i}", "What is the capital of France?", stream=i % 2 == 0)
                                    for i in range(24)])
        self.assertRegex(err, r"the server is vllm \S+ \(.*\); 192 requests at once")
        self.assertIn("--enable-prompt-tokens-details", err)
        for row in rows.values():
            self.assertIn("Paris", row["response"]["body"]["choices"][0]["message"]["content"])
            self.assertIsNone(row["evalrt"]["cached_tokens"])
        self.assertGreater(self.summary["in_flight_mean"], 4)

    def test_a_prompt_that_does_not_fit_has_its_class(self):
        rows, _ = self.run_lines([line("long", "word " * 6000), line("short", "Say hello.")], code=1)
        self.assertEqual(rows["long"]["error"]["code"], "context_too_long")
        self.assertIsNone(rows["short"]["error"])

    def test_an_unknown_model_has_its_words(self):
        rows, _ = self.run_lines([line("a", "x", model="nope")], "--retries", "0", code=1)
        self.assertEqual(rows["a"]["error"]["code"], "rejected")
        self.assertIn("nope", rows["a"]["error"]["message"])


class Reporting(Vllm):
    more = ["--enable-prompt-tokens-details"]

    def test_the_shared_prefix_is_cached(self):
        # Its block is 128 tokens on a CPU.
        rows, err = self.run_lines([line(f"{i}", SYSTEM * 3 + f"Name a word with {i} letters.") for i in range(8)])
        cached = sorted(row["evalrt"]["cached_tokens"] or 0 for row in rows.values())
        self.assertEqual(cached[0], 0)
        self.assertGreaterEqual(cached[1], 384)
        # What the planner expects is what it gets.
        self.assertEqual(self.summary["cached_tokens"]["actual"], self.summary["cached_tokens"]["expected"])
        self.assertRegex(err, r"prefix cached: \d+ tokens")


del Vllm  # only its heirs are tests

if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *rest])
