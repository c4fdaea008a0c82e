#!/usr/bin/env python3
"""`bfcl generate` and `bfcl evaluate` of the package bfcl_eval, directly and through `evalrt gateway`:
with one thread, rehearsed, and with 16; rows and scores are compared, and the times with those of
`evalrt bfcl`.

    bfcl_client.py --evalrt PROGRAM --server PROGRAM --model FOLDER [--rows N]

FOLDER-tools is the same model with a chat template that makes it call tools. bfcl_eval's code runs as
it is; the vendors' packages that it imports along and does not use are stubs. The goals are for 32
rows: rehearsed at least 2.5 times as fast as directly; 16 threads at most 10 % slower than `evalrt bfcl`.
"""

PACKAGES = ["openai==1.109.1", "tenacity>=8.5.0", "overrides", "filelock==3.20.0", "python-dotenv>=1.0.1",
            "tqdm", "typer", "tabulate", "numpy", "pandas", "--no-deps bfcl_eval==2026.3.23"]

import json
import os
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "openbmb/MiniCPM-SALA-FC"  # whose handler is that of OpenAI's chat completions
CATEGORY = "simple_python"


def bfcl(rows, arguments):
    """The program `bfcl`, for so many rows; it reads which ones from the folder that it writes to."""
    project = Path("project").absolute()
    project.mkdir(exist_ok=True)
    (project / "test_case_ids_to_generate.json").write_text(
        json.dumps({CATEGORY: [f"{CATEGORY}_{n}" for n in range(rows)]}))
    os.environ["BFCL_PROJECT_ROOT"] = str(project)
    sys.path.insert(0, str(ROOT / "scripts"))
    import score_bfcl

    used = {"openai", "httpx", "numpy", "pandas"}
    sys.meta_path.insert(0, score_bfcl.Stubs([it for it in score_bfcl.UNUSED if it not in used]))
    score_bfcl.stub_parsers()
    from bfcl_eval.__main__ import cli

    cli(arguments)


if sys.argv[1:2] == ["--child"]:
    sys.exit(bfcl(int(sys.argv[2]), sys.argv[3:]))

import importlib.util

import harness

args, rest = harness.read_arguments(PACKAGES)
COUNT = args.rows or 6
OPTIONS = {"model": args.model + "-tools", "options": ["--max-tokens", "128"]}


def command(*arguments):
    return [sys.executable, os.path.abspath(__file__), "--child", str(COUNT), *arguments, "--model", MODEL]


def generate(threads):
    return command("generate", "--run-ids", "--temperature", "0", "--num-threads", str(threads))


class Bfcl(unittest.TestCase):
    direct = None

    def setUp(self):
        self.folder = harness.scratch(self)
        if Bfcl.direct:
            return
        # The server looks models up by the name in the body: where it starts, this is one.
        named = self.folder / MODEL
        named.parent.mkdir()
        named.symlink_to(OPTIONS["model"])
        done = harness.directly(args, generate(1), self.folder / "direct", cwd=self.folder,
                                **OPTIONS | {"model": MODEL})
        Bfcl.direct = done, self.rows(done), self.score(done)

    def rows(self, done):
        self.assertEqual(done.code, 0, done.err[-3000:])
        file, = done.folder.rglob(f"BFCL_v4_{CATEGORY}_result.json")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        self.assertEqual([row["id"] for row in rows], [f"{CATEGORY}_{n}" for n in range(COUNT)])
        self.assertNotIn("traceback", file.read_text())
        for each in done.folder.rglob("*"):
            if each.is_file():
                self.assertNotIn(b"placeholder", each.read_bytes())
        return [row["result"] for row in rows]

    def score(self, done):
        """By bfcl_eval's own scorer: how many are right."""
        scored = harness.run(command("evaluate", "--test-category", CATEGORY, "--partial-eval"), done.folder,
                             harness.CLEAN | {"OPENAI_API_KEY": "none"})  # it makes a client, and asks nothing
        self.assertEqual(scored.code, 0, scored.err[-3000:])
        file, = done.folder.rglob(f"BFCL_v4_{CATEGORY}_score.json")
        score = json.loads(file.read_text().splitlines()[0])
        self.assertEqual(score["total_count"], COUNT)
        return score["correct_count"]

    def compare(self, name, threads, gateway=()):
        direct, before, right = Bfcl.direct
        done = harness.through_gateway(args, generate(threads), self.folder / "gateway", gateway=gateway,
                                       **OPTIONS)
        after, now = self.rows(done), self.score(done)
        same = harness.compare(f"bfcl_eval, {name}", before, after, direct, done)
        print(f"right: {right} and {now} of {COUNT}", file=sys.stderr)
        self.assertGreaterEqual(same, COUNT // 2)  # not promised
        self.assertLessEqual(abs(right - now), COUNT - same)
        self.assertEqual((done.summary["answered"], done.summary["failed"]), (COUNT, 0))
        return done

    def test_rehearsed_with_one_thread(self):
        done = self.compare("one thread, rehearsed", 1, ["--rehearse"])
        self.assertLess(done.wall, Bfcl.direct[0].wall)

    def test_with_16_threads_as_evalrt_bfcl(self):
        # 16 requests at once; evalrt bfcl by itself has more.
        threads = self.compare("16 threads", 16)
        for name, options in (("16 at once", ["--max-in-flight", "16"]), ("by itself", [])):
            self.own(threads, name, options)

    def own(self, threads, name, options):
        package = Path(importlib.util.find_spec("bfcl_eval").origin).parent
        own = harness.run([args.evalrt, "bfcl", CATEGORY, "--mode", "fc", "--bfcl-data", package / "data",
                           "--limit", COUNT, "--temperature", "0", "--max-tokens", "128", "--quiet", "--json", "own.json",
                           *options,
                           "--backend", "mlx-server", "--executable", args.server, "--model", OPTIONS["model"]],
                          self.folder / name.replace(" ", "-"), harness.CLEAN)
        self.assertEqual(own.code, 0, own.err)
        wall = json.loads((own.folder / "own.json").read_text())["wall_seconds"]
        print(f"evalrt bfcl, {name}: {wall:.1f} s, bfcl_eval with 16 threads {threads.wall:.1f} s "
              f"({threads.wall / wall - 1:+.0%})", file=sys.stderr)
        rows = {row["id"]: row["result"] for file in own.folder.rglob("BFCL_v4_*_result.json")
                for row in map(json.loads, file.read_text().splitlines())}
        self.assertEqual(len(rows), COUNT)


if __name__ == "__main__":
    unittest.main(argv=rest)
