#!/usr/bin/env python3
"""The evalrt program against the engine models, as servers.

    engines.py EVALRT ENGINE_SERVER
"""
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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

    ASK_ALL = """
import os, urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(body):
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(),
                                                  {"Content-Type": "application/json"})).read()
with ThreadPoolExecutor(24) as pool:
    list(pool.map(ask, open("suite")))
"""

    def test_a_server_that_does_not_batch_is_told_and_what_may_be_why(self):
        def note(engine, *arguments, **more):
            (self.dir / "suite").write_text("\n".join(
                json.dumps({"messages": [{"role": "user", "content": f"{i} and more of it?"}], "max_tokens": 40} | more)
                for i in range(24)) + "\n")
            url = self.serve(engine, "--scale", "0.2", *arguments)
            said = self.program("run", "suite", "-o", "out", "--url", url, "--json", "s", "--backend",
                                "mlx-server" if engine == "mlx" else "openai-url").stderr
            notes = [it for it in json.loads((self.dir / "s").read_text())["notes"] if "one request at a time" in it]
            for it in notes:
                self.assertIn(it, said)
            if not more:  # a gateway tells it, too
                said = self.program("gateway", "--url", url, "--json", "s", "--backend", "mlx-server" if engine == "mlx"
                                    else "openai-url", "--", sys.executable, "-c", self.ASK_ALL).stderr
                self.assertEqual([it for it in json.loads((self.dir / "s").read_text())["notes"]
                                  if "one request at a time" in it], notes)
                for it in notes:
                    self.assertIn(it, said)
            return notes

        self.assertEqual(note("vllm"), [])
        self.assertEqual(note("mlx"), [])
        self.assertEqual(note("vllm", "--batch", "1"),
                         ["vllm answers one request at a time: its own limit of requests at once may be 1"])
        self.assertEqual(note("mlx", "--batch", "1"),
                         ["mlx-server answers one request at a time: what makes it do so is a draft model "
                          "(--draft-model), or a quantised cache (--kv-bits), or a model with layers whose caches cannot "
                          "be put together"])
        self.assertEqual(note("mlx", "--batch", "1", seed=1, temperature=0.5),
                         ["mlx-server answers one request at a time: requests have a seed at a temperature above 0"])

    def converse(self, url, number, played):
        """An agent, and a user that a model plays, as in tau-bench, or a script. What came of each
        request: tokens of its answer and of its prompt, and how many of these were cached."""
        def ask(messages, tokens):
            body = json.dumps({"model": "model", "messages": messages, "max_tokens": tokens}).encode()
            request = urllib.request.Request(url + "/chat/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=100) as answer:
                answer = json.load(answer)
            usage = answer["usage"]
            made.append((usage["completion_tokens"], usage["prompt_tokens"],
                         usage["prompt_tokens_details"]["cached_tokens"]))
            return answer["choices"][0]["message"]["content"]

        def words(seed, count):
            return " ".join(f"word{(i * 31 + seed * 7) % 997}" for i in range(count))

        made = []
        agent = [{"role": "system", "content": words(0, 1500)},  # the rules, which all share
                 {"role": "user", "content": f"Case {number}: " + words(number, 1500)}]
        user = [{"role": "system", "content": f"You are customer {number}."}]
        for _ in range(8):
            agent.append({"role": "assistant", "content": ask(agent, 30)})
            user.append({"role": "user", "content": agent[-1]["content"]})
            user.append({"role": "assistant", "content": ask(user, 10) if played else "And then?"})
            agent.append({"role": "user", "content": user[-1]["content"]})
        return made

    def check_conversations(self, played):
        def run(url, at_once):
            begun = time.monotonic()
            with ThreadPoolExecutor(at_once) as pool:
                made = list(pool.map(lambda n: self.converse(url, n, played), range(16)))
            cached = sum(it[2] for one in made for it in one)
            prompts = sum(it[1] for one in made for it in one)
            return made, cached / prompts, time.monotonic() - begun

        direct, before, alone = run(self.serve("mlx", "--scale", "0.02"), 1)
        gateway = subprocess.Popen([EVALRT, "gateway", "--quiet", "--backend", "openai-url", "--url",
                                    self.serve("mlx", "--scale", "0.02")], stdout=subprocess.PIPE, text=True)
        self.addCleanup(lambda: (gateway.terminate(), gateway.wait(), gateway.stdout.close()))
        url = json.loads(gateway.stdout.readline())["url"]
        batched, after, together = run(url, 16)
        print(f"16 long conversations with a user that a {'model' if played else 'script'} plays: one at a time "
              f"{alone:.1f} s, {before:.0%} cached; all at once {together:.1f} s, {after:.0%} cached "
              f"({alone / together:.1f}x)", file=sys.stderr)
        # No answer went astray: their lengths come from their prompts.
        self.assertEqual([[it[:2] for it in one] for one in direct], [[it[:2] for it in one] for one in batched])
        requests = sum(map(len, direct))
        metrics = urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=10).read().decode()
        self.assertIn(f"\nevalrt_answered_total {requests}\n", metrics)
        self.assertIn(f"\nevalrt_continued_total {requests * 7 // 8}\n", metrics)

    def test_long_conversations_many_at_once(self):
        self.check_conversations(played=False)

    def test_agents_and_users_that_a_model_plays(self):
        self.check_conversations(played=True)

    def test_a_page_that_shows_late_is_measured_as_what_it_is(self):
        said = self.program("backends", "--probe", self.serve("omlx"), "--measure", "--json").stdout
        measured = json.loads(said)
        self.assertEqual((measured["measured"]["page"], measured["measured"]["page_least"]), (256, 256))
        self.assertEqual(measured["row"]["shared_tokens"], 256)
        self.assertEqual(measured["row"]["commit_delay_ms"], 4000)  # that it is not more than 5 s is all that was seen

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
