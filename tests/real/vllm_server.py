#!/usr/bin/env python3
"""The evalrt program against a real vLLM on the CPU with a real small model.

    vllm_server.py --evalrt PROGRAM --vllm PROGRAM --model FOLDER
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("--evalrt", "--vllm", "--model"):
    parser.add_argument(name, required=True)
args, rest = parser.parse_known_args()
SYSTEM = "You know the capitals of all countries and answer in one short sentence. " * 8


def line(custom_id, question, **body):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 16, **body}
    return json.dumps({"custom_id": custom_id, "url": "/v1/chat/completions", "body": body})


class Vllm(unittest.TestCase):
    more = []

    @classmethod
    def setUpClass(cls):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        cls.url = f"http://127.0.0.1:{port}/v1"
        cls.log = tempfile.TemporaryFile("w+")
        cls.server = subprocess.Popen(
            [args.vllm, "serve", args.model, "--served-model-name", "smol", "--host", "127.0.0.1",
             "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "32", *cls.more],
            stdout=cls.log, stderr=cls.log, start_new_session=True,
            env=dict(os.environ, VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1"))
        cls.addClassCleanup(cls.stop)
        deadline = time.monotonic() + 900  # it compiles at its first start
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                return
            except (OSError, urllib.error.HTTPError):
                if cls.server.poll() is not None or time.monotonic() > deadline:
                    cls.log.seek(0)
                    print(cls.log.read()[-3000:], file=sys.stderr)
                    raise
                time.sleep(1)

    @classmethod
    def stop(cls):
        os.killpg(cls.server.pid, signal.SIGKILL)
        cls.server.wait()

    def run_lines(self, lines, *arguments, code=0):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "suite").write_text("\n".join(lines) + "\n")
            done = subprocess.run(
                [args.evalrt, "run", "suite", "--backend", "openai-url", "--url", self.url, "--json",
                 "summary", *arguments], cwd=folder, capture_output=True, text=True, timeout=600)
            self.assertEqual(done.returncode, code, done.stderr)
            self.summary = json.loads((Path(folder) / "summary").read_text())
        return {row["custom_id"]: row for row in map(json.loads, done.stdout.splitlines())}, done.stderr


class Silent(Vllm):
    def test_it_is_recognised_and_batched_and_says_how_cached_tokens_would_be_reported(self):
        rows, err = self.run_lines([line(f"{i}", "What is the capital of France?", stream=i % 2 == 0)
                                    for i in range(24)])
        self.assertRegex(err, r"the server is vllm \S+ \(.*\); 64 requests at once")
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
        rows, err = self.run_lines([line(f"{i}", f"Name a word with {i} letters.") for i in range(8)])
        cached = sorted(row["evalrt"]["cached_tokens"] or 0 for row in rows.values())
        self.assertGreaterEqual(cached[1], 96)
        self.assertRegex(err, r"prefix cached: (\d+ tokens|n/a)")


del Vllm  # only its heirs are tests

if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *rest])
