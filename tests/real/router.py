#!/usr/bin/env python3
"""The evalrt program against a real sglang-router in front of two real llama.cpp servers.

    router.py --evalrt PROGRAM --llama PYTHON_WITH_XLLAMACPP      with the packages of `--packages`
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

if sys.argv[1:] == ["--packages"]:
    print("sglang-router==0.3.2")
    sys.exit()

SUPPORT = Path(__file__).resolve().parent.parent / "support"
sys.path.insert(0, str(SUPPORT))
from patience import until  # noqa: E402
from real_processes import Llama, Router  # noqa: E402
from real_server import line  # noqa: E402
from tee import Tee  # noqa: E402

SLOTS, CONTEXT, GROUPS, EACH = 2, 1024, 6, 8


def suite(groups=GROUPS, each=EACH, extra=""):
    """Questions with long beginnings in common, which is not how they stand in the file."""
    lines = []
    for i in range(each):
        for group in range(groups):
            system = f"{group}. " + f"You know all that there is to know about {group}{extra}, and say little. " * 16
            lines.append(line(f"{group}-{i}", f"group {group} question {i}", system, max_tokens=12))
    return lines


class Base(unittest.TestCase):
    policy = ()

    @classmethod
    def setUpClass(cls):
        cls.servers = []
        for _ in range(2):
            cls.servers.append(Llama(args.llama, SLOTS, CONTEXT))
            cls.addClassCleanup(cls.servers[-1].kill)
        for it in cls.servers:
            it.wait()

    def tees(self):
        tees = [Tee(it.port) for it in self.servers]
        for it in tees:
            self.addCleanup(it.close)
        return tees

    def router(self, ports, *more):
        router = Router(ports, *more)
        self.addCleanup(router.kill)
        return router

    def start(self, lines, url, *more):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        (self.dir / "suite").write_text("\n".join(lines) + "\n")
        return subprocess.Popen([args.evalrt, "run", "suite", "-o", "out", "--backend", "openai-url", "--url", url,
                                 "--json", "summary", *more], cwd=self.dir, text=True, stderr=subprocess.PIPE)

    def finish(self, process, code=0):
        self.addCleanup(process.kill)
        _, err = process.communicate(timeout=400)
        self.assertEqual(process.returncode, code, err)
        self.summary = json.loads((self.dir / "summary").read_text())
        return {row["custom_id"]: row for row in map(json.loads, (self.dir / "out").read_text().splitlines())}, err

    def of_group(self, tees, group):
        """How many of its questions each server got."""
        return [sum(f"group {group} " in question for question in tee.questions()) for tee in tees]


class TwoServers(Base):
    def test_it_is_recognised(self):
        router = self.router([it.port for it in self.servers])
        done = subprocess.run([args.evalrt, "backends", "--probe", router.url], capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"^sglang-router \S+ \(/readiness tells of 2 servers; llama-server, as its "
                                      r'models are owned_by "llamacpp"\)')
        self.assertIn(f"requests at once: {2 * SLOTS}, its total_slots, for 2 servers", done.stdout)

    def test_what_shares_a_prefix_goes_to_one_server(self):
        tees = self.tees()
        router = self.router([it.port for it in tees], "--policy", "cache_aware")
        rows, err = self.finish(self.start(suite(), router.url))
        self.assertIn("the server is sglang-router", err)
        self.assertEqual(len(rows), GROUPS * EACH)
        self.assertTrue(all(row["error"] is None for row in rows.values()))
        # Each group is with one of them, and both have some.
        counts = [self.of_group(tees, group) for group in range(GROUPS)]
        self.assertTrue(all(sorted(it) == [0, EACH] for it in counts), counts)
        self.assertGreater(min(len(tee.questions()) for tee in tees), EACH - 1, counts)
        # The servers' usage comes through: each slot fills a prefix once, at most.
        prompt = sum(row["evalrt"]["prompt_tokens"] for row in rows.values())
        cached = self.summary["cached_tokens"]["actual"]
        self.assertGreater(cached, prompt * (EACH - SLOTS) / EACH * 0.8)
        # A limit on the answer's tokens gets there by another name.
        self.assertEqual({data.get("max_completion_tokens", data.get("max_tokens")) for tee in tees
                          for question, data, _ in tee.asked if question.startswith("group")}, {12})

    def test_a_killed_server_loses_nothing(self):
        extra = Llama(args.llama, SLOTS, CONTEXT)  # this one dies
        self.addCleanup(extra.kill)
        extra.wait()
        router = self.router([self.servers[0].port, extra.port])
        process = self.start(suite(each=12, extra=" and more"), router.url)
        part = self.dir / "out.part"
        until(lambda: part.exists() and part.read_text().count("\n") >= 12)
        extra.kill()
        self.assertLess(part.read_text().count("\n") if part.exists() else 99, GROUPS * 12)
        rows, err = self.finish(process)
        self.assertEqual(len(rows), GROUPS * 12, err)
        self.assertEqual([row for row in rows.values() if row["error"] is not None], [])

    def test_its_key_keeps_groups_and_conversations_together(self):
        tees = self.tees()
        router = self.router([it.port for it in tees], "--policy", "manual")
        talks = [json.dumps(json.loads(line(f"talk-{n}-{turn}", f"talk {n} turn {turn}", max_tokens=8))
                            | {"evalrt": {"session": f"talk {n}", "turn": turn}}) for turn in range(4) for n in range(8)]
        rows, _ = self.finish(self.start(suite(extra=" too") + talks, router.url))
        self.assertTrue(all(row["error"] is None for row in rows.values()))
        keys = {}
        for tee in tees:
            for question, _, headers in tee.asked:
                key = {name.lower(): value for name, value in headers.items()}.get("x-smg-routing-key")
                if question.startswith(("group", "talk")):
                    keys.setdefault(key, set()).add(tee.port)
        self.assertNotIn(None, keys)
        # At least a key for each; one key, one server.
        self.assertGreaterEqual(len(keys), GROUPS + 8)
        self.assertEqual({len(ports) for ports in keys.values()}, {1})
        for n in range(8):
            of = [sum(f"talk {n} " in question for question in tee.questions()) for tee in tees]
            self.assertEqual(sorted(of), [0, 4])

    def test_a_refusal_fails_one_item_with_the_servers_words(self):
        router = self.router([it.port for it in self.servers])
        rows, _ = self.finish(self.start([line("long", "word " * 3 * CONTEXT), line("good", "Say hello.")],
                                         router.url), code=1)
        self.assertIsNone(rows["good"]["error"])
        self.assertEqual(rows["long"]["error"]["code"], "context_too_long")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--evalrt", type=os.path.abspath, required=True)
    parser.add_argument("--llama", required=True)
    args, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
