#!/usr/bin/env python3
"""A run in shards, each of them killed or not, and what merging makes of it.

    shards.py EVALRT_PROGRAM
"""
import json
import os
import signal
import socket
import subprocess
import unittest

from journal import Base, SERVER, line
from patience import LONG, fake_openai, until


class WithServers(Base):
    def server(self, name="a", answers=None, then="never", model=None):
        """One that runs; its own log is NAME.log. After so many answers it waits for the file `then`."""
        program = self.dir / name
        program.symlink_to(SERVER)
        env = self.env() | ({} if answers is None else {"FAKE_OPENAI_GATE": f"{answers} {then}"})
        process, url = fake_openai("--model", model or self.model, program=program, cwd=self.dir,
                                   stderr=subprocess.DEVNULL, env=env)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process, url

    def tearDown(self):
        pass  # servers are ended by what is run after this

    def asked_of(self, name="a"):
        path = self.dir / f"{name}.log"
        if not path.exists():
            return []
        rows = [json.loads(row) for row in path.read_text().splitlines() if row.endswith("}")]
        return [row["body"]["messages"][-1]["content"] for row in rows
                if row.get("body", {"max_tokens": 1}).get("max_tokens") != 1]

    def forget(self, name="a"):
        (self.dir / f"{name}.log").unlink(missing_ok=True)

    def groups(self, count=40, groups=4, extra=""):
        """Prompts with a long beginning in common, in an order that is not theirs."""
        heads = [f"{g} " + f"shared words of group {g} " * 40 for g in range(groups)]
        return self.suite(*[line(f"item-{i}", f"{extra}{heads[i % groups]} question {i}")
                            for i in range(count)])

    def ask(self, url, suite, *more, env=None):
        process = subprocess.run([os.environ.get("WRAPPER", "env"), self.evalrt(), "run", str(suite),
                                  "--backend", "openai-url", "--url", url, "--no-probe", "--model", "m",
                                  *map(str, more)], cwd=self.dir, capture_output=True, text=True,
                                 timeout=LONG, env=self.env() | (env or {}))
        return process.returncode, process.stdout, process.stderr

    @staticmethod
    def evalrt():
        from journal import EVALRT
        return EVALRT

    def merge(self, *args):
        process = subprocess.run([self.evalrt(), "merge", *map(str, args)], cwd=self.dir,
                                 capture_output=True, text=True, timeout=LONG)
        return process.returncode, process.stderr


class Shards(WithServers):
    def test_shards_ask_everything_once_and_merge_to_what_one_run_writes(self):
        _, url = self.server()
        suite = self.groups()
        self.assertEqual(self.ask(url, suite, "-o", "whole", "--journal", "whole.journal")[0], 0)
        whole = self.asked_of()
        self.forget()
        for i in range(3):
            code, _, err = self.ask(url, suite, "-o", "o.{shard}", "--journal", "j.{shard}",
                                    "--shard", f"{i}/3")
            self.assertEqual(code, 0, err)
            self.assertIn(f"shard {i} of 3", err)
        self.assertEqual(sorted(self.asked_of()), sorted(whole))
        code, err = self.merge("merged", "o.2", "o.0", "o.1")
        self.assertEqual(code, 0, err)
        self.assertEqual(self.without_times("merged"), self.without_times("whole"))
        # The journals: the whole run goes on with them, and has nothing to ask.
        code, err = self.merge("merged.journal", "j.0", "j.1", "j.2")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(self.held("merged.journal")), sorted(self.held("whole.journal")))
        self.forget()
        code, _, err = self.ask(url, suite, "-o", "again", "--journal", "merged.journal")
        self.assertEqual((code, self.asked_of()), (0, []), err)
        self.assertEqual(self.without_times("again"), self.without_times("whole"))
        out = subprocess.run([self.evalrt(), "report", "--json", "merged.journal"], cwd=self.dir,
                             capture_output=True, text=True, check=True).stdout
        self.assertEqual(json.loads(out)["answered"], 40)

    def test_groups_stay_together(self):
        _, url = self.server()
        suite = self.groups()
        for i in range(4):
            self.assertEqual(self.ask(url, suite, "-o", "o.{shard}", "--shard", f"{i}/4")[0], 0)
            self.assertEqual(len({question[0] for question in self.asked_of()}), 1)
            self.forget()

    def test_no_conversation_is_cut(self):
        _, url = self.server()
        rows = [json.loads(line(f"{n}-{turn}", f"{n} " + "words " * 50 + f"turn {turn}"))
                | {"evalrt": {"session": f"s{n}", "turn": turn}} for turn in range(5) for n in range(4)]
        suite = self.suite(*map(json.dumps, rows))
        found = []
        for i in range(3):  # 20 requests: equal parts would cut two conversations
            code, _, err = self.ask(url, suite, "-o", "o.{shard}", "--shard", f"{i}/3")
            self.assertEqual(code, 0, err)
            of = [question[0] for question in self.asked_of()]
            self.assertTrue(all(of.count(n) == 5 for n in of), of)
            found += of
            self.forget()
        self.assertEqual(sorted(found), sorted("0123" * 5))

    def test_a_killed_shard_is_run_again_and_nothing_is_lost_or_asked_twice(self):
        _, url = self.server(answers=10, then="go")
        suite = self.groups(60)
        args = ["--backend", "openai-url", "--url", url, "--no-probe", "--model", "m",
                "--max-in-flight", "2", "-o", "o.{shard}", "--journal", "j.{shard}"]
        env = self.env() | {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MIN": "1",
                            "SLURM_ARRAY_TASK_COUNT": "2"}
        killed = subprocess.Popen([self.evalrt(), "run", suite, *args, "--shard", "auto"],
                                  cwd=self.dir, env=env, stderr=subprocess.DEVNULL)
        until(lambda: len(self.asked_of()) == 12 and self.held("j.1"))  # two wait for ever
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        kept = self.held("j.1")
        self.assertLessEqual(len(kept), 10)
        self.forget()
        (self.dir / "go").touch()
        self.assertEqual(self.merge("early.journal", "j.1")[0], 1)  # says what is not there
        for i in (0, 1):
            code, _, err = self.ask(url, suite, "-o", "o.{shard}", "--journal", "j.{shard}",
                                    "--shard", f"{i}/2")
            self.assertEqual(code, 0, err)
        self.assertEqual(len(self.asked_of()), 60 - len(kept))
        code, err = self.merge("merged", "o.0", "o.1", "--suite", suite)
        self.assertEqual(code, 0, err)
        self.assertEqual([row["custom_id"] for row in self.out("merged")],
                         [f"item-{i}" for i in range(60)])
        self.assertEqual(self.merge("merged.journal", "j.0", "j.1")[0], 0)

    def test_what_is_missing_is_said_and_what_disagrees_is_refused(self):
        _, url = self.server()
        suite = self.groups(12)
        for i in (0, 1):
            self.assertEqual(self.ask(url, suite, "-o", "o.{shard}", "--journal", "j.{shard}",
                                      "--shard", f"{i}/3")[0], 0)
        code, err = self.merge("merged", "o.0", "o.1", "--suite", suite)
        self.assertEqual(code, 1)
        self.assertRegex(err, r"12 items, 8 answered, 0 failed, 4 missing")
        code, err = self.merge("merged.journal", "j.0", "j.1")
        self.assertEqual(code, 1)
        self.assertIn("missing shards: 2/3", err)
        # The same answers once more are no contradiction; other ones are.
        self.assertEqual(self.merge("merged", "o.0", "o.0", "o.1")[0], 1)
        (self.dir / "changed").write_text((self.dir / "o.0").read_text().replace("answer to", "no answer"))
        code, err = self.merge("refused", "o.0", "changed")
        self.assertEqual(code, 2)
        self.assertIn("answered otherwise", err)
        self.assertFalse((self.dir / "refused").exists())
        # Journals of another run, and what is no shard at all.
        other = self.suite(line("x", "another"), name="other.jsonl")
        self.assertEqual(self.ask(url, other, "-o", "x", "--journal", "jx")[0], 0)
        code, err = self.merge("refused", "j.0", "jx")
        self.assertEqual(code, 2)
        self.assertIn("not of one run", err)
        self.assertFalse((self.dir / "refused").exists())
        self.assertEqual(self.merge("refused", "j.0", "o.0")[0], 2)
        self.assertEqual(self.merge("refused", SERVER)[0], 2)
        self.assertEqual(self.merge("j.0", "j.0")[0], 2)
        # An output that was cut off by its process's end.
        text = (self.dir / "o.1").read_bytes()
        (self.dir / "torn").write_bytes(text[:-20])
        code, err = self.merge("merged", "o.0", "torn", "--suite", suite)
        self.assertEqual(code, 1)
        self.assertIn("cut off", err)

    def test_a_journal_is_one_shards_and_auto_needs_a_scheduler(self):
        _, url = self.server()
        suite = self.groups(12)
        self.assertEqual(self.ask(url, suite, "-o", "o", "--journal", "j", "--shard", "0/3")[0], 0)
        code, _, err = self.ask(url, suite, "-o", "p", "--journal", "j", "--shard", "1/3")
        self.assertEqual(code, 4)
        self.assertIn('shard was "0/3" and is "1/3"', err)
        clean = {name: "" for name in ("OMPI_COMM_WORLD_RANK", "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")}
        code, _, err = self.ask(url, suite, "--shard", "auto", env=clean)
        self.assertEqual(code, 2)
        self.assertIn("JOB_COMPLETION_INDEX", err)

    def test_a_dry_run_plans_and_asks_nothing(self):
        suite = self.groups()
        code, out, err = self.ask("http://127.0.0.1:9/v1", suite, "--dry-run", "--shard", "0/4",
                                  "--json", "plan")
        self.assertEqual(code, 0, err)
        self.assertIn("40 requests", out)
        plan = json.loads((self.dir / "plan").read_text())
        self.assertEqual((plan["requests"], plan["shards"], plan["fewest"], plan["most"]), (40, 4, 10, 10))
        self.assertLess(plan["cold_tokens"], plan["prompt_tokens"] / 3)
        self.assertLess(plan["duplicated_tokens"], 100)
        code, _, err = self.ask("http://127.0.0.1:9/v1", suite, "--dry-run", "--shard", "0/7", "--json", "plan")
        self.assertGreater(json.loads((self.dir / "plan").read_text())["duplicated_tokens"], 200)


class Bfcl(WithServers):
    """A category in parts, whose result files are joined."""

    def setUp(self):
        super().setUp()
        function = {"name": "f", "description": "d " * 50,
                    "parameters": {"type": "dict", "properties": {}, "required": []}}
        with open(self.dir / "BFCL_v4_simple_python.json", "w") as file:
            for i in range(12):
                function["description"] = f"group {i % 3} " + "words of a description " * 30
                question = "fail once" if i == 5 else f"question {i}"
                file.write(json.dumps({"id": f"simple_python_{i}", "function": [function], "question": [
                    [{"role": "user", "content": question}]]}) + "\n")

    def bfcl(self, url, *more):
        process = subprocess.run(
            [self.evalrt(), "bfcl", "simple_python", "--bfcl-data", self.dir, "--backend", "openai-url", "--url",
             url, "--no-probe", "--model", "m", *more], cwd=self.dir, capture_output=True, text=True, timeout=LONG,
            env=self.env())
        return process.returncode, process.stderr

    def results(self, folder):
        path, = (self.dir / folder).rglob("*_result.json")
        return path, {row["id"]: row["result"] for row in map(json.loads, path.read_text().splitlines())}

    def test_the_parts_are_the_whole_and_their_result_files_join_to_it(self):
        _, url = self.server()
        (self.dir / "failed-once").touch()
        code, err = self.bfcl(url)
        self.assertEqual(code, 0, err)
        whole, asked = self.results("result")[1], self.asked_of()
        self.assertEqual(len(whole), 12)
        self.forget()
        (self.dir / "failed-once").unlink()
        paths, parts = [], []
        for i in range(3):
            more = ("--shard", f"{i}/3", "--result-dir", "parts/{shard}", "--journal", "j.{shard}", "--retries", "0")
            code, err = self.bfcl(url, *more)
            if code == 1:  # one item has failed: only that is asked again
                (self.dir / "failed-once").touch()
                code, err = self.bfcl(url, *more)
            self.assertEqual(code, 0, err)
            path, rows = self.results(f"parts/{i}")
            paths.append(path)
            parts.append(set(rows))
        self.assertEqual(sorted(map(len, parts)), [4, 4, 4])
        self.assertEqual(set.union(*parts), set(whole))
        questions = self.asked_of()
        self.assertEqual(questions.count("fail once"), 2)
        questions.remove("fail once")
        self.assertEqual(sorted(questions), sorted(asked))
        code, err = self.merge("joined_result.json", *reversed(paths))
        self.assertEqual(code, 0, err)
        joined = [json.loads(row) for row in (self.dir / "joined_result.json").read_text().splitlines()]
        self.assertEqual({row["id"]: row["result"] for row in joined}, whole)
        self.assertEqual([row["id"] for row in joined], [f"simple_python_{i}" for i in range(12)])
        self.assertEqual(self.merge("joined.journal", "j.0", "j.1", "j.2")[0], 0)
        # Answered otherwise in two parts: refused.
        text = paths[0].read_text()
        (self.dir / "other_result.json").write_text(text.replace("answer to", "no answer to"))
        code, err = self.merge("refused.json", paths[0], "other_result.json")
        self.assertEqual(code, 2)
        self.assertIn("otherwise", err)

    def test_without_a_name_for_the_parts_each_has_a_folder(self):
        _, url = self.server()
        (self.dir / "failed-once").touch()
        for i in range(2):
            code, err = self.bfcl(url, "--shard", f"{i}/2")
            self.assertEqual(code, 0, err)
            self.assertEqual(len(self.results(f"result/shard-{i}")[1]), 6)


class Replicas(WithServers):
    """Several servers behind one run."""

    def both(self, suite, *urls, more=()):
        args = [part for url in urls for part in ("--url", url)]
        return subprocess.Popen([self.evalrt(), "run", str(suite), "--backend", "openai-url", *args, "--no-probe",
                                 "--model", "m", "-o", "o", "--max-in-flight", "2", *map(str, more)],
                                cwd=self.dir, env=self.env(), text=True, stderr=subprocess.PIPE)

    def test_two_servers_share_the_groups(self):
        # Neither runs away from the other while one of them waits for the processor.
        (_, a), (_, b) = self.server("a"), self.server("b")
        suite = self.groups(60, extra="abreast ")
        process = self.both(suite, a, b, more=("--json", "s"))
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 0, err)
        of_a, of_b = self.asked_of("a"), self.asked_of("b")
        self.assertEqual(len(of_a) + len(of_b), 60)
        self.assertEqual(len(set(of_a) | set(of_b)), 60)
        self.assertGreater(min(len(of_a), len(of_b)), 15)
        self.assertRegex(err, rf"{a}: \d+ answered")
        notes = " ".join(json.loads((self.dir / "s").read_text())["notes"])
        self.assertIn(b, notes)
        self.assertEqual([row["custom_id"] for row in self.out()], [f"item-{i}" for i in range(60)])

    def test_the_death_of_one_moves_its_work_to_the_other(self):
        (first, a), (_, b) = self.server("a", answers=8), self.server("b", answers=0, then="go")
        suite = self.groups(60)
        process = self.both(suite, a, b)
        until(lambda: len(self.asked_of("a")) == 10)  # two at once wait for ever
        first.kill()
        first.wait()
        (self.dir / "go").touch()
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 0, err)
        rows = self.out()
        self.assertEqual(len(rows), 60)
        self.assertTrue(all(row["error"] is None for row in rows))
        self.assertIn("it is gone", err)
        self.assertEqual(len(set(self.asked_of("b"))), 52)

    def test_the_turns_of_a_conversation_go_to_one_server(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        rows = []
        for n in range(8):
            for turn in range(5):
                rows.append(json.loads(line(f"{n}-{turn}", f"abreast conversation {n} turn {turn} " + "word " * 60))
                            | {"evalrt": {"session": f"s{n}", "turn": turn}})
        rows.sort(key=lambda row: row["evalrt"]["turn"])  # not as they belong together
        process = self.both(self.suite(*map(json.dumps, rows)), a, b)
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 0, err)
        turns = {name: [question.split()[2:5:2] for question in self.asked_of(name)] for name in "ab"}
        for n in map(str, range(8)):
            of = {name: [turn for it, turn in turns[name] if it == n] for name in "ab"}
            self.assertIn([], of.values(), of)
            self.assertEqual(of["a"] + of["b"], list("01234"))
        self.assertEqual(len(turns["a"]) + len(turns["b"]), 40)
        self.assertGreaterEqual(min(len(turns["a"]), len(turns["b"])), 10)

    def test_one_that_refuses_for_its_load_does_not_hold_the_other(self):
        (_, a), (_, b) = self.server("a", model="refuses"), self.server("b")
        process = self.both(self.groups(60), b, a)
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 0, err)
        self.assertEqual(sum(row["error"] is None for row in self.out()), 60)
        # All that it has refused is answered by the other, which was not paused for it.
        self.assertEqual(len(self.asked_of("b")), 60)
        self.assertTrue(self.asked_of("a"))

    def test_one_that_is_not_there_at_first_is_done_without(self):
        _, a = self.server("a")
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            gone = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
            process = self.both(self.groups(12), a, gone)
            _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 0, err)
        self.assertIn("begins without it", err)
        self.assertEqual(len(self.asked_of("a")), 12)


if __name__ == "__main__":
    unittest.main(verbosity=1)
