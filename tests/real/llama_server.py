#!/usr/bin/env python3
"""The evalrt program against llama.cpp's real server with a real small model.

    llama_server.py --evalrt PROGRAM --python PYTHON_WITH_XLLAMACPP
"""

import argparse
import json
import subprocess
import sys
import unittest
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent.parent / "support"
sys.path.insert(0, str(SUPPORT))
from real_server import RealServer, line  # noqa: E402

parser = argparse.ArgumentParser()
for name in ("--evalrt", "--python"):
    parser.add_argument(name, required=True)
args, rest = parser.parse_known_args()
SLOTS, CONTEXT = 2, 1024


class Llama(RealServer):
    evalrt = args.evalrt

    @classmethod
    def command(cls, port):
        return [args.python, SUPPORT / "llama_server.py", str(port), str(SLOTS), str(CONTEXT)], {}

    def test_it_is_recognised_and_its_slots_are_found(self):
        done = subprocess.run([args.evalrt, "backends", "--probe", self.url], capture_output=True,
                              text=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith("llama-server "), done.stdout)
        self.assertIn(f"requests at once: {SLOTS}, its total_slots", done.stdout)

    def test_answers_are_right_streamed_and_not_and_share_a_prefix(self):
        system = "You know the capitals of all countries and answer in one short sentence. " * 8
        rows, err = self.run_lines(
            [line(f"{i}", "What is the capital of France?", system, stream=i % 2 == 0)
             for i in range(8)])
        self.assertIn("the server is llama-server", err)
        texts = {row["response"]["body"]["choices"][0]["message"]["content"] for row in rows.values()}
        self.assertTrue(all("Paris" in text for text in texts), texts)
        self.assertEqual(self.summary["max_in_flight"], SLOTS)
        self.assertLessEqual(self.summary["in_flight_mean"], SLOTS)
        # Each slot prefills the prefix once; the others have it.
        cached = [row["evalrt"]["cached_tokens"] for row in rows.values()]
        self.assertNotIn(None, cached)
        self.assertGreaterEqual(sum(n > 80 for n in cached), 8 - SLOTS)
        self.assertRegex(err, r"prefix cached: \d+ tokens")
        for i, row in rows.items():
            self.assertIsNotNone(row["response"]["request_id"])
            self.assertEqual(row["evalrt"]["first_text_ms"] is None, int(i) % 2 == 1)

    def test_a_prompt_that_does_not_fit_has_its_class_and_fails_alone(self):
        rows, _ = self.run_lines([line("long", "word " * 3 * CONTEXT), line("short", "Say hello."),
                                  line("whole", "word " * 3 * CONTEXT, stream=False)], code=1)
        self.assertIsNone(rows["short"]["error"])
        for name in ("long", "whole"):
            self.assertEqual(rows[name]["error"]["code"], "context_too_long")
            self.assertEqual(rows[name]["response"]["status_code"], 400)
            self.assertEqual(rows[name]["evalrt"]["attempts"], 1)

    def test_bodies_that_it_refuses_have_its_words(self):
        rows, _ = self.run_lines(
            [line("good", "Say hello."), line("bad", "x", messages="none")], "--retries", "0", code=1)
        self.assertIsNone(rows["good"]["error"])
        self.assertEqual(rows["bad"]["error"]["code"], "rejected")
        self.assertIn("messages", rows["bad"]["error"]["message"])

    def test_completions_and_several_choices(self):
        completion = {"custom_id": "text", "url": "/v1/completions", "body": {
            "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}}
        rows, err = self.run_lines([json.dumps(completion),
                                    line("two", "Say hello.", n=2, stream=False, temperature=1)])
        self.assertIn("Paris", rows["text"]["response"]["body"]["choices"][0]["text"])
        self.assertEqual(len(rows["two"]["response"]["body"]["choices"]), 2)

    def test_without_a_temperature_it_is_said_that_it_takes_its_own(self):
        _, err = self.run_lines([line("a", "Say hello.", temperature=None)])
        self.assertEqual(err.count("llama-server then takes 0.8"), 1)


del RealServer  # only its heirs are tests

if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *rest])
