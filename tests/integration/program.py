#!/usr/bin/env python3
"""The evalrt program from outside: what it prints, writes and returns, in good and bad cases.

    program.py EVALRT_PROGRAM
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

EVALRT = os.path.abspath(sys.argv.pop(1))
SUPPORT = Path(__file__).resolve().parent.parent / "support"
SERVER = SUPPORT / "fake_openai.py"
sys.path.insert(0, str(SUPPORT))

from patience import LONG, until  # noqa: E402


def line(custom_id, question, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
                       "body": {"messages": [{"role": "user", "content": question}], **body}})


def children(marker):
    """Processes whose command line has `marker` in it."""
    out = subprocess.run(["ps", "-axo", "pid=,command="], capture_output=True, text=True).stdout
    return [row for row in out.splitlines() if marker in row and "ps -axo" not in row]


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        self.log = self.dir / "asked"
        self.model = f"model-{os.getpid()}-{id(self)}"  # to find the server's process by

    def tearDown(self):
        self.assertEqual(children(self.model), [], "a server was left behind")

    def start(self, *args, **more):
        env = dict(os.environ, FAKE_OPENAI_LOG=str(self.log))
        env.pop("OPENAI_API_KEY", None)
        return subprocess.Popen([EVALRT, *map(str, args)], cwd=self.dir, env=env, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, **more)

    def run_program(self, *args, stdin="", timeout=LONG):
        process = self.start(*args)
        out, err = process.communicate(stdin, timeout=timeout)
        return process.returncode, out, err

    def own_server(self, model=None):
        return ("--backend", "mlx-server", "--executable", SERVER, "--model", model or self.model)

    def suite(self, *lines):
        path = self.dir / "suite.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    def asked(self):
        rows = [json.loads(row) for row in self.log.read_text().splitlines()]
        return [row for row in rows if row.get("body", {"max_tokens": 1}).get("max_tokens") != 1]

    def rows(self, text):
        return [json.loads(row) for row in text.splitlines()]

    # Good cases

    def test_a_suite_is_answered_in_the_order_of_its_lines(self):
        path = self.suite(*(line(f"q{i}", f"question {i}") for i in range(40)))
        code, out, err = self.run_program("run", path, "-o", "out.jsonl", *self.own_server(),
                                          "--json", "summary.json")
        self.assertEqual(code, 0, err)
        self.assertEqual(out, "")
        rows = self.rows((self.dir / "out.jsonl").read_text())
        self.assertEqual([row["custom_id"] for row in rows], [f"q{i}" for i in range(40)])
        for i, row in enumerate(rows):
            self.assertIsNone(row["error"])
            self.assertEqual(row["response"]["status_code"], 200)
            message = row["response"]["body"]["choices"][0]["message"]
            self.assertEqual(message["content"].strip(), f"answer to question {i}")
            self.assertEqual(row["response"]["request_id"], "chatcmpl-1")
            self.assertEqual(row["evalrt"]["cached_tokens"], 20)
            self.assertGreater(row["evalrt"]["first_text_ms"], 0)
            self.assertFalse(row["evalrt"]["from_journal"])
        self.assertFalse((self.dir / "out.jsonl.part").exists())
        self.assertIn("prefix cached: 800 tokens", err)
        summary = json.loads((self.dir / "summary.json").read_text())
        self.assertEqual((summary["requests"], summary["answered"], summary["failed"]), (40, 40, 0))
        self.assertEqual(summary["backend"], "mlx-server")
        self.assertEqual(summary["model"], "default_model")
        self.assertEqual(summary["server_version"], "fake-1.0")
        self.assertEqual(summary["cached_tokens"]["actual"], 800)
        self.assertIsNone(summary["bound_seconds"])
        bodies = [row["body"] for row in self.asked()]
        self.assertEqual({body["model"] for body in bodies}, {"default_model"})
        self.assertLessEqual(max(row["in_flight"] for row in self.asked()), 32)

    def test_standard_input_to_standard_output_and_bodies_alone(self):
        body = json.dumps({"messages": [{"role": "user", "content": "bare"}]})
        code, out, err = self.run_program("run", "-", *self.own_server(), "--quiet",
                                          stdin=body + "\n" + line("named", "second") + "\n")
        self.assertEqual(code, 0, err)
        self.assertEqual([row["custom_id"] for row in self.rows(out)], ["1", "named"])
        self.assertEqual(err, "")

    def test_overrides_and_fix_ups_are_said_once_and_reach_the_server(self):
        path = self.suite(*(line(f"q{i}", "x", seed=7, temperature=0, top_p=None, mine={"a": [1]})
                            for i in range(5)))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server(),
                                        "--max-tokens", "5", "--limit", "3")
        self.assertEqual(code, 0, err)
        self.assertEqual(err.count('dropped "seed"'), 1)
        self.assertEqual(err.count("--max-tokens"), 1)
        bodies = [row["body"] for row in self.asked()]
        self.assertEqual(len(bodies), 3)
        for body in bodies:
            self.assertNotIn("seed", body)
            self.assertNotIn("top_p", body)
            self.assertEqual(body["max_tokens"], 5)
            self.assertEqual(body["mine"], {"a": [1]})

    def test_equal_requests_at_temperature_zero_are_asked_once_if_told_so(self):
        lines = [line("a", "x", temperature=0), line("b", "x", temperature=0.0),
                 line("c", "x", temperature=0), line("d", "x"), line("e", "x"),
                 line("f", "x", temperature=1), line("g", "x", temperature=1)]
        path = self.suite(*lines)
        for options, asked in ((["--dedupe"], 6), ([], 7)):
            self.log.unlink(missing_ok=True)
            code, _, err = self.run_program("run", path, "-o", "o.jsonl", *self.own_server(),
                                            "--json", "s.json", *options)
            self.assertEqual(code, 0, err)
            self.assertEqual(len(self.asked()), asked)
            rows = self.rows((self.dir / "o.jsonl").read_text())
            self.assertEqual([row["custom_id"] for row in rows], list("abcdefg"))
            self.assertEqual(rows[0]["response"], rows[2]["response"])
            summary = json.loads((self.dir / "s.json").read_text())
            self.assertEqual((summary["answered"], summary["repeated"]), (7, 7 - asked))
            self.assertEqual(summary["attempts"], asked)

    def test_each_sent_request_is_explained(self):
        path = self.suite(*(line(f"q{i}", "shared " * 200 + str(i)) for i in range(6)))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server(), "--json", "s",
                                        "--explain", "why.jsonl")
        self.assertEqual(code, 0, err)
        rows = self.rows((self.dir / "why.jsonl").read_text())
        self.assertEqual(sorted(row["id"] for row in rows), [f"q{i}" for i in range(6)])
        leader, *others = rows
        self.assertEqual((leader["why"], leader["waited_for"]), ("leader", None))
        self.assertEqual({row["why"] for row in others}, {"follower"})
        self.assertEqual({row["node"] for row in others}, {leader["node"]})
        self.assertEqual({row["waited_for"] for row in others}, {leader["n"]})
        self.assertEqual(others[0]["gate"], "leader")
        self.assertNotIn("shared", (self.dir / "why.jsonl").read_text())
        code, _, err = self.run_program("run", path, "-o", "o2", *self.own_server(),
                                        "--explain", "no/such/folder")
        self.assertEqual(code, 2, err)

    def test_parity_asks_a_sample_again(self):
        path = self.suite(*(line(f"q{i}", f"{i}") for i in range(10)))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server(), "--parity", "4",
                                        "--json", "s.json")
        self.assertEqual(code, 0, err)
        parity = json.loads((self.dir / "s.json").read_text())["parity"]
        self.assertEqual((parity["checked"], parity["identical"], parity["ids"]), (4, 4, []))
        self.assertEqual(len(self.asked()), 14)

    def test_completions_are_answered_too(self):
        path = self.dir / "suite.jsonl"
        path.write_text(json.dumps({"url": "/v1/completions", "body": {"prompt": "once"}}))
        code, out, err = self.run_program("run", path, *self.own_server(), "--quiet")
        self.assertEqual(code, 0, err)
        self.assertEqual(self.rows(out)[0]["response"]["body"]["choices"][0]["text"],
                         "answer to once")

    def test_a_key_that_cannot_be_sent_is_a_usage_error_and_is_not_repeated(self):
        (self.dir / "key").write_text("sk-secret with spaces\n")
        err = self.refused(2, "API key", "run", self.suite(line("a", "x")), "-o", "out",
                           *self.own_server(), "--api-key-file", "key")
        self.assertNotIn("sk-secret", err)

    # Failures

    def test_a_failed_item_is_reported_and_the_others_are_answered(self):
        path = self.suite(line("good", "x"), line("bad", "fail"), line("good2", "y"))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server(), "--json", "s")
        self.assertEqual(code, 1)
        self.assertIn("1 of 3 failed (1 rejected)", err)
        self.assertIn("this one is refused", err)
        rows = self.rows((self.dir / "o").read_text())
        self.assertEqual(rows[1]["error"]["code"], "rejected")
        self.assertIn("this one is refused", rows[1]["error"]["message"])
        self.assertEqual(rows[1]["response"]["status_code"], 400)
        self.assertEqual(rows[1]["evalrt"]["attempts"], 1)
        self.assertEqual(json.loads((self.dir / "s").read_text())["failures"], {"rejected": 1})

    def test_a_server_that_dies_is_started_again_and_asked_the_same(self):
        path = self.suite(*(line(f"q{i}", f"sleep 0.1 {i}") for i in range(20)),
                          line("fatal", "die once"))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server(), "--json", "s",
                                        "--max-in-flight", "8", "--order", "fifo")
        self.assertEqual(code, 0, err)
        self.assertIn("the server has ended (exit status 9); it is started again", err)
        self.assertEqual([row["error"] for row in self.rows((self.dir / "o").read_text())],
                         [None] * 21)
        summary = json.loads((self.dir / "s").read_text())
        self.assertEqual((summary["answered"], summary["server_restarts"]), (21, 1))
        self.assertIn("Segmentation fault in the engine", summary["server_output"])
        self.assertTrue(any("started again" in note for note in summary["notes"]))

    def test_an_item_of_which_the_server_dies_twice_fails_alone(self):
        path = self.suite(*(line(f"q{i}", f"sleep 0.1 {i}") for i in range(10)),
                          line("killer", "die"), *(line(f"r{i}", "x") for i in range(10)))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server(), "--json", "s",
                                        "--max-in-flight", "8", "--order", "fifo")
        self.assertEqual(code, 1, err)
        failed = {row["custom_id"]: row["error"]["code"]
                  for row in self.rows((self.dir / "o").read_text()) if row["error"]}
        self.assertEqual(failed, {"killer": "poison"})
        summary = json.loads((self.dir / "s").read_text())
        self.assertEqual((summary["answered"], summary["server_restarts"]), (20, 2))

    def test_a_server_that_dies_of_everything_ends_the_run(self):
        path = self.suite(*(line(f"q{i}", "x") for i in range(30)))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server("dies-always"),
                                        "--max-in-flight", "1")
        self.assertEqual(code, 3, err)
        self.assertIn("stopped early: the server has ended (exit status 9)", err)
        self.assertLess(len(self.asked()), 10)

    def test_the_same_failure_everywhere_stops_the_run(self):
        path = self.suite(*(line(f"q{i}", "fail") for i in range(60)))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server())
        self.assertEqual(code, 5)
        self.assertIn("everything fails the same way", err)
        self.assertLess(len(self.asked()), 60)
        self.assertFalse((self.dir / "o").exists())

    # Bad input: exit code, words, nothing that looks like a result

    def refused(self, code, words, *args, stdin=""):
        got, out, err = self.run_program(*args, stdin=stdin)
        self.assertEqual(got, code, err)
        self.assertIn(words, err)
        self.assertEqual(out, "")
        self.assertEqual([p.name for p in self.dir.iterdir() if p.name.startswith("out")], [])
        return err

    def test_an_unknown_backend_names_those_that_are_known(self):
        path = self.suite(line("a", "x"))
        err = self.refused(2, "unknown backend 'vllm'", "run", path, "-o", "out", "--backend",
                           "vllm", "--model", "m")
        self.assertIn("tinygpt, omlx, mlx-server, openai-url", err)

    def test_a_missing_model_says_how_to_give_one(self):
        self.refused(2, "give --model", "run", self.suite(line("a", "x")), "-o", "out",
                     "--backend", "mlx-server")

    def test_a_model_path_that_is_not_there_is_said_before_a_server_is_started(self):
        self.refused(2, "there is no model at '/no/such'", "run", self.suite(line("a", "x")), "-o",
                     "out", *self.own_server("/no/such"))

    def test_a_missing_url_says_how_to_give_one(self):
        self.refused(2, "--url", "run", self.suite(line("a", "x")), "-o", "out", "--backend",
                     "openai-url")

    def test_a_line_that_is_not_json_is_named(self):
        lines = [line(f"q{i}", "x") for i in range(20)]
        lines[16] = '{"custom_id": "broken"'
        self.refused(2, "line 17: not JSON: it ends too early, at byte 23", "run", self.suite(*lines), "-o", "out",
                     *self.own_server())

    def test_json_that_parsers_with_limits_refuse_goes_out_as_it_is(self):
        odd = {"messages": [{"role": "user", "content": "half \ud83d"}], "mine": [2 ** 70, -2 ** 65]}
        text = json.dumps(odd)[:-1] + ', "min_p": 1e999}'
        path = self.suite(text, '{"custom_id": "named", "url": "/v1/chat/completions", "body": %s}' % text)
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server())
        self.assertEqual(code, 0, err)
        rows = self.rows((self.dir / "o").read_text())
        self.assertEqual([(row["custom_id"], row["error"]) for row in rows], [("1", None), ("named", None)])
        for row in self.asked():
            self.assertEqual({key: row["body"].get(key) for key in odd}, odd)
            self.assertEqual(row["body"]["min_p"], float("inf"))
        # A name has to come back as it was.
        path = self.suite('{"custom_id": "\\ud83d", "body": {"messages": []}}')
        self.refused(2, "line 1: \"custom_id\" has half a surrogate pair", "run", path, "-o", "out",
                     *self.own_server())
        path = self.suite('{"custom_id": "a \\ud83d\\ude00", "body": {"messages": [{"role": "user", "content": "x"}]}}')
        code, _, err = self.run_program("run", path, "-o", "other", *self.own_server())
        self.assertEqual((code, self.rows((self.dir / "other").read_text())[0]["custom_id"]), (0, "a \U0001f600"), err)

    def test_invalid_lines_can_be_skipped_and_count_as_failed(self):
        path = self.suite(line("a", "x"), "nonsense", line("b", "y"))
        code, _, err = self.run_program("run", path, "-o", "o", *self.own_server(),
                                        "--skip-invalid")
        self.assertEqual(code, 1, err)
        rows = self.rows((self.dir / "o").read_text())
        self.assertEqual(len(rows), 3)
        self.assertIn("line 2", rows[1]["error"]["message"])
        self.assertIsNone(rows[2]["error"])

    def test_an_empty_file_is_no_suite(self):
        path = self.dir / "suite.jsonl"
        path.write_text("\n\n")
        self.refused(2, "has no requests", "run", path, "-o", "out", *self.own_server())

    def test_duplicate_custom_ids_are_named(self):
        path = self.suite(line("a", "x"), line("b", "x"), line("a", "y"))
        err = self.refused(2, 'the custom_id "a" stands in line 1', "run", path, "-o", "out",
                           *self.own_server())
        self.assertIn("line 3", err)

    def test_a_missing_file_and_a_folder_are_no_suite(self):
        self.refused(2, "cannot open", "run", "nowhere.jsonl", "-o", "out", *self.own_server())
        self.refused(2, "is a folder", "run", self.dir, "-o", "out", *self.own_server())

    def test_an_output_folder_that_is_not_there_is_said_before_anything_runs(self):
        self.refused(2, "cannot write", "run", self.suite(line("a", "x")), "-o", "no/out",
                     *self.own_server())
        self.assertFalse(self.log.exists())

    def test_an_output_that_would_replace_something_else_is_refused(self):
        path = self.suite(line("a", "x"))
        (self.dir / "folder").mkdir()
        self.refused(2, "is a folder", "run", path, "-o", "folder", *self.own_server())
        self.refused(2, "the batch file itself", "run", path, "-o", "./suite.jsonl",
                     *self.own_server())
        self.refused(2, "both", "run", path, "-o", "j", "--journal", self.dir / "j",
                     *self.own_server())
        self.assertEqual(path.read_text(), line("a", "x") + "\n")
        self.assertFalse(self.log.exists())

    def test_pipes_are_read_and_written_and_links_followed(self):
        os.mkfifo(self.dir / "in")
        os.mkfifo(self.dir / "out")
        os.symlink("real", self.dir / "link")
        (self.dir / "real").write_text("old")
        process = self.start("run", "in", "-o", "out", *self.own_server())
        (self.dir / "in").write_text(line("a", "x"))
        written = (self.dir / "out").read_text()
        self.assertEqual(process.wait(LONG), 0, process.stderr.read())
        process.communicate()
        self.assertEqual(json.loads(written)["custom_id"], "a")
        self.assertTrue((self.dir / "out").is_fifo())
        self.assertEqual(self.run_program("run", self.suite(line("b", "x")), "-o", "link",
                                          *self.own_server())[0], 0)
        self.assertTrue((self.dir / "link").is_symlink())
        self.assertEqual(json.loads((self.dir / "real").read_text())["custom_id"], "b")

    def test_answers_that_are_not_kept_are_not_called_kept(self):
        process = self.start("run", self.suite(line("a", "x")), *self.own_server())
        process.stdout.close()
        err = process.stderr.read()
        self.assertEqual(process.wait(LONG), 4)
        process.stdin.close()
        process.stderr.close()
        self.assertIn("what was answered is lost: give -o or --journal a file", err)

    def test_answers_of_an_interrupted_run_are_not_overwritten(self):
        (self.dir / "o.part").write_text("precious\n")
        code, _, err = self.run_program("run", self.suite(line("a", "x")), "-o", "o",
                                        *self.own_server())
        self.assertEqual(code, 2)
        self.assertIn("o.part is there already", err)
        self.assertEqual((self.dir / "o.part").read_text(), "precious\n")

    def test_unknown_options_and_values_are_usage_errors(self):
        path = self.suite(line("a", "x"))
        self.refused(2, "--wrong", "run", path, "-o", "out", "--wrong")
        self.refused(2, "--max-in-flight", "run", path, "-o", "out", *self.own_server(),
                     "--max-in-flight", "many")
        self.refused(2, "--temperature", "run", path, "-o", "out", *self.own_server(),
                     "--temperature", "nan")
        self.refused(2, "--timeout", "run", path, "-o", "out", *self.own_server(), "--timeout",
                     "nan")
        self.refused(2, "unknown command 'nonsense'", "nonsense")
        self.refused(2, "give a command")

    def test_a_server_that_dies_while_loading_says_why(self):
        err = self.refused(3, "ValueError: no such model", "run", self.suite(line("a", "x")), "-o",
                           "out", *self.own_server("dies-while-loading"))
        self.assertIn("exit status 3", err)

    def test_a_program_that_is_not_there_says_what_to_do(self):
        self.refused(3, "--executable", "run", self.suite(line("a", "x")), "-o", "out",
                     "--backend", "mlx-server", "--model", "m", "--executable", "/no/such/server")

    def test_a_port_in_use_is_named(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            self.refused(3, f"port {port} is in use", "run", self.suite(line("a", "x")), "-o",
                         "out", *self.own_server(), "--port", port)

    def test_a_url_without_a_backend_gets_a_hint(self):
        args = ("run", self.suite(line("a", "x")), "-o", "out", "--url", "http://127.0.0.1:1/v1")
        self.assertIn("--backend openai-url", self.refused(3, "cannot connect", *args))
        self.assertNotIn("no --backend", self.refused(3, "cannot connect", *args, "--backend",
                                                      "tinygpt"))

    def test_a_url_where_nothing_answers_is_said(self):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]  # bound, and nobody listens
            self.refused(3, "cannot connect", "run", self.suite(line("a", "x")), "-o", "out",
                         "--backend", "openai-url", "--url", f"http://127.0.0.1:{port}/v1")

    def test_a_wrong_key_is_said_before_the_run(self):
        self.refused(3, "Incorrect API key", "run", self.suite(line("a", "x")), "-o", "out",
                     *self.own_server("wrong-key"))

    # Interruption

    def interrupted(self, signal_number):
        """In the middle of a run that would not end by itself."""
        lines = [line("quick", "x")] + [line(f"slow{i}", "hold") for i in range(20)]
        process = self.start("run", self.suite(*lines), "-o", "o", *self.own_server(), "--order",
                             "fifo")
        part = self.dir / "o.part"
        until(lambda: part.exists() and part.read_text())
        process.send_signal(signal_number)
        _, err = process.communicate(timeout=LONG)
        return process.returncode, err

    def test_an_interruption_waits_for_no_answer_and_keeps_what_there_was(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                code, err = self.interrupted(number)
                self.assertEqual(code, 130, err)
                self.assertIn("interrupted: 1 of 21 answered", err)
                self.assertIn("in o.part; the same command starts again from the first, once that "
                              "is moved away", err)
                rows = self.rows((self.dir / "o.part").read_text())
                self.assertEqual([row["custom_id"] for row in rows], ["quick"])
                self.assertFalse((self.dir / "o").exists(), "looks whole, but is not")
                (self.dir / "o.part").unlink()

    def test_a_killed_program_leaves_no_server(self):
        code, _ = self.interrupted(signal.SIGKILL)
        self.assertEqual(code, -9)
        until(lambda: not children(self.model))

    def test_an_interruption_while_the_server_loads_leaves_nothing(self):
        loads = self.dir / "loads"
        loads.write_text("#!/bin/sh\n: >loading\nwhile :; do sleep 1; done\n")
        loads.chmod(0o755)
        process = self.start("run", self.suite(line("a", "x")), "-o", "o", "--backend",
                             "mlx-server", "--executable", loads, "--model", self.model)
        until((self.dir / "loading").exists)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 130, err)
        self.assertEqual(sorted(p.name for p in self.dir.iterdir()), ["loading", "loads", "suite.jsonl"])

    def test_the_backends_are_listed(self):
        code, out, _ = self.run_program("backends")
        self.assertEqual(code, 0)
        self.assertIn("mlx-server", out)
        self.assertIn("tinygpt serve {model} --host 127.0.0.1 --port {port}", out)


if __name__ == "__main__":
    unittest.main(verbosity=1)
