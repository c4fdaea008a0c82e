#!/usr/bin/env python3
"""A run in shards, each of them killed or not, and what merging makes of it.

    shards.py EVALRT_PROGRAM
"""
import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import unittest

from journal import Base, SERVER, line
from patience import LONG, answers, fake_openai, free_port, until


class WithServers(Base):
    def server(self, name="a", answers=None, then="never", model=None, version=None):
        """One that runs; its own log is NAME.log. After so many answers it waits for the file `then`."""
        program = self.dir / name
        program.symlink_to(SERVER)
        env = self.env() | ({} if answers is None else {"FAKE_OPENAI_GATE": f"{answers} {then}"})
        env |= {} if version is None else {"FAKE_OPENAI_VERSION": version}
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

    def ask(self, url, suite, *more, model="m", env=None):
        process = subprocess.run([os.environ.get("WRAPPER", "env"), self.evalrt(), "run", str(suite),
                                  "--backend", "openai-url", "--url", url, "--no-probe", "--model", model,
                                  *map(str, more)], cwd=self.dir, capture_output=True, text=True,
                                 timeout=LONG, env=self.env() | (env or {}))
        return process.returncode, process.stdout, process.stderr

    @staticmethod
    def evalrt():
        from journal import EVALRT
        return EVALRT

    def files(self):
        return {path.name for path in self.dir.iterdir()}

    def report(self, *args, code=0):
        done = subprocess.run([self.evalrt(), "report", *args], cwd=self.dir, capture_output=True, text=True)
        if code is not None:
            self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout

    def parts(self, suite, *urls, extra=()):
        """A part of the suite at each of these servers: o.I and j.I."""
        for i, url in enumerate(urls):
            code, _, err = self.ask(url, suite, "-o", "o.{shard}", "--journal", "j.{shard}",
                                    "--shard", f"{i}/{len(urls)}", *extra)
            self.assertEqual(code, 0, err)

    def plain(self, *args):
        """Nothing is given that is not here."""
        process = subprocess.run([self.evalrt(), *map(str, args)], cwd=self.dir, capture_output=True,
                                 text=True, timeout=LONG, env=self.env())
        return process.returncode, process.stdout, process.stderr

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
        self.forget()
        # What the kill has left beside it belongs to it, and no reader leaves more.
        left = self.files()
        self.assertLessEqual({"j.1", "j.1-wal", "j.1-shm", "j.1.lock"}, left)
        all_of_it = [name for name in left if name.startswith("j.1")]
        self.report(*all_of_it, code=1)
        self.assertFalse(self.files() & {"j.1-wal", "j.1-shm"})
        kept = self.held("j.1")
        self.assertLessEqual(len(kept), 10)
        (self.dir / "j.1-wal").touch()
        code, err = self.merge("early.journal", *all_of_it)
        self.assertEqual(code, 1, err)  # says what is not there
        self.assertIn(f"60 items, {len(kept)} answered, 0 failed, {60 - len(kept)} not run", err)
        self.assertEqual(self.files() - left, {"early.journal"})
        self.assertFalse(self.files() & {"j.1-wal", "j.1-shm"})
        (self.dir / "go").touch()
        for i in (0, 1):
            code, _, err = self.ask(url, suite, "-o", "o.{shard}", "--journal", "j.{shard}",
                                    "--shard", f"{i}/2")
            self.assertEqual(code, 0, err)
        self.assertEqual(len(self.asked_of()), 60 - len(kept))
        code, err = self.merge("merged", "o.0", "o.1", "--suite", suite)
        self.assertEqual(code, 0, err)
        self.assertEqual([row["custom_id"] for row in self.out("merged")],
                         [f"item-{i}" for i in range(60)])
        before = self.files()
        self.assertEqual(self.merge("merged.journal", "j.0", "j.1")[0], 0)
        self.report("merged.journal")
        self.assertEqual(self.files() - before, {"merged.journal"})
        # The parts may have run beside each other, the sessions of one did not.
        wall = lambda name: json.loads(self.report(name, "--json", code=None))["wall_seconds"]
        self.assertEqual(wall("merged.journal"), max(wall("j.0"), wall("j.1")))
        self.assertEqual(self.merge("again", "j.1")[0], 1)
        self.assertEqual(wall("again"), wall("j.1"))

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
        self.assertIn("12 items, 8 answered, 0 failed, 4 not run", err)
        self.assertIn("answered 8 of 12 (66.7 %), failed 0, not run 4", self.report("merged.journal", code=1))
        # The same answers once more are no contradiction; other ones are.
        (self.dir / "again").write_text((self.dir / "o.0").read_text())
        code, err = self.merge("twice", "o.0", "again", "o.1")
        self.assertEqual(code, 1)
        self.assertIn("4 lines are of items that are in a file before", err)
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
        code, err = self.merge("of-torn", "o.0", "torn", "--suite", suite)
        self.assertEqual(code, 1)
        self.assertIn("cut off", err)

    def test_outputs_are_compared_with_the_suite_that_is_given(self):
        _, url = self.server()
        suite = self.groups(12)
        rows = suite.read_text().splitlines()
        self.parts(suite, url, url, extra=("--max-tokens", "3"))  # the requests are the file's all the same
        join = lambda text, *parts: (suite.write_text("\n".join(text) + "\n"),
                                     *self.merge("joined", *(parts or ("o.0", "o.1")), "--suite", suite))[1:]
        code, err = join(rows)
        self.assertEqual(code, 0, err)
        (self.dir / "joined").unlink()
        changed = [row.replace("question 5", "question five").replace("question 7", "question seven")
                   for row in rows]
        for text, words in (
                (changed, '2 of its items are other requests now ("item-5", "item-7")'),
                (rows[:10], '2 that were asked are not in it ("item-10", "item-11")'),
                (rows[:4] + rows[5:], '1 that were asked are not in it ("item-4"), 7 have another place in it '
                                      '("item-5", "item-6", "item-7", "item-8", "item-9", ...)'),
                (rows[:11] + [line("new", "x"), rows[11]], '1 in their places were not asked ("new"), 1 have '
                                                           'another place in it ("item-11")'),
                (rows[:3] + [line("other", "x")] + rows[4:], '1 that were asked are not in it ("item-3"), 1 in '
                                                             'their places were not asked ("other")')):
            code, err = join(text)
            self.assertEqual(code, 2, err)
            self.assertIn(f"{suite} is not the suite that these were asked of: {words}\n", err)
            self.assertFalse((self.dir / "joined").exists())
        code, err = join([*rows, line("new", "x")])
        self.assertEqual(code, 1, err)
        self.assertIn("13 items, 12 answered, 0 failed, 1 missing", err)
        self.assertIn("missing are the numbers 13", err)
        (self.dir / "joined").unlink()
        # One item, asked in two ways; outputs of before do not say what they asked.
        (self.dir / "twice").write_text(re.sub('"request": "...', '"request": "fff', (self.dir / "o.0").read_text()))
        code, err = self.merge("joined", "o.0", "twice")
        self.assertEqual(code, 2, err)
        self.assertIn("is another request than in a file before: the suite was changed between them", err)
        for i in (0, 1):
            text = (self.dir / f"o.{i}").read_text()
            (self.dir / f"old.{i}").write_text(re.sub(', "request": "[0-9a-f]*"', "", text))
            self.assertNotEqual(text, (self.dir / f"old.{i}").read_text())
        code, err = join(changed, "old.0", "old.1")
        self.assertEqual(code, 0, err)

    def test_a_merged_journal_counts_the_sessions_of_its_parts(self):
        _, url = self.server()
        suite = self.groups(12)
        sessions = lambda name: json.loads(self.report(name, "--json", code=None))["journal"]["sessions"]
        self.parts(suite, url, url, url)
        self.assertEqual(self.ask(url, suite, "-o", "o.1", "--journal", "j.1", "--shard", "1/3")[0], 0)
        self.assertEqual([sessions(f"j.{i}") for i in range(3)], [1, 2, 1])
        self.assertEqual(self.merge("some", "j.0", "j.1")[0], 1)
        self.assertEqual(sessions("some"), 3)
        self.assertEqual(self.merge("whole", "some", "j.2")[0], 0)
        self.assertEqual(sessions("whole"), 4)
        self.assertEqual(self.ask(url, suite, "-o", "o", "--journal", "whole")[0], 0)
        self.assertEqual(sessions("whole"), 5)

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

    def test_a_dry_run_counts_each_choice_of_a_prompt_and_the_prompt_once(self):
        plans = []
        for n in (1, 5):
            suite = self.suite(line("a", "some words " * 40, max_tokens=50, n=n))
            code, _, err = self.ask("http://127.0.0.1:9/v1", suite, "--dry-run", "--json", "plan")
            self.assertEqual(code, 0, err)
            plans.append(json.loads((self.dir / "plan").read_text()))
        self.assertEqual([plan["output_tokens"] for plan in plans], [50, 250])
        self.assertEqual(plans[0]["prompt_tokens"], plans[1]["prompt_tokens"])


class SeveralServers(WithServers):
    """An array of parts over servers that serve one model."""

    def test_a_merged_journal_goes_on_at_any_of_its_servers_and_asks_nothing_twice(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        suite = self.groups(24)
        self.parts(suite, a, b)
        self.assertEqual((len(self.asked_of("a")), len(self.asked_of("b"))), (12, 12))
        self.assertEqual(self.merge("whole.journal", "j.0", "j.1")[0], 0)
        for urls in ((a,), (b,), (b, a), (a, b)):
            for name in "ab":
                self.forget(name)
            more = [part for url in urls[1:] for part in ("--url", url)]
            code, _, err = self.ask(urls[0], suite, *more, "-o", "o", "--journal", "whole.journal")
            self.assertEqual(code, 0, err)
            self.assertIn("24 answered (24 of them from the journal)", err)
            self.assertEqual([self.asked_of(name) for name in "ab"], [[], []], urls)
        self.assertEqual([row["custom_id"] for row in self.out()], [f"item-{i}" for i in range(24)])

    def test_what_a_merged_journal_lacks_is_asked_for_and_nothing_else(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        suite = self.groups(24)
        self.parts(suite, a, b, b)
        first = self.asked_of("a")
        self.assertEqual(self.merge("whole.journal", "j.0", "j.1")[0], 1)
        rest = self.asked_of("b")[8:]
        self.forget("b")
        self.assertIn("not run 8", self.report("whole.journal", code=1))
        code, _, err = self.ask(b, suite, "-o", "o", "--journal", "whole.journal")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(self.asked_of("b")), sorted(rest))
        self.assertEqual(self.asked_of("a"), first)
        self.assertIn("answered 24 of 24", self.report("whole.journal"))

    def test_a_journal_of_one_server_is_not_gone_on_with_at_another(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        suite = self.groups(8)
        self.assertEqual(self.ask(a, suite, "-o", "o", "--journal", "j")[0], 0)
        code, _, err = self.ask(b, suite, "-o", "o", "--journal", "j")
        self.assertEqual((code, self.asked_of("b")), (4, []))
        self.assertIn(f'url was "{a}" and is "{b}"', err)
        # That several of one run are alike is said.
        self.assertEqual(self.ask(b, suite, "--url", a, "-o", "o", "--journal", "both")[0], 0)
        for name in "ab":
            self.forget(name)
        code, _, err = self.ask(a, suite, "-o", "o", "--journal", "both")
        self.assertEqual((code, self.asked_of("a"), self.asked_of("b")), (0, [], []), err)

    def test_that_servers_of_different_versions_have_answered_is_said(self):
        (_, a), (_, b) = self.server("a", version="v1"), self.server("b", version="v2")
        suite = self.groups(12)
        self.parts(suite, a, b, a)
        for kind in "oj":
            code, err = self.merge("all." + kind, *(f"{kind}.{i}" for i in range(3)))
            self.assertEqual(code, 0, err)
            self.assertIn(f'have answered: 8 by "v1", the first in {kind}.0, 4 by "v2", the first in {kind}.1', err)
            code, err = self.merge("same." + kind, f"{kind}.0", f"{kind}.2")
            self.assertNotIn("version", err)
        # Also by a run that asks both, which goes on with the journal or has none.
        for more in ((), ("--journal", "all.j")):
            code, _, err = self.ask(a, suite, "--url", b, "-o", "o", "--json", "s", *more)
            self.assertEqual(code, 0, err)
            both = more or (len(self.asked_of("a")) > 8 and len(self.asked_of("b")) > 4)
            self.assertEqual("servers of different versions" in err, bool(both))
        self.assertIn('8 by "v1", 4 by "v2"', " ".join(json.loads((self.dir / "s").read_text())["notes"]))

    def test_a_gateway_keeps_a_conversation_on_one_server(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        command = """
import json, os, threading, urllib.request
def ask(messages):
    body = {"model": "m", "messages": messages}
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(body).encode(), {"Content-Type": "application/json"})) as got:
        return json.load(got)["choices"][0]["message"]["content"]
def talk(i):
    messages = [{"role": "system", "content": "all have this"}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"{i} {turn}"})
        messages.append({"role": "assistant", "content": ask(messages)})
threads = [threading.Thread(target=talk, args=(i,)) for i in range(16)]
for it in threads: it.start()
for it in threads: it.join()
"""
        done = subprocess.run([self.evalrt(), "gateway", "--backend", "openai-url", "--url", a, "--url", b, "--no-probe",
                               "--model", self.model, "--max-in-flight", "16", "--", sys.executable, "-c", command],
                              cwd=self.dir, capture_output=True, text=True, timeout=LONG, env=self.env())
        self.assertEqual(done.returncode, 0, done.stderr)
        talks = [[asked.split()[0] for asked in self.asked_of(name)] for name in "ab"]
        self.assertEqual(sum(map(len, talks)), 64)
        # A turn goes elsewhere only if its server has much more to do.
        apart = set(talks[0]) & set(talks[1])
        self.assertLessEqual(len(apart), 3, talks)
        self.assertGreaterEqual(min(map(len, talks)), 8)

    def test_a_gateway_says_that_once(self):
        (_, a), (_, b) = self.server("a", version="v1"), self.server("b", version="v2")
        command = """
import json, os, threading, urllib.request
def ask(i):
    body = {"model": "m", "messages": [{"role": "user", "content": f"{i}"}]}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(), {"Content-Type": "application/json"})).read()
threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
for it in threads: it.start()
for it in threads: it.join()
"""
        done = subprocess.run([self.evalrt(), "gateway", "--backend", "openai-url", "--url", a, "--url", b, "--no-probe",
                               "--model", self.model, "--", sys.executable, "-c", command], cwd=self.dir, capture_output=True,
                              text=True, timeout=LONG, env=self.env())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(self.asked_of("a") and self.asked_of("b"))
        self.assertEqual(done.stderr.count("servers of different versions"), 1, done.stderr)

    def test_that_a_run_asks_servers_of_different_versions_is_said_before_it_does(self):
        (_, a), (_, b), (_, c) = (self.server(name, model="like-vllm", version=version)
                                  for name, version in (("a", "0.9"), ("b", "0.10"), ("c", "0.9")))
        code, _, err = self.plain("run", self.groups(12), "-o", "o", "--json", "s", "--backend", "openai-url",
                                  "--url", a, "--url", b, "--url", c)
        self.assertEqual(code, 0, err)
        words = f"{b} is vllm 0.10, and the first vllm 0.9: their answers may differ"
        self.assertIn(words, err)
        self.assertNotIn(f"{c} is vllm", err)
        self.assertIn(words, json.loads((self.dir / "s").read_text())["notes"])

    def test_parts_of_other_models_suites_or_cuts_are_not_joined(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        suite = self.groups(12)
        self.parts(suite, a, b)
        for name, model, more in (("model", "n", ()), ("temperature", "m", ("--temperature", "0.5")),
                                  ("order", "m", ("--order", "fifo"))):
            code, _, err = self.ask(b, suite, *more, "-o", "other.{shard}", "--journal", name + ".{shard}",
                                    "--shard", "1/2", model=model)
            self.assertEqual(code, 0, err)
            before = self.files()
            code, err = self.merge("whole.journal", "j.0", f"{name}.1")
            self.assertEqual(code, 2, err)
            self.assertIn("not of one run", err)
            self.assertEqual(self.files(), before)
            if name == "model":
                code, err = self.merge("whole", "o.0", "other.1")
                self.assertEqual(code, 2, err)
                self.assertIn('by the model "n"', err)
            (self.dir / "other.1").unlink()
            if name == "order":
                self.assertIn("cut with no option that changes it, and here with --order fifo", err)
        longer = self.suite(*suite.read_text().splitlines(), line("new", "0 of its own"), name="suite.jsonl")
        code, _, err = self.ask(b, longer, "-o", "longer.{shard}", "--journal", "longer.journal", "--shard", "1/2")
        self.assertEqual(code, 0, err)
        code, err = self.merge("whole.journal", "j.0", "longer.journal")
        self.assertEqual(code, 2, err)
        self.assertIn('items of the suite was "12" and is "13"', err)
        # A line more at its beginning: the same names have other numbers.
        moved = self.suite(line("first", "first"), *suite.read_text().splitlines(), name="moved.jsonl")
        self.assertEqual(self.ask(b, moved, "-o", "moved.{shard}", "--shard", "1/2")[0], 0)
        code, err = self.merge("whole", "o.0", "moved.1")
        self.assertEqual(code, 2, err)
        self.assertIn("not of one suite", err)

    def counts(self, journal, code):
        """What a report counts, as text and as JSON."""
        text = self.report(journal, code=code)
        of = json.loads(self.report("--json", journal, code=code))
        self.assertIn(f"answered {of['answered']} of {of['requests']}", text)
        return [of[name] for name in ("requests", "answered", "failed", "not_run", "repeated")]

    def test_equal_requests_that_are_asked_once_count_as_many_as_they_are(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        heads = [f"{g} " + f"shared words of group {g} " * 40 for g in range(4)]
        # 8 questions, each there five times, all over the suite; and one that fails, twice.
        rows = [line(f"item-{i}", f"{heads[i % 4]} question {i % 8}") for i in range(40)]
        suite = self.suite(*rows, line("bad-1", "fail"), line("bad-2", "fail"))
        code, _, err = self.ask(a, suite, "-o", "whole", "--journal", "whole.journal", "--dedupe", "--json", "s")
        self.assertEqual(code, 1, err)
        summary = json.loads((self.dir / "s").read_text())
        whole = [summary[name] for name in ("requests", "answered", "failed", "not_run", "repeated")]
        self.assertEqual(whole, [42, 40, 2, 0, 32])
        self.assertEqual(self.counts("whole.journal", 1), whole)
        self.forget()
        for i in range(3):
            code, _, err = self.ask(a, suite, "-o", "o.{shard}", "--journal", "j.{shard}", "--dedupe", "--json",
                                    "s", "--shard", f"{i}/3")
            self.assertIn(code, (0, 1), err)
            summary = json.loads((self.dir / "s").read_text())
            self.assertEqual(self.counts(f"j.{i}", code),
                             [summary[name] for name in ("requests", "answered", "failed", "not_run", "repeated")])
        # Each was asked once, by whichever part.
        self.assertEqual(len(self.asked_of()), 9)
        self.assertEqual(len(set(self.asked_of())), 9)
        code, err = self.merge("all", "o.1", "o.0", "o.2", "--suite", suite)
        self.assertEqual(code, 1, err)
        self.assertIn("42 items, 40 answered, 2 failed", err)
        self.assertEqual(self.without_times("all"), self.without_times("whole"))
        code, err = self.merge("all.journal", "j.1", "j.0", "j.2", "j.1")
        self.assertEqual(code, 1, err)
        self.assertIn("42 items, 40 answered, 2 failed, 0 not run", err)
        self.assertEqual(self.counts("all.journal", 1), whole)
        # What is missing is said, by the merge and by a report of what it has made.
        code, err = self.merge("some.journal", "j.0", "j.2")
        self.assertEqual(code, 1, err)
        self.assertIn("missing shards: 1/3", err)
        code, err2 = self.merge("some", "o.0", "o.2", "--suite", suite)
        requests, answered, failed, not_run, _ = self.counts("some.journal", 1)
        self.assertEqual(requests, 42)
        self.assertGreater(not_run, 0)
        self.assertIn(f"42 items, {answered} answered, {failed} failed, {not_run} not run", err)
        self.assertIn("were not there when the others were joined: 1/3", self.report("some.journal", code=1))
        self.assertEqual(json.loads(self.report("--json", "some.journal", code=1))["journal"]["missing_parts"],
                         ["1/3"])
        self.assertIn(f"42 items, {answered} answered, {failed} failed, {not_run} missing", err2)
        self.assertEqual(self.merge("later.journal", "some.journal", "j.1")[0], 1)
        self.assertEqual(self.counts("later.journal", 1), whole)
        # The whole run goes on with it, and asks for what is missing and has failed.
        self.forget()
        code, _, err = self.ask(b, suite, "--url", a, "-o", "again", "--journal", "later.journal", "--dedupe")
        self.assertEqual(code, 4, err)  # at another address it does not
        code, _, err = self.ask(a, suite, "-o", "again", "--journal", "some.journal", "--dedupe")
        self.assertEqual(code, 1, err)
        self.assertEqual(self.without_times("again"), self.without_times("whole"))
        self.assertEqual(len(set(self.asked_of())), len(self.asked_of()))
        self.assertEqual(self.counts("some.journal", 1), whole)

    def test_parts_of_which_some_ask_equal_requests_once_are_not_joined(self):
        _, a = self.server()
        suite = self.suite(*[line(f"item-{i}", f"question {i % 6} " + "words " * 40) for i in range(24)])
        self.parts(suite, a, a)
        code, _, err = self.ask(a, suite, "-o", "once.{shard}", "--journal", "once.j.{shard}", "--shard", "1/2",
                                "--dedupe")
        self.assertEqual(code, 0, err)
        for parts, words in ((("j.0", "once.j.1"), "no option that changes it, and here with --dedupe"),
                             (("once.j.1", "j.0"), "--dedupe, and here with no option that changes it")):
            code, err = self.merge("all", *parts)
            self.assertEqual(code, 2, err)
            self.assertIn("the suite was cut with " + words, err)
        # A part that is run again with the options of the others is one of them.
        self.forget()
        code, _, err = self.ask(a, suite, "-o", "o.1", "--journal", "once.j.1", "--shard", "1/2")
        self.assertEqual(code, 0, err)
        code, err = self.merge("all", "j.0", "once.j.1")
        self.assertEqual(code, 0, err)
        self.assertIn("24 items, 24 answered", err)
        code, out, _ = self.plain("run", suite, "--dry-run", "--dedupe", "--shard", "0/2", "--json", "plan")
        self.assertIn("24 requests in 0 MB, 18 are there already and not asked", out)
        plan = json.loads((self.dir / "plan").read_text())
        self.assertEqual((plan["fewest"] + plan["most"], plan["repeated"]), (6, 18))

    def test_lines_that_are_no_requests_count_the_same_everywhere(self):
        _, a = self.server()
        rows = [line(f"item-{i}", f"question {i} " + "words " * 40) for i in range(12)]
        # Of a name that is there: the earlier line has it.
        suite = self.suite(*rows[:6], "no JSON", line("item-2", "another"), *rows[6:])
        code, _, err = self.ask(a, suite, "-o", "whole", "--journal", "whole.journal", "--skip-invalid")
        self.assertEqual(code, 1, err)
        self.assertIn("12 answered, 2 failed", err)
        self.assertEqual(self.counts("whole.journal", 1), [14, 12, 2, 0, 0])
        for i in range(3):
            code, _, err = self.ask(a, suite, "-o", "o.{shard}", "--journal", "j.{shard}", "--shard", f"{i}/3",
                                    "--skip-invalid")
            self.assertEqual(code, 1 if i == 0 else 0, err)
            self.assertEqual(self.counts(f"j.{i}", code)[2], 2 if i == 0 else 0)
        for parts, answered, failed, missing in (((2, 0, 1), 12, 2, 0), ((0, 2), 8, 2, 4), ((1, 2), 8, 0, 6)):
            for name in ("all", "all.journal"):
                (self.dir / name).unlink(missing_ok=True)
            code, err = self.merge("all", *(f"o.{i}" for i in parts), "--suite", suite)
            self.assertEqual(code, 1, err)
            self.assertIn(f"14 items, {answered} answered, {failed} failed, {missing} missing", err)
            code, err = self.merge("all.journal", *(f"j.{i}" for i in parts))
            self.assertEqual(code, 1, err)
            self.assertIn(f"14 items, {answered} answered, {failed} failed, {missing} not run", err)
            self.assertEqual(self.counts("all.journal", 1), [14, answered, failed, missing, 0])

    def test_a_copy_without_what_was_written_last_does_not_pass_for_all(self):
        _, a = self.server(answers=6)
        suite = self.groups(12)
        args = ["run", suite, "-o", "o", "--backend", "openai-url", "--url", a, "--no-probe", "--model", "m",
                "--max-in-flight", "2", "--journal", "j"]
        running = subprocess.Popen([self.evalrt(), *args], cwd=self.dir, env=self.env(), stderr=subprocess.DEVNULL)
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        until(lambda: len(self.answered_in("o.part")) == 6)
        (self.dir / "copies").mkdir()
        for name, ends in (("bare", ("",)), ("good", ("", "-wal"))):
            for end in ends:
                subprocess.run(["cp", f"j{end}", f"copies/{name}{end}"], cwd=self.dir, check=True)
        self.assertEqual(self.counts("j", 1), [12, 6, 0, 6, 0])
        self.assertEqual(self.counts("copies/good", 1), [12, 6, 0, 6, 0])
        self.assertEqual(self.counts("copies/bare", 1)[:2], [0, 0])
        words = "or is a copy without the -wal"
        self.assertIn(words, self.report("copies/bare", code=1))
        self.assertIn(words, json.loads(self.report("--json", "copies/bare", code=1))["notes"][0])
        self.assertNotIn("-wal", self.report("j", code=1))
        # Some of it was in the file already.
        running.kill()
        running.wait()
        self.assertNotIn("-wal", self.report("j", code=1))  # which it has read
        subprocess.run(["cp", "j", "copies/half"], cwd=self.dir, check=True)
        self.assertEqual(self.counts("copies/half", 1), [12, 6, 0, 6, 0])
        self.assertIn("or this is a copy without the -wal", self.report("copies/half", code=1))
        code, err = self.merge("joined", "copies/half", "copies/bare")
        self.assertEqual(code, 1, err)
        self.assertIn("copies/bare has no run in it that has asked for anything", err)

    def test_a_part_that_has_not_begun_is_missing(self):
        _, a = self.server("a")
        suite = self.groups(12)
        self.parts(suite, a, a)
        # Killed before its first request: a journal without a run, an output with nothing in it.
        code, _, err = self.ask("http://127.0.0.1:9/v1", suite, "-o", "x", "--journal", "x.journal")
        self.assertEqual(code, 3, err)
        with contextlib.closing(sqlite3.connect(self.dir / "x.journal")) as db:
            for table in ("runs", "sessions"):
                db.execute(f"DELETE FROM {table}")
            db.commit()
        code, err = self.merge("whole.journal", "j.0", "x.journal")
        self.assertEqual(code, 1, err)
        self.assertIn("x.journal has no run in it", err)
        self.assertIn("missing shards: 1/2", err)
        code, err = self.merge("none.journal", "x.journal")
        self.assertEqual(code, 2, err)
        self.assertFalse((self.dir / "none.journal").exists())
        (self.dir / "empty").touch()
        (self.dir / "void").touch()
        code, err = self.merge("nothing", "empty", "void")
        self.assertEqual(code, 2, err)
        self.assertIn("no item in any", err)
        self.assertFalse((self.dir / "nothing").exists())
        code, err = self.merge("some", "o.0", "empty", "--suite", suite)
        self.assertEqual(code, 1, err)
        self.assertIn("empty has nothing in it", err)
        self.assertIn("6 missing", err)


class ManyParts(WithServers):
    """Of a whole cluster."""

    def test_more_parts_than_requests_each_killed_once(self):
        _, a = self.server(answers=0, then="go")
        suite = self.groups(24)
        def command(i):
            return [self.evalrt(), "run", suite, "--shard", f"{i}/32", "-o", "o.{shard}", "--journal", "j.{shard}",
                    "--backend", "openai-url", "--url", a, "--no-probe", "--model", "m"]
        parts = []
        for i in range(32):
            parts.append(subprocess.Popen(command(i), cwd=self.dir, env=self.env(), stderr=subprocess.DEVNULL))
        until(lambda: len(self.asked_of()) == 24)  # which waits for ever
        for it in parts:
            it.kill()
            it.wait()
        (self.dir / "go").touch()
        self.forget()
        for first in range(0, 32, 8):
            parts = [subprocess.Popen(command(i), cwd=self.dir, env=self.env(), stderr=subprocess.DEVNULL)
                     for i in range(first, first + 8)]
            self.assertEqual([it.wait(LONG) for it in parts], [0] * 8)
        self.assertEqual(len(self.asked_of()), 24)
        journals = sorted(self.dir.glob("j.*"))
        code, err = self.merge("all.journal", *journals)
        self.assertEqual(code, 0, err)
        self.assertIn("24 items, 24 answered, 0 failed, 0 not run", err)
        self.assertNotIn("no run in it", err)
        self.assertIn("24 of 24", self.report("all.journal"))
        code, err = self.merge("all", *sorted(self.dir.glob("o.*")), "--suite", suite)
        self.assertEqual(code, 0, err)
        self.forget()
        self.assertEqual(self.ask(a, suite, "-o", "again", "--journal", "all.journal")[0], 0)
        self.assertEqual(self.asked_of(), [])
        self.assertEqual(self.without_times("again"), self.without_times("all"))


class OneSuite(WithServers):
    """Parts and sessions are of one suite by what is in it."""

    def equal(self, count=12):
        return self.suite(*[line(f"e{i}", "count", temperature=1) for i in range(count)], name="e.jsonl")

    def answers(self, name):
        return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
                for row in self.out(name)}

    def test_answers_to_equal_requests_stay_with_their_custom_ids(self):
        _, url = self.server()
        suite = self.equal()
        self.parts(suite, url, url, url)
        of_parts = {}
        for i in range(3):
            of_parts |= self.answers(f"o.{i}")
        self.assertEqual(len(set(of_parts.values())), 12)
        missing = set(self.answers("o.1"))
        self.assertEqual(self.merge("some", "j.0", "j.2")[0], 1)
        self.assertEqual(self.merge("all", "j.2", "some", "j.1")[0], 0)  # the missing one, later
        self.forget()
        for journal, asked in (("all", 0), ("some", len(missing)), ("some", 0)):
            code, _, err = self.ask(url, suite, "-o", "o", "--journal", journal)
            self.assertEqual((code, len(self.asked_of())), (0, asked), err)
            self.forget()
            now = self.answers("o")
            self.assertEqual({id for id in now if now[id] != of_parts[id]}, missing if journal == "some" else set())

    def test_of_equal_requests_one_that_was_renamed_keeps_an_answer_that_is_no_others(self):
        _, url = self.server()
        suite = self.equal()
        self.parts(suite, url, url, url)
        self.assertEqual(self.merge("all", "j.2", "j.0", "j.1")[0], 0)
        self.forget()
        self.assertEqual(self.ask(url, suite, "-o", "o", "--journal", "all")[0], 0)
        first = self.answers("o")
        suite.write_text(suite.read_text().replace('"e3"', '"renamed"').replace('"e11"', '"another"'))
        code, _, err = self.ask(url, suite, "-o", "o", "--journal", "all")
        self.assertEqual((code, self.asked_of()), (0, []), err)
        now = self.answers("o")
        self.assertEqual({id: first[id] for id in first if id in now}, {id: now[id] for id in now if id in first})
        self.assertEqual(sorted(now.values()), sorted(first.values()))
        self.assertIn("answered 12 of 12", self.report("all"))

    def test_a_suite_that_was_edited_between_its_parts_is_not_joined(self):
        _, url = self.server()
        suite = self.groups(12)
        self.parts(suite, url, url)
        text = suite.read_text()
        # As long as it was, and cut at the same places.
        suite.write_text(text.replace(" question 11", " question xy"))
        self.assertNotEqual(suite.read_text(), text)
        for name in ("o.1", "j.1"):
            (self.dir / name).unlink()
        code, _, err = self.ask(url, suite, "-o", "o.1", "--journal", "j.1", "--shard", "1/2")
        self.assertEqual(code, 0, err)
        code, err = self.merge("whole", "j.0", "j.1")
        self.assertEqual(code, 2, err)
        self.assertIn("the suite was changed between them", err)
        self.forget()
        code, _, err = self.ask(url, suite, "-o", "o.0", "--journal", "j.0", "--shard", "0/2")
        self.assertEqual(code, 0, err)
        self.assertLessEqual(len(self.asked_of()), 1)
        self.assertEqual(self.merge("whole", "j.0", "j.1")[0], 0)
        self.forget()
        self.assertEqual(self.ask(url, suite, "-o", "o", "--journal", "whole")[0], 0)
        self.assertEqual(self.asked_of(), [])

    def test_another_spelling_or_a_copy_is_the_same_suite(self):
        _, url = self.server()
        suite = self.equal()
        (self.dir / "folder").mkdir()
        (self.dir / "folder/copy.jsonl").write_text(suite.read_text())
        (self.dir / "link.jsonl").symlink_to("e.jsonl")
        spellings = ("./e.jsonl", "folder/../e.jsonl", "link.jsonl", "folder/copy.jsonl", str(suite))
        self.parts("e.jsonl", url, url)
        for spelled in spellings:
            for name in ("o.1", "j.1"):
                (self.dir / name).unlink()
            code, _, err = self.ask(url, spelled, "-o", "o.1", "--journal", "j.1", "--shard", "1/2")
            self.assertEqual(code, 0, err)
            code, err = self.merge("whole", "j.0", "j.1")
            self.assertEqual(code, 0, spelled + err)
            (self.dir / "whole").unlink()
        self.assertEqual(self.ask(url, suite, "-o", "o", "--journal", "j")[0], 0)
        first = self.answers("o")
        self.forget()
        for spelled in spellings:
            code, _, err = self.ask(url, spelled, "-o", "o", "--journal", "j")
            self.assertEqual((code, self.asked_of()), (0, []), spelled + err)
            self.assertEqual(self.answers("o"), first)
        # The same path, edited: what is new is asked.
        suite = self.equal(13)
        self.assertEqual(self.ask(url, "link.jsonl", "-o", "o", "--journal", "j")[0], 0)
        self.assertEqual(len(self.asked_of()), 1)


class Finished(WithServers):
    """A run whose every item is in its journal needs nobody."""

    def test_it_ends_well_without_its_server(self):
        suite = self.groups(8)
        for n, more in enumerate(((), ("--no-probe",), ("--model", "m"), ("--no-probe", "--model", "m"))):
            process, url = self.server(f"s{n}", model="m")
            args = ("run", suite, "-o", f"o{n}", "--journal", f"j{n}", "--backend", "openai-url", "--url", url, *more)
            code, _, err = self.plain(*args)
            self.assertEqual(code, 0, err)
            process.kill()
            process.wait()
            first = self.without_times(f"o{n}")
            (self.dir / f"o{n}").unlink()
            code, _, err = self.plain(*args, "--json", "s")
            self.assertEqual(code, 0, err)
            self.assertIn("8 answered (8 of them from the journal)", err)
            self.assertEqual(self.without_times(f"o{n}"), first)
            self.assertEqual(json.loads((self.dir / "s").read_text())["model"], "m")
            # One more, and it does.
            longer = self.suite(*suite.read_text().splitlines(), line("new", "x"), name="longer.jsonl")
            os.replace(longer, suite)
            code, _, err = self.plain(*args)
            self.assertEqual(code, 3, err)
            self.assertEqual(len(self.held(f"j{n}")), 8)
            suite = self.groups(8)

    def test_at_an_address_that_is_not_its_own_the_journal_says_so_if_nobody_is_there(self):
        process, url = self.server(model="m")
        suite = self.groups(4)
        args = ("run", suite, "-o", "o", "--journal", "j", "--backend", "openai-url", "--url")
        self.assertEqual(self.plain(*args, url)[0], 0)
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            other = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
            code, _, err = self.plain(*args, other)
            self.assertEqual(code, 4, err)
            self.assertIn(f'url was "{url}" and is "{other}"', err)
            self.assertEqual(self.plain(*args, other, "--journal-mode", "append")[0], 3)

    def test_a_server_that_is_too_busy_to_say_what_it_is_gets_what_it_got(self):
        _, url = self.server("a", model="like-mlx")
        suite = self.suite(line("x", "x", seed=1))  # which is dropped for such a server
        args = ("run", suite, "-o", "o", "--journal", "j", "--backend", "openai-url", "--url", url, "--model", "m")
        code, _, err = self.plain(*args)
        self.assertEqual(code, 0, err)
        self.assertIn("the server is mlx-server", err)
        self.assertNotIn('"seed"', (self.dir / "a.log").read_text())
        self.forget("a")
        (self.dir / "busy-with-something").touch()
        code, _, err = self.plain(*args)
        self.assertEqual((code, self.asked_of("a")), (0, []), err)
        self.assertIn("1 answered (1 of them from the journal)", err)

    def test_a_server_that_has_another_model_now_is_another_one(self):
        process, url = self.server("a", model="m")
        suite = self.groups(4)
        args = ("run", suite, "-o", "o", "--journal", "j", "--backend", "openai-url", "--url", url)
        self.assertEqual(self.plain(*args)[0], 0)
        process.kill()
        process.wait()
        program = self.dir / "b"
        program.symlink_to(SERVER)
        other = subprocess.Popen([program, "--model", "n", "--port", url.split(":")[2].split("/")[0]],
                                 cwd=self.dir, env=self.env(), stderr=subprocess.DEVNULL)
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        until(lambda: self.listens(url))
        code, _, err = self.plain(*args)
        self.assertEqual(code, 4, err)
        self.assertIn('model was "m" and is "n"', err)

    @staticmethod
    def listens(url):
        host, port = url.split("/")[2].split(":")
        with socket.socket() as it:
            return it.connect_ex((host, int(port))) == 0


class Names(WithServers):
    """What is written where, and what is never written over."""

    def test_merging_writes_over_nothing(self):
        _, url = self.server()
        self.parts(self.groups(12), url, url)
        for parts in (("o.0", "o.1"), ("j.0", "j.1")):  # OUT forgotten: the first part is it
            before = {name: (self.dir / name).read_bytes() for name in self.files()}
            code, err = self.merge(*parts)
            self.assertEqual(code, 2, err)
            self.assertIn(f"{parts[0]} is there already", err)
            self.assertIn("evalrt merge OUT SHARD", err)
            self.assertEqual({name: (self.dir / name).read_bytes() for name in self.files()}, before)
        (self.dir / "folder").mkdir()
        for parts in (("o.0", "o.1"), ("j.0", "j.1")):
            code, err = self.merge("folder", *parts)
            self.assertEqual(code, 2, err)
            self.assertIn("folder is a folder", err)
        self.assertFalse([name for name in self.files() if name.endswith(".merging")])
        # What a merge that was killed has left beside its place is no part.
        left = ("x.merging", "x.merging-wal", "x.merging.new", "x.merging.new-journal", "x.merging.lock")
        for name in left:
            (self.dir / name).write_text("half")
        for parts in (("o.0", "o.1"), ("j.0", "j.1")):
            code, err = self.merge("x", *parts, *left)
            self.assertEqual(code, 0, err)
            (self.dir / "x").unlink()
        self.assertEqual(self.files() & {"x.merging", "x.merging-wal", "x.merging.new-journal"}, set())
        # Nor is it a way to another file.
        for parts in (("o.0", "o.1"), ("j.0", "j.1")):
            for there in ("nothing", "kept"):
                (self.dir / "kept").write_text("kept")
                (self.dir / "x.merging").symlink_to(there)
                code, err = self.merge("x", *parts)
                self.assertEqual(code, 0, err)
                self.assertEqual((self.dir / "kept").read_text(), "kept")
                self.assertFalse({"nothing", "x.merging"} & self.files())
                self.assertFalse((self.dir / "x").is_symlink())
                (self.dir / "x").unlink()
        # But it may be one.
        for part in ("o.0", "j.0"):
            (self.dir / "x.merging").write_bytes((self.dir / part).read_bytes())
            code, err = self.merge("x", "x.merging", part[0] + ".1")
            self.assertEqual(code, 2, err)
            self.assertIn("x.merging is where x would be made", err)
            (self.dir / "x.merging").unlink()
        # Nor is what a part has made that is only beginning.
        (self.dir / "j.2.lock").write_text("123\n")
        code, err = self.merge("x", "j.0", "j.1", "j.2.lock")
        self.assertEqual(code, 0, err)
        self.assertIn("j.2.lock has no journal beside it yet", err)
        self.report("j.0", "j.1", "j.2.lock", code=1)
        (self.dir / "o.2.lock").write_text((self.dir / "o.0").read_text())  # of that name
        self.assertEqual(self.merge("y", "o.2.lock", "o.1")[0], 0)

    def test_of_two_merges_at_once_one_writes(self):
        _, url = self.server()
        self.parts(self.groups(40), url, url)
        for parts in (("o.0", "o.1"), ("j.0", "j.1")):
            for _ in range(8):
                both = [
                    subprocess.Popen(
                        [self.evalrt(), "merge", "x", *parts], cwd=self.dir, stderr=subprocess.PIPE, text=True
                    )
                    for _ in range(2)
                ]
                said = [it.communicate()[1] for it in both]
                self.assertEqual(sorted(it.returncode for it in both), [0, 2], said)
                late = said[[it.returncode for it in both].index(2)]
                self.assertIn("x is there already", late)
                self.assertFalse([name for name in self.files() if "merging" in name])
                (self.dir / "x").unlink()

    def test_what_does_not_fit_leaves_nothing_behind(self):
        _, url = self.server()
        self.parts(self.groups(12), url, url)
        small = self.small_disk("tiny", "-o", "size=4k")
        for parts in (("o.0", "o.1"), ("j.0", "j.1")):
            code, err = self.merge(small / "x", *parts)
            self.assertEqual(code, 4, err)
            self.assertEqual(os.listdir(small), [])

    def test_outputs_go_to_standard_output_and_through_pipes(self):
        _, url = self.server()
        suite = self.groups(12)
        self.parts(suite, url, url)
        self.assertEqual(self.merge("file", "o.0", "o.1")[0], 0)
        text = (self.dir / "file").read_text()
        for name in ("-", "/dev/stdout"):
            code, out, err = self.plain("merge", name, "o.0", "o.1")
            self.assertEqual((code, out), (0, text), err)
            code, _, err = self.plain("merge", name, "j.0", "j.1")
            self.assertEqual(code, 2, err)
            self.assertIn("give a file", err)
        os.mkfifo(self.dir / "pipe")
        with subprocess.Popen(["cat", "pipe"], cwd=self.dir, stdout=subprocess.PIPE, text=True) as reader:
            code, err = self.merge("pipe", "o.0", "o.1")
            self.assertEqual(code, 0, err)
            self.assertEqual(reader.communicate(timeout=LONG)[0], text)
        self.assertTrue((self.dir / "pipe").is_fifo())
        # A link stays one, and what it names is written.
        (self.dir / "link").symlink_to("behind")
        self.assertEqual(self.merge("link", "o.0", "o.1")[0], 0)
        self.assertTrue((self.dir / "link").is_symlink())
        self.assertEqual((self.dir / "behind").read_text(), text)
        # What a shell has opened is added to.
        for command in (("merge", "/dev/stdout", "o.0", "o.1"),
                        ("run", suite, "-o", "/dev/stdout", "--backend", "openai-url", "--url", url)):
            (self.dir / "log").write_text("before\n")
            with open(self.dir / "log", "a") as log:
                done = subprocess.run([self.evalrt(), *map(str, command)], cwd=self.dir, stdout=log,
                                      stderr=subprocess.PIPE, env=self.env(), text=True, timeout=LONG)
            self.assertEqual(done.returncode, 0, done.stderr)
            first, *rows = (self.dir / "log").read_text().splitlines()
            self.assertEqual((first, len(rows)), ("before", 12))
        for option in ("--json", "--journal", "--explain"):
            self.assertEqual(self.ask(url, suite, option, "-")[0], 2)
        self.assertNotIn("-", self.files())
        # What could be read once only is no part.
        code, err = self.merge("joined", "pipe", "o.0")
        self.assertEqual(code, 2, err)

    def test_an_empty_value_is_a_mistake(self):
        suite = self.groups(4)
        for option in ("--shard", "--url", "--journal", "-o", "--model", "--json", "--explain", "--api-key-file",
                       "--ca-file", "--executable"):
            code, _, err = self.plain("run", suite, "--backend", "openai-url", "--url", "http://127.0.0.1:9/v1",
                                      option, "")
            self.assertEqual(code, 2, err)
            self.assertRegex(err, "is given an empty value", option)
            self.assertIn(option if option != "-o" else "--output", err)
            if option != "-o":
                code, _, err = self.plain("run", suite, "--backend", "openai-url", option + "=", "x")
                self.assertEqual(code, 2, err)
                self.assertIn(option + " is given an empty value", err)
        self.assertEqual(self.plain("run", suite, "-o=")[0], 2)
        self.assertEqual(self.plain("run", "")[0], 2)
        self.assertEqual(self.plain("merge", "", "x")[0], 2)
        self.assertEqual(self.plain("merge", "out", suite, "--suite", "")[0], 2)

    def test_a_part_does_not_write_over_another_ones_output(self):
        _, url = self.server()
        suite = self.groups(12)
        self.assertEqual(self.ask(url, suite, "-o", "o", "--shard", "0/2")[0], 0)
        self.assertEqual(self.ask(url, suite, "-o", "o", "--shard", "0/2")[0], 0)  # its own
        text = (self.dir / "o").read_text()
        self.forget()
        code, _, err = self.ask(url, suite, "-o", "o", "--shard", "1/2")
        self.assertEqual((code, self.asked_of()), (2, []))
        self.assertIn("has answers of another part", err)
        self.assertEqual((self.dir / "o").read_text(), text)
        # The number of a part is none without parts.
        for more in (("-o", "x.{shard}"), ("--journal", "x.{shard}"), ("--json", "x.{shard}"),
                     ("--explain", "x.{shard}")):
            code, _, err = self.ask(url, suite, *more)
            self.assertEqual(code, 2, err)
            self.assertIn(f"{more[0]} x.{{shard}}: {{shard}} is the number of a part, and needs --shard", err)

    def test_an_output_that_is_being_written_is_not_anothers(self):
        _, url = self.server(answers=2)
        suite = self.groups(12)
        args = ["run", suite, "--backend", "openai-url", "--url", url, "--no-probe", "--model", "m", "-o", "o",
                "--shard"]
        running = subprocess.Popen([self.evalrt(), *args, "0/2", "--journal", "j.0"], cwd=self.dir, env=self.env(),
                                   stderr=subprocess.DEVNULL)
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        until(lambda: self.held("j.0") if (self.dir / "j.0").exists() else [])
        until(lambda: self.answered_in("o.part"))
        (self.dir / "j.1").write_bytes(b"")
        code, _, err = self.plain(*args, "1/2", "--journal", "j.1")
        self.assertEqual(code, 2, err)
        self.assertIn("o.part is being written by another run", err)
        running.kill()
        running.wait()
        self.assertTrue(self.answered_in("o.part"))

    def test_quiet_is_quiet(self):
        _, url = self.server()
        code, _, err = self.ask(url, self.groups(12), "-o", "o", "--shard", "0/2", "--max-tokens", "5", "--quiet")
        self.assertEqual((code, err), (0, ""))

    def test_what_is_computed_again_is_said_in_figures_that_can_be(self):
        suite = self.groups(24, groups=1)
        code, out, _ = self.ask("http://127.0.0.1:9/v1", suite, "--dry-run", "--shard", "0/24")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"computed again for the cuts \([\d,]+ % more\)")
        _, url = self.server()
        code, _, err = self.ask(url, suite, "-o", "o", "--shard", "0/24")
        self.assertEqual(code, 0, err)
        self.assertRegex(err, r"for the cuts about [\d,]+ prompt tokens are computed again in all shards, beside")


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
        # A gap is missing, and two categories are not one.
        code, err = self.merge("gap_result.json", paths[0], paths[2])
        self.assertEqual(code, 1, err)
        self.assertRegex(err, r"8 rows of simple_python, [1-4] missing")
        (self.dir / "multiple_result.json").write_text('{"id": "multiple_0", "result": "x"}\n')
        code, err = self.merge("mixed_result.json", paths[0], "multiple_result.json")
        self.assertEqual(code, 2, err)
        self.assertIn("one category at a time", err)
        # Answered otherwise in two parts: refused.
        text = paths[0].read_text()
        (self.dir / "other_result.json").write_text(text.replace("answer to", "no answer to"))
        code, err = self.merge("refused.json", paths[0], "other_result.json")
        self.assertEqual(code, 2)
        self.assertIn("otherwise", err)
        # A row that was cut off is not passed over in silence.
        (self.dir / "cut_result.json").write_text(text + '{"id": "simple_py')
        code, err = self.merge("uncut.json", "cut_result.json", *paths[1:])
        self.assertEqual(code, 1, err)
        self.assertIn("cut_result.json:5 is cut off, and left out", err)

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

    def test_servers_of_other_models_are_no_replicas_and_each_is_given_once(self):
        (_, a), (_, b), (_, c) = self.server("a"), self.server("b", model="n"), self.server("c")
        suite = self.groups(8)
        for more in ((), ("--model", self.model), ("--no-probe",), ("--model", "anything")):
            code, _, err = self.plain("run", suite, "-o", "o", "--backend", "openai-url", "--url", a, "--url", b, *more)
            self.assertEqual(code, 2, err)
            self.assertIn(f'{b} serves "n", and not the "{self.model}" of the first', err)
        self.assertEqual((self.asked_of("a"), self.asked_of("b")), ([], []))
        code, _, err = self.plain("run", suite, "-o", "o", "--backend", "openai-url", "--url", a, "--url", c)
        self.assertEqual(code, 0, err)
        for command in (("run", suite), ("gateway",)):
            code, _, err = self.plain(*command, "--backend", "openai-url", "--url", a, "--url", a + "/")
            self.assertEqual(code, 2, err)
            self.assertIn(f"the address {a} is given twice", err)
            code, _, err = self.plain(*command, "--backend", "openai-url", "--url", a, "--url",
                                      a.replace("127.0.0.1", "localhost"))
            self.assertEqual(code, 2, err)
            self.assertIn(f"the address {a} is given twice", err)

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

    def late(self, name, port, model, **env):
        """A server at this port, once it is there."""
        program = self.dir / name
        program.symlink_to(SERVER)
        process = subprocess.Popen([sys.executable, program, "--model", model, "--port", str(port)], cwd=self.dir,
                                   env=self.env() | env, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        until(lambda: answers(f"http://127.0.0.1:{port}/v1/models"))
        return process

    def compared(self, suite, *urls):
        """A run that looks at the models."""
        args = [part for url in urls for part in ("--url", url)]
        process = subprocess.Popen([self.evalrt(), "run", str(suite), "--backend", "openai-url", *args, "-o", "o",
                                    "--max-in-flight", "2", "--json", "s"], cwd=self.dir, env=self.env(), text=True,
                                   stderr=subprocess.PIPE)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def said(self, process, *words):
        """Its lines up to one that has all these words."""
        lines = ""
        for row in process.stderr:
            lines += row
            if all(word in row for word in words):
                return lines
        self.fail(f"{words} were not said: {lines}")

    def all_answered(self, process, count):
        err = process.stderr.read()
        self.assertEqual(process.wait(LONG), 0, err)
        self.assertEqual([row["custom_id"] for row in self.out()], [f"item-{i}" for i in range(count)])
        self.assertTrue(all(row["error"] is None for row in self.out()))
        return json.loads((self.dir / "s").read_text())["notes"]

    def test_one_that_comes_late_serves_the_model_of_the_run_or_is_left_out(self):
        _, a = self.server("a", answers=4, then="go")
        ports = free_port(), free_port()
        right, wrong = (f"http://127.0.0.1:{port}/v1" for port in ports)
        process = self.compared(self.groups(40), a, right, wrong)
        for url in (right, wrong):
            self.said(process, url, "begins without it")
        self.late("b", ports[0], self.model)
        self.late("c", ports[1], "n")
        self.said(process, wrong, f'serves "n", and not the "{self.model}" of the first')
        until(lambda: self.asked_of("b"))
        (self.dir / "go").touch()
        notes = " ".join(self.all_answered(process, 40))
        self.assertRegex(notes, rf'{wrong}: nothing was asked of it; it is left out: serves "n", and not the "{self.model}"')
        self.assertEqual(self.asked_of("c"), [])

    def test_one_that_comes_back_with_another_model_is_left_out(self):
        _, a = self.server("a", answers=4, then="go")
        port = free_port()
        url = f"http://127.0.0.1:{port}/v1"
        dying = self.late("b", port, self.model, FAKE_OPENAI_GATE="2 never")
        process = self.compared(self.groups(40), a, url)
        until(lambda: len(self.asked_of("b")) == 4)
        dying.kill()
        dying.wait()
        self.said(process, url, "it is left out, and looked at again")
        self.late("c", port, "n")
        self.said(process, url, f'serves "n", and not the "{self.model}" of the first')
        (self.dir / "go").touch()
        self.all_answered(process, 40)
        self.assertEqual(self.asked_of("c"), [])

    def test_one_that_hangs_while_it_is_looked_at_keeps_nobody_from_another(self):
        _, a = self.server("a", answers=4, then="go")
        ports = free_port(), free_port()
        hangs, right = (f"http://127.0.0.1:{port}/v1" for port in ports)
        process = self.compared(self.groups(40), a, hangs, right)
        for url in (hangs, right):
            self.said(process, url, "begins without it")
        with socket.create_server(("127.0.0.1", ports[0])) as listener:
            looks = [listener.accept()[0]]
            self.late("b", ports[1], self.model)
            until(lambda: self.asked_of("b"))
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    looks.append(listener.accept()[0])
            looks[-1].setblocking(False)
            with self.assertRaises(BlockingIOError):  # nobody has given it up
                while looks[-1].recv(4096):
                    pass
            (self.dir / "go").touch()
            self.all_answered(process, 40)
            for it in looks:
                it.close()

    def test_when_all_are_away_the_run_waits_for_one_to_come_back(self):
        ports = free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
        dying = [self.late(name, port, self.model, FAKE_OPENAI_GATE="2 never") for name, port in zip("ab", ports)]
        process = self.compared(self.groups(40), *urls)
        until(lambda: len(self.asked_of("a")) == len(self.asked_of("b")) == 4)
        for it in dying:
            it.kill()
            it.wait()
        for _ in urls:
            self.said(process, "it is left out, and looked at again")
        self.late("c", ports[0], "n")  # of another model: it is not asked, though there is no other
        self.said(process, urls[0], 'serves "n"')
        self.late("d", ports[1], self.model)
        self.all_answered(process, 40)
        self.assertEqual(self.asked_of("c"), [])
        self.assertEqual(len(self.asked_of("d")), 36)

    def test_one_that_is_not_well_at_first_is_done_without(self):
        _, a = self.server("a")
        suite = self.groups(12)
        for status, reason in (("404", "bad replica 404"), ("500", "bad replica 500"), ("401", "bad replica 401"),
                               ("503", "bad replica 503"), ("0", "")):
            _, sick = self.server("b" + status, model="sick-" + status)
            self.forget("a")
            process = self.both(suite, a, sick)
            _, err = process.communicate(timeout=LONG)
            self.assertEqual(process.returncode, 0, err)
            self.assertRegex(err, rf"{sick}: .*{reason}.*; the run begins without it")
            self.assertEqual((len(self.asked_of("a")), self.asked_of("b" + status)), (12, []))

    def test_one_that_only_fails_swallows_nothing_and_stops_nothing(self):
        suite = self.groups(40)
        for status in ("400", "404", "500", "401", "0"):
            _, a = self.server("a" + status, answers=2, then="go" + status)
            _, b = self.server("b" + status, model="fails-" + status)
            process = self.both(suite, a, b, more=("--retries", "0"))
            self.said(process, b, "; it is left out, and looked at again")
            self.assertIn(len(self.asked_of("b" + status)), range(3, 17))  # what was under way
            (self.dir / ("go" + status)).touch()
            _, err = process.communicate(timeout=LONG)
            self.assertEqual(process.returncode, 0, err)
            self.assertEqual(len(self.asked_of("a" + status)), 40)
            self.assertTrue(all(row["error"] is None for row in self.out()))

    def test_the_first_that_refuses_everything_is_left_out_and_said_to(self):
        for status in ("400", "422", "ctx"):
            _, a = self.server("a" + status, model="fails-" + status)
            _, b = self.server("b" + status)
            process = self.both(self.groups(40), a, b)
            _, err = process.communicate(timeout=LONG)
            self.assertEqual(process.returncode, 0, err)
            self.assertTrue(all(row["error"] is None for row in self.out()))
            self.assertRegex(err, f"{a}: it refuses one request after the other: .*; it is left out")
            self.assertEqual(len(self.asked_of("b" + status)), 40)

    def test_one_that_begins_to_refuse_what_others_answer_takes_nothing_with_it(self):
        for status in ("400", "ctx"):
            _, a = self.server("a" + status)
            _, b = self.server("b" + status, model="turns-" + status)
            process = self.both(self.groups(60), a, b, more=("--json", "s"))
            _, err = process.communicate(timeout=LONG)
            self.assertEqual(process.returncode, 0, err)
            self.assertTrue(all(row["error"] is None for row in self.out()))
            asked = self.asked_of("b" + status)
            self.assertLessEqual(len(asked), 5 + 20)
            note = [it for it in json.loads((self.dir / "s").read_text())["notes"] if it.startswith(f"{b}: 5 ans")]
            self.assertRegex(note[0], f"it refused {len(asked) - 5} that another one answered")

    def test_what_no_server_takes_fails_once_and_costs_one_request_more(self):
        (_, a), (_, b) = self.server("a"), self.server("b")
        rows = [line(f"item-{i}", "fail" if i % 10 == 5 else f"question {i}") for i in range(40)]
        process = self.both(self.suite(*rows), a, b, more=("--json", "s"))
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 1, err)
        failed = [row for row in self.out() if row["error"]]
        self.assertEqual([row["custom_id"] for row in failed], [f"item-{i}" for i in (5, 15, 25, 35)])
        for row in failed:
            self.assertIn("this one is refused", row["error"]["message"])
        self.assertEqual((self.asked_of("a").count("fail"), self.asked_of("b").count("fail")), (4, 4))
        self.assertEqual(len(self.asked_of("a") + self.asked_of("b")), 44)
        self.assertEqual(json.loads((self.dir / "s").read_text())["failures"], {"rejected": 4})

    def test_a_key_that_no_server_takes_stops_the_run(self):
        (_, a), (_, b) = self.server("a", model="fails-401"), self.server("b", model="fails-401")
        process = self.both(self.groups(40), a, b)
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 5, err)
        self.assertIn("refuses the key", err)
        self.assertLess(len(self.asked_of("a") + self.asked_of("b")), 20)


if __name__ == "__main__":
    unittest.main(verbosity=1)
