#!/usr/bin/env python3
"""evalrt --journal from outside: kills, full disks, refusals, and what resuming asks for.

    journal.py EVALRT_PROGRAM [--kills N]

N is how many random moments the kill tests try (default 6).
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

KILLS = 6
if "--kills" in sys.argv:
    at = sys.argv.index("--kills")
    KILLS = int(sys.argv[at + 1])
    del sys.argv[at:at + 2]
EVALRT = os.path.abspath(sys.argv.pop(1))
SUPPORT = Path(__file__).resolve().parent.parent / "support"
SERVER = SUPPORT / "fake_openai.py"
SANITIZED = "SANITIZED" in os.environ
sys.path.insert(0, str(SUPPORT))

from patience import LONG, fake_openai, until  # noqa: E402


def line(custom_id, question, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
                       "body": {"messages": [{"role": "user", "content": question}],
                                "temperature": 0, **body}})


class Base(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        self.log = self.dir / "asked"
        self.model = f"model-{os.getpid()}-{id(self)}"

    def tearDown(self):
        try:
            until(lambda: not self.servers(), 60)
        except AssertionError:
            self.fail(f"a server was left behind: {self.servers()}")

    def servers(self):
        out = subprocess.run(["ps", "-axo", "pid=,command="], capture_output=True, text=True).stdout
        return [int(row.split()[0]) for row in out.splitlines()
                if str(SERVER) in row and self.model in row]

    def env(self):
        env = dict(os.environ, FAKE_OPENAI_LOG=str(self.log))
        env.pop("OPENAI_API_KEY", None)
        return env

    def start(self, *args, before=(), **more):
        return subprocess.Popen([*map(str, before), EVALRT, *map(str, args)], cwd=self.dir,
                                env=self.env(), text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)

    def run_program(self, *args, **more):
        process = self.start(*args, **more)
        out, err = process.communicate(timeout=LONG)
        return process.returncode, out, err

    def own(self, model=None):
        return ("--backend", "mlx-server", "--executable", SERVER, "--model", model or self.model)

    def run_suite(self, suite, *more, model=None, **options):
        return self.run_program("run", suite, "-o", "o", *self.own(model), "--journal", "j", *more,
                                **options)

    @contextlib.contextmanager
    def running_server(self):
        """The address of one that evalrt does not start."""
        server, url = fake_openai("--model", self.model, env=self.env())
        try:
            yield url
        finally:
            server.kill()
            server.wait()

    def small_disk(self, name, *options):
        folder = self.dir / name
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder]).returncode:
            self.skipTest("cannot mount a tmpfs")
        self.addCleanup(subprocess.run, ["umount", "-l", folder])
        return folder

    def remount_read_only(self, folder):
        """As soon as nobody has a file there open to write any more."""
        until(lambda: subprocess.run(["mount", "-o", "remount,ro", folder],
                                     stderr=subprocess.DEVNULL).returncode == 0)

    def suite(self, *lines, name="suite.jsonl"):
        path = self.dir / name
        path.write_text("\n".join(lines) + "\n")
        return path

    def asked(self):
        """The questions that reached the server, and which are forgotten then."""
        if not self.log.exists():
            return []
        rows = [json.loads(row) for row in self.log.read_text().splitlines() if row.endswith("}")]
        self.log.unlink()
        return [row["body"]["messages"][-1]["content"] for row in rows
                if row.get("body", {"max_tokens": 1}).get("max_tokens") != 1]

    def out(self, name="o"):
        return [json.loads(row) for row in (self.dir / name).read_text().splitlines()]

    def without_times(self, name="o"):
        rows = self.out(name)
        for row in rows:
            for key in ("queued_ms", "first_text_ms", "total_ms", "from_journal"):
                row["evalrt"].pop(key)
        return [json.dumps(row) for row in rows]

    def answered_in(self, part):
        """custom_ids of the answers that the program has written out."""
        path = self.dir / part
        if not path.exists():
            return set()
        whole = path.read_bytes().split(b"\n")[:-1]
        rows = [json.loads(row) for row in whole]
        return {row["custom_id"] for row in rows if row["error"] is None}

    def held(self, path="j"):
        """Items of the journal with an answer, as anybody with SQLite sees them."""
        with contextlib.closing(sqlite3.connect(self.dir / path)) as db:
            rows = db.execute("SELECT i.name, count(*) FROM items i JOIN outcomes o ON o.item = i.id "
                              "WHERE o.failure IS NULL GROUP BY i.id").fetchall()
        self.assertTrue(all(count == 1 for _, count in rows), "answered more than once")
        return [name for name, _ in rows]


class Resume(Base):
    def test_a_second_run_asks_nothing_starts_no_server_and_writes_the_same(self):
        suite = self.suite(*(line(f"q{i}", f"question {i}") for i in range(40)))
        code, _, err = self.run_suite(suite)
        self.assertEqual(code, 0, err)
        first = self.without_times()
        self.assertEqual(sorted(self.asked()), sorted(f"question {i}" for i in range(40)))
        code, _, err = self.run_suite(suite, "--json", "s")
        self.assertEqual(code, 0, err)
        self.assertFalse(self.log.exists(), "the server was started")
        self.assertIn("40 answered (40 of them from the journal)", err)
        self.assertEqual(self.without_times(), first)
        self.assertTrue(all(row["evalrt"]["from_journal"] for row in self.out()))
        summary = json.loads((self.dir / "s").read_text())
        self.assertEqual((summary["answered"], summary["from_journal"]), (40, 40))
        self.assertEqual(summary["cached_tokens"]["actual"], 800)
        self.assertIsNone(summary["requests_per_second"])
        self.assertEqual(sorted(set(os.listdir(self.dir)) - {"asked.arguments"}), ["j", "o", "s", "suite.jsonl"])

    def test_equal_requests_are_items_of_their_own(self):
        suite = self.suite(*(line(f"q{i}", "the same") for i in range(5)))
        self.assertEqual(self.run_suite(suite)[0], 0)
        self.assertEqual(len(self.asked()), 5)
        self.suite(*(line(f"q{i}", "the same") for i in range(7)))
        self.assertEqual(self.run_suite(suite)[0], 0)
        self.assertEqual(len(self.asked()), 2)
        self.assertEqual(len(self.out()), 7)

    def test_failed_items_are_tried_again_and_only_they(self):
        lines = [line(f"q{i}", f"{i}") for i in range(10)] + [line(f"f{i}", f"fail once {i}")
                                                              for i in range(3)]
        suite = self.suite(*lines)
        code, _, err = self.run_suite(suite, "--retries", "0")
        self.assertEqual(code, 1, err)
        self.assertEqual(sum(row["error"] is not None for row in self.out()), 3)
        (self.dir / "failed-once").touch()
        self.asked()
        code, _, err = self.run_suite(suite, "--retries", "0")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(self.asked()), [f"fail once {i}" for i in range(3)])
        self.assertEqual([row["custom_id"] for row in self.out()],
                         [json.loads(row)["custom_id"] for row in lines])

    def test_final_failures_are_served_and_can_be_chosen(self):
        suite = self.suite(line("a", "x"), line("b", "fail"))
        self.assertEqual(self.run_suite(suite)[0], 1)
        self.asked()
        code, _, err = self.run_suite(suite, "--journal-final", "rejected")
        self.assertEqual(code, 1, err)
        self.assertFalse(self.log.exists())
        self.assertIn("this one is refused", self.out()[1]["error"]["message"])
        self.assertEqual(self.out()[1]["response"]["status_code"], 400)
        code, _, err = self.run_suite(suite, "--journal-final", "nonsense")
        self.assertEqual(code, 2)
        self.assertIn("'nonsense'", err)

    def test_an_interrupted_run_goes_on_with_the_same_command(self):
        suite = self.suite(line("quick", "x"), line("slow", "hold"))
        process = self.start("run", suite, "-o", "o", *self.own(), "--journal", "j")
        until(lambda: self.answered_in("o.part"))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("interrupted: 1 of 2 answered in j; the same command asks for the rest", err)
        self.asked()
        self.suite(line("quick", "x"), line("slow", "sleep 0"))
        code, _, err = self.run_suite(suite)
        self.assertEqual(code, 0, err)
        self.assertEqual(self.asked(), ["sleep 0"])
        self.assertEqual([row["custom_id"] for row in self.out()], ["quick", "slow"])

    def test_a_run_that_was_killed_before_it_had_a_journal(self):
        suite = self.suite(line("a", "x"))
        (self.dir / "o.part").touch()
        code, _, err = self.run_suite(suite)
        self.assertEqual(code, 0, err)
        self.assertEqual(len(self.out()), 1)

    def test_a_later_run_is_served_at_temperature_0_only_unless_told_to(self):
        self.suite(line("a", "zero"), line("b", "warm", temperature=0.7))
        self.assertEqual(self.run_suite("suite.jsonl")[0], 0)
        self.asked()
        other = self.suite(line("x", "warm", temperature=0.7), line("y", "zero"), line("z", "new"),
                           name="other.jsonl")
        code, _, err = self.run_suite(other)
        self.assertEqual(code, 0, err)
        self.assertIn("3 answered (1 of them from the journal)", err)
        self.assertEqual(sorted(self.asked()), ["new", "warm"])
        self.assertEqual([row["evalrt"]["from_journal"] for row in self.out()],
                         [False, True, False])
        self.assertEqual(self.run_suite(other, "--journal-mode", "append")[0], 0)
        self.assertEqual(sorted(self.asked()), ["warm"])
        self.assertEqual(self.run_suite(other, "--journal-mode", "append", "--journal-sampled")[0], 0)
        self.assertEqual(self.asked(), [])

    def test_parity_asks_past_the_journal(self):
        suite = self.suite(*(line(f"q{i}", f"{i}") for i in range(10)))
        self.assertEqual(self.run_suite(suite)[0], 0)
        self.asked()
        code, _, err = self.run_suite(suite, "--parity", "4")
        self.assertEqual(code, 0, err)
        self.assertIn("parity: 4 of 4", err)
        self.assertEqual(len(self.asked()), 4)

    def test_with_a_url_a_finished_run_asks_the_server_for_no_answer(self):
        suite = self.suite(line("a", "x"))
        with self.running_server() as url:
            args = ("run", suite, "-o", "o", "--backend", "openai-url", "--url", url, "--journal", "j")
            code, _, err = self.run_program(*args)
            self.assertEqual(code, 0, err)
            self.asked()
            code, _, err = self.run_program(*args)
            self.assertEqual(code, 0, err)
            self.assertFalse(self.log.exists())


class Bfcl(Base):
    def setUp(self):
        super().setUp()
        function = {"name": "f", "description": "d",
                    "parameters": {"type": "dict", "properties": {}, "required": []}}
        with open(self.dir / "BFCL_v4_simple_python.json", "w") as file:
            for i in range(6):
                file.write(json.dumps({"id": f"simple_python_{i}", "function": [function], "question": [
                    [{"role": "user", "content": "fail once" if i == 3 else f"{i}"}]]}) + "\n")

    def bfcl(self, *args):
        return self.run_program("bfcl", "simple_python", "--bfcl-data", self.dir, *self.own(),
                                "--journal", "j", "--retries", "0", *args)

    def rows(self):
        path = next(self.dir.rglob("*_result.json"))
        return {row["id"]: row["result"] for row in map(json.loads, path.read_text().splitlines())}

    def test_the_journal_is_what_is_gone_on_with(self):
        code, _, err = self.bfcl("--limit", "5")
        self.assertEqual(code, 1, err)
        first = self.rows()
        self.assertEqual(sorted(first), [f"simple_python_{i}" for i in (0, 1, 2, 4)])
        self.asked()
        (self.dir / "failed-once").touch()
        shutil.rmtree(self.dir / "result")  # all that was in it is in the journal
        code, _, err = self.bfcl()
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(self.asked()), ["5", "fail once"])
        rows = self.rows()
        self.assertEqual(len(rows), 6)
        self.assertEqual({id: rows[id] for id in first}, first)
        code, _, err = self.bfcl("--mode", "fc")
        self.assertEqual(code, 4, err)
        self.assertIn('mode was "prompt" and is "fc"', err)


class Report(Base):
    def report(self, *args, code=0):
        got, out, err = self.run_program("report", *args)
        self.assertEqual(got, code, out + err)
        return out

    def test_a_journal_and_a_run_summary_say_the_same(self):
        suite = self.suite(*(line(f"q{i}", f"{i}") for i in range(8)), line("bad", "fail"))
        self.assertEqual(self.run_suite(suite, "--json", "s")[0], 1)
        words = "answered 8 of 9 (88.9 %), failed 1 (1 rejected), not run 0"
        for path in ("j", "s"):
            self.assertIn(words, self.report(path, code=1))
        of_journal, of_summary = json.loads(self.report("j", "s", "--json", code=1))
        for name in ("backend", "requests", "answered", "failed", "not_run", "failures", "attempts",
                     "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms", "server_version"):
            self.assertEqual(of_journal[name], of_summary[name], name)
        self.assertIsNone(of_journal["max_in_flight"])
        self.assertGreater(of_journal["wall_seconds"], 0)
        journal = of_journal["journal"]
        self.assertEqual((journal["sessions"], journal["runs"], journal["pid"]), (1, 1, None))
        self.assertEqual(journal["config"]["model"], self.model)

    def test_totals_after_a_resume_are_those_of_the_whole_run(self):
        suite = self.suite(*(line(f"q{i}", f"fail once {i}" if i % 2 else f"{i}") for i in range(8)))
        self.assertEqual(self.run_suite(suite, "--retries", "0")[0], 1)
        self.assertIn("answered 4 of 8 (50.0 %), failed 4 (4 rejected), not run 0",
                      self.report("j", code=1))
        (self.dir / "failed-once").touch()
        self.assertEqual(self.run_suite(suite, "--retries", "0")[0], 0)
        self.assertIn("answered 8 of 8 (100.0 %), failed 0, not run 0", self.report("j"))
        summary = json.loads(self.report("j", "--json"))
        self.assertEqual((summary["answered"], summary["attempts"], summary["from_journal"]), (8, 8, 0))
        self.assertEqual(summary["journal"]["sessions"], 2)

    def test_a_report_while_the_run_goes_on(self):
        self.suite(line("quick", "x"), line("slow", "hold"))
        process = self.start("run", "suite.jsonl", "-o", "o", *self.own(), "--journal", "j")
        until(lambda: self.answered_in("o.part"))
        out = self.report("j", code=1)
        self.assertIn("answered 1 of 2 (50.0 %), failed 0, not run 1", out)
        self.assertIn(f"the process {process.pid} writes to it", out)
        summary = json.loads(self.report("j", "--json", code=1))
        self.assertEqual([summary[name] for name in ("requests", "answered", "failed", "not_run")],
                         [2, 1, 0, 1])
        self.assertEqual(summary["journal"]["pid"], process.pid)
        process.kill()
        process.communicate(timeout=LONG)
        out = self.report("j", code=1)
        self.assertIn("answered 1 of 2", out)
        self.assertNotIn("writes to it", out)

    def test_what_an_earlier_version_of_the_suite_had_is_no_item_of_the_run(self):
        suite = self.suite(*(line(f"q{i}", f"{i}") for i in range(6)))
        self.assertEqual(self.run_suite(suite)[0], 0)
        self.suite(*(line(f"q{i}", f"{i}" if i else "another") for i in range(4)))
        self.asked()
        self.assertEqual(self.run_suite(suite)[0], 0)
        self.assertEqual(self.asked(), ["another"])
        out = self.report("j")
        self.assertIn("answered 4 of 4 (100.0 %)", out)
        self.assertIn("3 items of earlier versions of the suite are left out", out)
        self.assertEqual(json.loads(self.report("j", "--json"))["journal"]["earlier"], 3)
        # They are kept: back in the suite, nothing is asked.
        self.suite(*(line(f"q{i}", f"{i}") for i in range(6)))
        self.assertEqual(self.run_suite(suite)[0], 0)
        self.assertEqual(self.asked(), [])
        self.assertIn("answered 6 of 6 (100.0 %)", self.report("j"))

    def test_a_journal_that_cannot_be_written_beside(self):
        folder = self.small_disk("kept")
        suite = self.suite(line("quick", "x"), line("slow", "hold"))
        process = self.start("run", suite, "-o", "o", *self.own(), "--journal", folder / "j")
        until(lambda: self.answered_in("o.part"))
        process.kill()  # its last answers are beside the file
        process.communicate(timeout=LONG)
        self.assertGreater((folder / "j-wal").stat().st_size, 0)
        self.remount_read_only(folder)
        self.assertIn("answered 1 of 2", self.report(folder / "j", code=1))
        (self.dir / "j%1").write_bytes((folder / "j").read_bytes())
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        self.suite(line("quick", "x"))
        self.assertEqual(self.run_program("run", suite, "-o", "o", *self.own(), "--journal",
                                          folder / "j")[0], 0)
        for end in ("-wal", "-shm"):
            (folder / f"j{end}").unlink(missing_ok=True)
        (folder / "j").rename(folder / "j%1 ?")
        self.remount_read_only(folder)
        self.assertIn("answered 1 of 1", self.report(folder / "j%1 ?"))

    def test_standard_output_that_is_closed(self):
        suite = self.suite(line("quick", "x"))
        self.assertEqual(self.run_suite(suite)[0], 0)
        self.asked()
        for args, code in ((("report", "j"), 4), (("backends",), 4),
                           (("run", suite, *self.own()), 2)):
            got = subprocess.run(["sh", "-c", '"$@" >&-', "sh", EVALRT, *map(str, args)], cwd=self.dir,
                                 env=self.env(), capture_output=True, text=True, timeout=LONG)
            self.assertEqual(got.returncode, code, got.stderr)
            self.assertIn("standard output", got.stderr)
        self.assertEqual(self.asked(), [])

    def test_what_is_neither_is_refused(self):
        (self.dir / "text").write_text("hello")
        (self.dir / "object").write_text("{}")
        with sqlite3.connect(self.dir / "database") as db:
            db.execute("CREATE TABLE a(b)")
        for path, words in (("text", "neither a journal"), ("object", "neither a journal"),
                            ("database", "not a journal of evalrt"), ("nowhere", "cannot read")):
            code, out, err = self.run_program("report", path)
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn(words, err)


class Refused(Base):
    def refused(self, words, *args, code=4, **more):
        before = (self.dir / "j").read_bytes()
        got, out, err = self.run_suite(self.dir / "suite.jsonl", *args, **more)
        self.assertEqual(got, code, err)
        for word in [words] if isinstance(words, str) else words:
            self.assertIn(word, err)
        self.assertEqual((self.dir / "j").read_bytes(), before)
        self.assertEqual(self.asked(), [])
        return err

    def setUp(self):
        super().setUp()
        self.suite(line("a", "x"), line("b", "y"))

    def test_another_model_or_other_settings_are_refused_with_what_has_changed(self):
        self.assertEqual(self.run_suite("suite.jsonl")[0], 0)
        self.asked()
        self.refused([f'model was "{self.model}" and is "{self.model}2"', "--journal-mode append"],
                     model=self.model + "2")
        self.refused('max_tokens was not set and is "5"', "--max-tokens", "5")
        self.refused('server_args was "" and is "--x"', "--server-arg", "--x")
        code, _, err = self.run_suite("suite.jsonl", "--max-tokens", "5", "--journal-mode", "append")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(self.asked()), ["x", "y"])
        self.assertEqual(self.run_suite("suite.jsonl")[0], 0)
        self.assertEqual(self.run_suite("suite.jsonl", "--max-tokens", "5")[0], 0)
        self.assertEqual(self.asked(), [])

    def test_another_server_backend_or_wire_is_refused_and_never_served_the_answers(self):
        def run(*args, url, backend="openai-url"):
            return self.run_program("run", "suite.jsonl", "-o", "o", "--backend", backend, "--no-probe",
                                    "--model", self.model, "--journal", "j", "--url", url, *args)
        with self.running_server() as one, self.running_server() as two:
            code, _, err = run(url=one)
            self.assertEqual(code, 0, err)
            self.assertEqual(sorted(self.asked()), ["x", "y"])
            before = (self.dir / "j").read_bytes()
            for words, args in ((f'url was "{one}" and is "{two}"', dict(url=two)),
                                (f'url was "{one}" and is "{one} {two}"', dict(url=one, more=two)),
                                ('backend was "openai-url" and is "omlx"',
                                 dict(url=one, backend="omlx")),
                                ('wire was "openai" and is "anthropic"', dict(url=one, wire="anthropic"))):
                more = [it for name, key in (("--url", "more"), ("--wire", "wire")) if key in args
                        for it in (name, args.pop(key))]
                code, _, err = run(*more, **args)
                self.assertEqual(code, 4, err)
                self.assertIn(words, err)
                self.assertEqual(self.asked(), [])
                self.assertEqual((self.dir / "j").read_bytes(), before)
            code, _, err = run("--journal-mode", "append", url=two)
            self.assertEqual(code, 0, err)
            self.assertEqual(sorted(self.asked()), ["x", "y"])
            self.assertIn("2 answered, 0 failed", err)
            code, _, err = run("--journal-mode", "append", url=one)
            self.assertEqual(code, 0, err)
            self.assertEqual(self.asked(), [])
            self.assertIn("2 answered (2 of them from the journal)", err)

    def test_a_model_whose_files_have_changed_is_another_one(self):
        model = self.dir / "model"
        model.mkdir()
        (model / "weights").write_text("1")
        self.assertEqual(self.run_suite("suite.jsonl", model=model)[0], 0)
        self.asked()
        (model / "weights").write_text("22")
        self.refused("model_files was", model=model)
        code, _, err = self.run_suite("suite.jsonl", "--journal-mode", "append", model=model)
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(self.asked()), ["x", "y"])

    def test_another_version_of_the_server_is_refused_before_anything_is_asked(self):
        self.assertEqual(self.run_suite("suite.jsonl")[0], 0)
        self.asked()
        self.suite(line("a", "x"), line("b", "y"), line("c", "z"))
        os.environ["FAKE_OPENAI_VERSION"] = "fake-2.0"
        self.addCleanup(os.environ.pop, "FAKE_OPENAI_VERSION")
        _, _, err = self.run_suite("suite.jsonl")
        self.assertIn('server_version was "fake-1.0" and is "fake-2.0"', err)
        self.assertEqual(self.asked(), [])
        code, _, err = self.run_suite("suite.jsonl", "--journal-mode", "append")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(self.asked()), ["x", "y", "z"])

    def test_a_file_that_is_no_journal(self):
        (self.dir / "j").write_text("the answers of somebody else\n")
        (self.dir / "o.part").write_text("precious\n")
        self.refused("not a journal of evalrt")
        self.assertEqual((self.dir / "o.part").read_text(), "precious\n")

    def test_a_new_journal_does_not_overwrite_the_answers_of_a_run_without(self):
        (self.dir / "o.part").write_text("precious\n")
        code, _, err = self.run_suite("suite.jsonl")
        self.assertEqual(code, 2)
        self.assertIn("o.part is there already", err)

    def test_a_damaged_journal(self):
        self.assertEqual(self.run_suite("suite.jsonl")[0], 0)
        self.asked()
        data = bytearray((self.dir / "j").read_bytes())
        data[16384:16384 + 200] = bytes(200)
        (self.dir / "j").write_bytes(data)
        self.refused("is damaged")
        code, _, err = self.run_suite("suite.jsonl", "--quiet")
        self.assertEqual(len(err.splitlines()), 1, err)
        code, _, err = self.run_program("report", "j")
        self.assertEqual(code, 4, err)
        self.assertIn("is damaged", err)

    def test_a_second_process_is_told_who_has_it(self):
        self.suite(line("slow", "hold"))
        first = self.start("run", "suite.jsonl", "-o", "o", *self.own(), "--journal", "j")
        until(lambda: self.log.exists() and '"hold"' in self.log.read_text())
        code, _, err = self.run_program("run", "suite.jsonl", "-o", "o2", *self.own(), "--journal", "j")
        self.assertEqual(code, 4)
        self.assertIn(f"in use by the process {first.pid}", err)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=LONG)

    def test_a_disk_that_is_read_only(self):
        folder = self.small_disk("disk")
        args = ("run", "suite.jsonl", "-o", "o", *self.own(), "--journal", folder / "j")
        self.assertEqual(self.run_program(*args)[0], 0)
        self.asked()
        before = (folder / "j").read_bytes()
        self.remount_read_only(folder)
        code, _, err = self.run_program(*args)
        self.assertEqual(code, 4, err)
        self.assertIn(f"{folder}/j", err)
        self.assertIn("ead-only", err)
        self.assertEqual(self.asked(), [])
        self.assertEqual((folder / "j").read_bytes(), before)

    def test_a_folder_that_cannot_be_written(self):
        code, _, err = self.run_program("run", "suite.jsonl", "-o", "o", *self.own(), "--journal",
                                        "no/such/j")
        self.assertEqual(code, 4)
        self.assertIn("no/such/j", err)
        self.assertEqual(self.asked(), [])


class Kills(Base):
    """kill -9 at random moments, of the client, the server or both, until the run is through."""

    COUNT = 60

    def setUp(self):
        super().setUp()
        self.lines = [line(f"q{i}", f"sleep 0.0{i % 7} {i}") for i in range(self.COUNT)]
        self.path = self.suite(*self.lines)

    def undisturbed(self):
        code, _, err = self.run_program("run", self.path, "-o", "reference", *self.own())
        self.assertEqual(code, 0, err)
        self.asked()
        return self.without_times("reference")

    def test_nothing_that_was_delivered_is_lost_or_asked_again(self):
        reference = self.undisturbed()
        seed = random.randrange(1 << 30)
        print(f"  kill moments from seed {seed}", file=sys.stderr)
        source = random.Random(seed)
        asked, done, kills = [], False, 0
        rounds = 0
        while kills < KILLS:
            rounds += 1
            if done:  # once more from the beginning
                for name in ("j", "o"):
                    (self.dir / name).unlink()
                asked, done = [], False
            before = set(self.held()) if (self.dir / "j").exists() else set()
            process = self.start("run", self.path, "-o", "o", *self.own(), "--journal", "j",
                                 "--retries", "0", "--max-in-flight", "8")
            victim = source.choice(("client", "server", "both"))
            # Mostly while it answers, sometimes while it starts or ends.
            time.sleep(source.uniform(0.0, 1.6 if not SANITIZED else 4))
            servers = self.servers()
            if victim != "client":
                for pid in servers:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
            if victim != "server":
                process.kill()
            code = None
            process.communicate(timeout=LONG)
            code = process.returncode
            kills += 1
            seen = self.answered_in("o.part") | (self.answered_in("o") if code == 0 else set())
            if not (self.dir / "j").exists():
                self.assertEqual(seen, set())
                continue
            held = self.held()
            self.assertEqual(len(held), len(set(held)))
            self.assertLessEqual(seen, set(held), f"lost ({victim}, seed {seed})")
            now = self.asked()
            repeated = [q for q in now if f"q{q.split()[2]}" in before]
            self.assertEqual(repeated, [], f"asked again ({victim}, seed {seed})")
            done = code == 0
        code, _, err = self.run_suite(self.path)
        self.assertEqual(code, 0, err)
        self.assertEqual(self.without_times(), reference)
        self.assertEqual(sorted(self.held()), sorted(f"q{i}" for i in range(self.COUNT)))


    @unittest.skipIf(SANITIZED, "a sanitizer takes the signal")
    def test_the_file_that_is_mapped_is_cut_short(self):
        """The worst that it can do is to end the program there and then."""
        reference = self.undisturbed()
        process = self.start("run", self.path, "-o", "o", *self.own(), "--journal", "j",
                             "--max-in-flight", "4")
        until(lambda: self.answered_in("o.part"))
        os.truncate(self.dir / "j-shm", 0)
        _, err = process.communicate(timeout=LONG)
        seen = self.answered_in("o.part") | self.answered_in("o")
        self.assertGreater(len(seen), 0)
        if process.returncode:
            self.assertIn(process.returncode, (4, -signal.SIGBUS), err)
        (self.dir / "j-shm").unlink(missing_ok=True)
        held = self.held()
        self.assertLessEqual(seen, set(held))
        for pid in self.servers():
            os.kill(pid, signal.SIGKILL)
        self.asked()
        code, _, err = self.run_suite(self.path)
        self.assertEqual(code, 0, err)
        self.assertEqual(len(self.asked()), self.COUNT - len(held))
        self.assertEqual(self.without_times(), reference)


@unittest.skipUnless(sys.platform == "linux" and os.geteuid() == 0, "mounts a small file system")
class FullDisk(Base):
    def test_the_run_stops_says_so_and_goes_on_when_there_is_room(self):
        small = self.small_disk("small", "-o", "size=400k")
        count = 300
        suite = self.suite(*(line(f"q{i}", f"{i} {'long ' * 200}") for i in range(count)))
        args = ("run", suite, "-o", "o", *self.own(), "--journal", small / "j", "--max-in-flight", "8")
        code, _, err = self.run_program(*args, "--json", "s")
        self.assertEqual(code, 4, err)
        self.assertIn("the disk is full", err)
        seen = self.answered_in("o.part")
        held = set(self.held("small/j"))
        self.assertLessEqual(seen, held)
        self.assertGreater(len(seen), 0)
        self.assertLess(len(held), count)
        summary = json.loads((self.dir / "s").read_text())
        self.assertEqual(summary["answered"] + summary["failed"] + summary["not_run"], count)
        self.assertEqual(summary["failed"], 0)
        self.asked()
        subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
        code, _, err = self.run_program(*args)
        self.assertEqual(code, 0, err)
        self.assertEqual(len(self.asked()), count - len(held))
        self.assertEqual([row["custom_id"] for row in self.out()], [f"q{i}" for i in range(count)])


    def test_a_journal_that_does_not_fit_at_all_leaves_nothing_behind(self):
        small = self.small_disk("tiny", "-o", "size=16k")
        suite = self.suite(line("a", "x"))
        code, _, err = self.run_program("run", suite, "-o", "o", *self.own(), "--journal", small / "j")
        self.assertEqual(code, 4, err)
        self.assertIn(f"cannot write the journal {small / 'j'}: the disk is full", err)
        self.assertEqual(os.listdir(small), [])


@unittest.skipIf(SANITIZED, "sanitizers and strace both trace")
@unittest.skipUnless(shutil.which("strace"), "strace is not installed")
class BrokenDisk(Base):
    """The n-th call that makes something durable fails, for n = 1, 2, ... until none does."""

    def setUp(self):
        super().setUp()
        probe = subprocess.run(["strace", "-o", "/dev/null", "-e", "inject=fdatasync:error=EIO:when=1",
                                "true"], capture_output=True)
        if probe.returncode:
            self.skipTest("strace cannot trace here")

    def test_the_disk_is_waited_for_when_something_is_answered_and_not_when_it_is_asked(self):
        def waits(words):
            for name in ("j", "o"):
                (self.dir / name).unlink(missing_ok=True)
            log = self.dir / "calls"
            code, _, err = self.run_suite(
                self.suite(line("a", words)),
                before=["strace", "-f", "-o", log, "-e", "trace=fdatasync,fsync"])
            self.assertEqual(code, 0, err)
            self.assertEqual(len(self.held()), 1)
            return len(re.findall(r"f(?:data)?sync\(", log.read_text()))
        # What takes long is asked in a group of its own.
        self.assertEqual(waits("sleep 0.3 a"), waits("a"))

    def test_an_io_error_at_each_moment_costs_nothing_that_was_delivered(self):
        count = 12
        suite = self.suite(*(line(f"q{i}", f"sleep 0.0{i} {i}") for i in range(count)))
        failures = 0
        # A disk that breaks, and one that its system makes read-only.
        for call, error, why in (("fdatasync,fsync", "EIO", "I/O error"),
                                 ("pwrite64", "EIO", "Input/output error"),
                                 ("pwrite64", "EROFS", "Read-only file system")):
            quick = KILLS < 20 or error == "EROFS"
            words = 0
            for n in range(1, 200):
                if quick and n > 3 and n % (4 if error == "EIO" else 9):
                    continue
                for name in ("j", "j-wal", "j-shm", "j.new", "o", "o.part"):
                    (self.dir / name).unlink(missing_ok=True)
                # It fails from then on: a disk does not get well by itself.
                code, _, err = self.run_suite(
                    suite, "--max-in-flight", "2",
                    before=["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}", "-e",
                            f"inject={call}:error={error}:when={n}+"])
                self.assertIn(code, (0, 4), err)
                seen = self.answered_in("o.part") | self.answered_in("o")
                if code == 4:
                    failures += 1
                    self.assertRegex(err, r"cannot (write|open|read) .*j|I/O")
                    words += why in err
                held = set(self.held()) if (self.dir / "j").exists() else set()
                self.assertLessEqual(seen, held, f"{call} {error} {n}")
                self.asked()
                again, _, err = self.run_suite(suite)
                self.assertEqual(again, 0, err)
                self.assertEqual(len(self.asked()), count - len(held))
                self.assertEqual([row["custom_id"] for row in self.out()],
                                 [f"q{i}" for i in range(count)])
                if code == 0:
                    break
            else:
                self.fail("it never came through")
            self.assertGreater(words, 0)
        self.assertGreater(failures, 4)


if __name__ == "__main__":
    unittest.main(verbosity=1)
