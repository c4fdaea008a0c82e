#!/usr/bin/env python3
"""The evalrt program against the engine models, as servers.

    engines.py EVALRT ENGINE_SERVER
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

EVALRT, SERVER = sys.argv[1:3]


class Engines(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)

    def serve(self, *arguments):
        server = subprocess.Popen([SERVER, *arguments], stdout=subprocess.PIPE, text=True)
        self.addCleanup(lambda: (server.kill(), server.wait(), server.stdout.close()))
        return f"http://127.0.0.1:{int(server.stdout.readline())}/v1"

    def program(self, *arguments):
        done = subprocess.run([EVALRT, *map(str, arguments)], cwd=self.dir, text=True, capture_output=True, timeout=600,
                              env=os.environ | {"EVALRT_CACHE": str(self.dir)})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_a_suite_with_shared_prefixes_on_each(self):
        heads = [" ".join(f"word{(i * 31 + g * 7) % 997}" for i in range(200)) for g in range(6)]
        (self.dir / "suite").write_text("\n".join(
            json.dumps({"messages": [{"role": "system", "content": heads[i % 6]},
                                     {"role": "user", "content": f"Question {i}?"}], "max_tokens": 20})
            for i in range(60)) + "\n")
        for engine in ("vllm", "sglang", "mlx", "llama"):
            for scale in ("0.01", "0.1", "1"):  # a busy machine is slow beside what is quick
                url = self.serve(engine, "--scale", scale)
                self.program("run", "suite", "-o", "out", "--backend", "openai-url", "--url", url, "--json", "s")
                summary = json.loads((self.dir / "s").read_text())
                self.assertEqual(summary["answered"], 60)
                cached = summary["cached_tokens"]["actual"]
                least = 0.5 if engine == "llama" else 0.75  # each of its slots fills a prefix by itself
                if cached > least * summary["prompt_tokens"]:
                    break
            self.assertGreater(cached, least * summary["prompt_tokens"], engine)

    def test_a_server_is_measured_once_and_runs_know_of_it(self):
        for scale in ("0.2", "1", "5"):  # a busy machine measures only what is slow beside it
            url = self.serve("vllm", "--batch", "1", "--scale", scale)
            said = self.program("backends", "--probe", url, "--measure", "--json").stdout
            measured = json.loads(said)
            self.assertLessEqual(measured["measured"]["requests"], 12)
            if measured["row"]["in_flight"] == 1:
                break
        self.assertEqual(measured["row"]["in_flight"], 1)
        (self.dir / "suite").write_text('{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}\n' * 3)
        run = self.program("run", "suite", "-o", "out", "--backend", "openai-url", "--url", url, "--json", "s")
        self.assertIn("does not batch", run.stderr)
        self.assertEqual(json.loads((self.dir / "s").read_text())["max_in_flight"], 1)
        kept = self.program("run", "suite", "-o", "out", "--backend", "openai-url", "--url", url, "--json", "s",
                            "--no-probe")
        self.assertNotIn("does not batch", kept.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
