#!/usr/bin/env python3
"""The evalrt program against the real mlx_lm.server with a real small model.

    mlx_server.py --evalrt PROGRAM --server PROGRAM --model FOLDER --data BFCL_DATA

FOLDER-tools is the same model with a chat template that makes it call tools.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from patience import LONG, answers, free_port, until  # noqa: E402

parser = argparse.ArgumentParser()
for name in ("--evalrt", "--server", "--model", "--data"):
    parser.add_argument(name, required=True)
args, rest = parser.parse_known_args()
SERVER = ["--backend", "mlx-server", "--executable", args.server]


def servers(folder):
    """Model servers whose model is in this folder."""
    out = subprocess.run(["ps", "-axo", "pid=,command="], capture_output=True, text=True).stdout
    return [row for row in out.splitlines()
            if "mlx_lm" in row and f"--model {folder}/" in row and args.evalrt not in row]


def line(custom_id, question, **body):
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16,
            **body}
    return json.dumps({"custom_id": custom_id, "url": "/v1/chat/completions", "body": body})


class RealServer(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        # A name of its own, to find this test's servers by.
        self.model = str(self.dir / "small")
        self.tools_model = str(self.dir / "calls-tools")
        os.symlink(args.model, self.model)
        os.symlink(args.model + "-tools", self.tools_model)

    def tearDown(self):
        self.assertEqual(servers(self.dir), [], "a server was left behind")

    def program(self, *arguments):
        return subprocess.Popen([args.evalrt, *map(str, arguments)], cwd=self.dir, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finished(self, *arguments):
        process = self.program(*arguments)
        out, err = process.communicate(timeout=LONG)
        return process.returncode, out, err

    def run_lines(self, lines, *arguments, model=None):
        (self.dir / "suite").write_text("\n".join(lines) + "\n")
        code, out, err = self.finished("run", "suite", *SERVER, "--model", model or self.model, *arguments)
        return code, {row["custom_id"]: row for row in map(json.loads, out.splitlines())}, err

    def test_batched_answers_of_real_rows_are_compared_with_sequential_ones(self):
        answers = {}
        for name, more in (("one", ["--max-in-flight", "1", "--order", "fifo"]), ("many", [])):
            code, _, err = self.finished(
                "bfcl", "simple_python", "--bfcl-data", args.data, "--limit", "12", "--max-tokens",
                "32", "--temperature", "0", *SERVER, "--model", self.model, "--result-dir", name,
                "--json", f"{name}.json", *more)
            self.assertEqual(code, 0, err)
            path, = (self.dir / name).rglob("BFCL_v4_simple_python_result.json")
            rows = [json.loads(row) for row in path.read_text().splitlines()]
            self.assertEqual([row["id"] for row in rows], [f"simple_python_{i}" for i in range(12)])
            answers[name] = {row["id"]: row["result"] for row in rows}
            summary = json.loads((self.dir / f"{name}.json").read_text())
            # Every prompt begins with the same 1,047 characters.
            self.assertGreater(summary["cached_tokens"]["actual"], 11 * 200)
        same = sum(answers["one"][i] == answers["many"][i] for i in answers["one"])
        print(f"the same answer: {same} of 12", file=sys.stderr)
        # Not promised, but a client that mixes answers up would get none right.
        self.assertGreaterEqual(same, 6)

    def test_a_real_answer_is_right_and_measured(self):
        code, rows, err = self.run_lines([line("a", "What is the capital of France?")])
        self.assertEqual(code, 0, err)
        body = rows["a"]["response"]["body"]
        self.assertIn("Paris", body["choices"][0]["message"]["content"])
        self.assertEqual(body["usage"]["completion_tokens"], rows["a"]["evalrt"]["completion_tokens"])
        self.assertIsNotNone(rows["a"]["evalrt"]["cached_tokens"])
        self.assertRegex(err, r"prefix cached: \d+ tokens")

    def test_a_seed_at_temperature_zero_does_not_keep_requests_apart(self):
        lines = [line(f"q{i}", f"Name a colour. {i}", seed=1234) for i in range(8)]
        code, rows, err = self.run_lines(lines, "--json", "s")
        self.assertEqual(code, 0, err)
        self.assertEqual(err.count('dropped "seed"'), 1)
        self.assertEqual(len(rows), 8)

    def test_a_streamed_tool_call_is_the_same_as_one_that_was_not_streamed(self):
        tools = [{"type": "function", "function": {
            "name": "get_weather", "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
        ask = {"tools": tools, "max_tokens": 60}
        question = "What is the weather in Paris?"
        code, rows, err = self.run_lines(
            [line("streamed", question, **ask), line("whole", question, stream=False, **ask)],
            model=self.tools_model)
        self.assertEqual(code, 0, err)
        calls = []
        for name in ("streamed", "whole"):
            choice, = rows[name]["response"]["body"]["choices"]
            self.assertEqual(choice["finish_reason"], "tool_calls")
            call, = choice["message"]["tool_calls"]
            calls.append((call["type"], call["function"]["name"],
                          json.loads(call["function"]["arguments"])))
        self.assertEqual(calls[0], ("function", "get_weather", {"city": "Paris"}))
        self.assertEqual(calls[0], calls[1])

    def test_several_choices_are_asked_one_after_another(self):
        code, rows, err = self.run_lines([line("a", "Name a colour.", n=3, temperature=0.9)])
        self.assertEqual(code, 0, err)
        choices = rows["a"]["response"]["body"]["choices"]
        self.assertEqual([choice["index"] for choice in choices], [0, 1, 2])
        self.assertTrue(all(choice["message"]["content"] for choice in choices))
        self.assertIn("it is asked 3 times", err)

    def test_a_body_that_the_server_hangs_up_on_fails_alone(self):
        code, rows, err = self.run_lines(
            [line("good", "Say hello."), line("bad", "Say hello.", temperature="hot"),
             line("good too", "Say goodbye.")])
        self.assertEqual(code, 1, err)
        self.assertIsNone(rows["good"]["error"])
        self.assertIsNone(rows["good too"]["error"])
        self.assertIn(rows["bad"]["error"]["code"], ("unreachable", "rejected"))

    def test_a_model_that_is_not_there_ends_the_start_with_the_servers_words(self):
        (self.dir / "suite").write_text(line("a", "x"))
        code, out, err = self.finished("run", "suite", *SERVER, "--model",
                                       self.dir.name + "/nothing", "-o", "out")
        self.assertEqual(code, 3, err)
        self.assertIn("/nothing'", err)
        self.assertEqual(out, "")
        self.assertFalse(list(self.dir.glob("out*")))

    def stopped(self, number):
        lines = [line("short", "Hi", max_tokens=1)] + [
            line(f"q{i}", f"Tell a long story about the number {i}.", max_tokens=400)
            for i in range(20)]
        (self.dir / "suite").write_text("\n".join(lines))
        process = self.program("run", "suite", "-o", "out", *SERVER, "--model", self.model,
                               "--order", "fifo")
        part = self.dir / "out.part"
        until(lambda: part.exists() and part.stat().st_size)
        process.send_signal(number)
        _, err = process.communicate(timeout=LONG)
        return process.returncode, err

    def test_ctrl_c_waits_for_no_answer_and_keeps_what_there_was(self):
        code, err = self.stopped(signal.SIGINT)
        self.assertEqual(code, 130, err)
        rows = [json.loads(row) for row in (self.dir / "out.part").read_text().splitlines()]
        self.assertIn("short", [row["custom_id"] for row in rows])
        self.assertLess(len(rows), 21)
        self.assertFalse((self.dir / "out").exists())

    def test_killing_us_kills_the_server(self):
        code, _ = self.stopped(signal.SIGKILL)
        self.assertEqual(code, -9)
        until(lambda: not servers(self.dir))

    def test_a_server_that_is_killed_is_started_again_and_asked_the_same(self):
        lines = [line("short", "Hi", max_tokens=1)] + [
            line(f"q{i}", f"Tell a story about the number {i}.", max_tokens=60) for i in range(6)]
        (self.dir / "suite").write_text("\n".join(lines))
        process = self.program("run", "suite", "-o", "out", *SERVER, "--model", self.model,
                               "--order", "fifo", "--json", "summary")
        part = self.dir / "out.part"
        until(lambda: part.exists() and part.stat().st_size)
        os.kill(int(servers(self.dir)[0].split()[0]), signal.SIGKILL)
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 0, err)
        summary = json.loads((self.dir / "summary").read_text())
        self.assertEqual((summary["answered"], summary["server_restarts"]), (7, 1))
        self.assertIn("killed by signal 9", err)

    def test_a_server_that_runs_already_is_used_and_left_alone(self):
        port = free_port()
        server = subprocess.Popen([args.server, "--model", self.model, "--port", str(port)],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  start_new_session=True)
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/health"))
            (self.dir / "suite").write_text(line("a", "What is the capital of France?"))
            for backend in ("mlx-server", "openai-url"):
                code, out, err = self.finished("run", "suite", "--backend", backend, "--url",
                                               f"http://127.0.0.1:{port}/v1")
                self.assertEqual(code, 0, err)
                self.assertIn("Paris", out)
                self.assertEqual("the server is mlx-server" in err, backend == "openai-url")
            self.assertIsNone(server.poll())
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *rest])
