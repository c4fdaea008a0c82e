#!/usr/bin/env python3
"""The evalrt program with servers of the Anthropic wire, and messages with one of OpenAI's.

    anthropic_program.py EVALRT_PROGRAM
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

EVALRT = os.path.abspath(sys.argv.pop(1))
SUPPORT = Path(__file__).resolve().parent.parent / "support"
sys.path.insert(0, str(SUPPORT))

from fake_anthropic import ANSWERS, TEXT

KEY = "sk-ant-canary-0123456789"


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def messages(custom_id, question, **more):
    return line(custom_id, "/v1/messages", max_tokens=50,
                messages=[{"role": "user", "content": question}], **more)


def chat(custom_id, question, **more):
    return line(custom_id, "/v1/chat/completions",
                messages=[{"role": "user", "content": question}], **more)


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        self.log = self.dir / "asked"
        server = subprocess.Popen([sys.executable, SUPPORT / "fake_anthropic.py"],
                                  env=dict(os.environ, FAKE_ANTHROPIC_LOG=str(self.log),
                                           FAKE_ANTHROPIC_KEY=KEY),
                                  stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.stdout.close)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        self.url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"

    def run_program(self, lines, *args, key=KEY):
        env = dict(os.environ, OPENAI_API_KEY="sk-of-the-other-one-0123")
        env.pop("ANTHROPIC_API_KEY", None)
        if key:
            env["ANTHROPIC_API_KEY"] = key
        text = "\n".join(json.dumps(it) for it in lines)
        done = subprocess.run([EVALRT, "run", "-", *map(str, args)], cwd=self.dir, env=env,
                              input=text, capture_output=True, text=True, timeout=600)
        return done.returncode, [json.loads(it) for it in done.stdout.split("\n") if it], done.stderr

    def asked(self):
        return [json.loads(it) for it in self.log.read_text().splitlines()]

    def test_both_endpoints_of_an_anthropic_server(self):
        lines = [messages("m", "text"), chat("c", "text"), chat("t", "tools", max_tokens=9),
                 messages("t2", "tools", stream=False)]
        for args in (("--backend", "anthropic-url"),
                     ("--backend", "openai-url", "--wire", "anthropic")):
            with self.subTest(args=args):
                self.log.write_text("")
                code, rows, err = self.run_program(lines, *args, "--url", self.url)
                self.assertEqual(code, 0, err)
                bodies = {row["custom_id"]: row["response"]["body"] for row in rows}
                self.assertEqual(bodies["m"]["content"], ANSWERS["text"][0])
                self.assertEqual(bodies["m"]["stop_reason"], "end_turn")
                self.assertEqual(bodies["c"]["choices"][0]["message"],
                                 {"role": "assistant", "content": TEXT})
                self.assertEqual(bodies["c"]["object"], "chat.completion")
                call = bodies["t"]["choices"][0]["message"]["tool_calls"][0]
                self.assertEqual(json.loads(call["function"]["arguments"]),
                                 ANSWERS["tools"][0][1]["input"])
                self.assertEqual(bodies["t"]["choices"][0]["finish_reason"], "tool_calls")
                self.assertEqual(bodies["t2"]["content"], ANSWERS["tools"][0])
                self.assertIn("4096", err)  # the max_tokens that is filled in is said
                for row in rows:
                    self.assertEqual(row["evalrt"]["prompt_tokens"], 25)
                    self.assertIsNone(row["evalrt"]["cached_tokens"])
                for it in self.asked():
                    self.assertEqual(it["path"], "/v1/messages")
                    self.assertEqual(it["headers"]["x-api-key"], KEY)
                    self.assertNotIn("authorization", it["headers"])
                    self.assertNotIn("temperature", it["body"])  # newer models refuse one
                    self.assertEqual(it["body"]["model"], "claude-fake")  # the server's own list
                self.assertNotIn(KEY, err)

    def test_the_key(self):
        lines = [messages("m", "text")]
        code, rows, err = self.run_program(lines, "--backend", "anthropic-url", "--url", self.url,
                                           key=None)
        self.assertEqual((code, rows), (3, []), err)  # OPENAI_API_KEY is not sent
        self.assertIn("authentication_error", err)
        self.assertNotIn("x-api-key", self.asked()[0]["headers"])
        (self.dir / "key").write_text(KEY + "\n")
        code, _, err = self.run_program(lines, "--backend", "anthropic-url", "--url", self.url,
                                        "--api-key-file", self.dir / "key", key=None)
        self.assertEqual(code, 0, err)

    def test_what_goes_wrong_has_its_class(self):
        lines = [messages("ok", "text"), messages("late", "late-invalid_request_error"),
                 messages("cut", "cut"), messages("400", "status-400-invalid_request_error"),
                 chat("500", "status-500-api_error"), chat("n", "text", n=2),
                 line("completion", "/v1/completions", prompt="text")]
        code, rows, err = self.run_program(lines, "--backend", "anthropic-url", "--url", self.url,
                                           "--retries", 1)
        self.assertEqual(code, 1, err)
        errors = {row["custom_id"]: row["error"] and row["error"]["code"] for row in rows}
        self.assertEqual(errors, {"ok": None, "late": "rejected", "cut": "truncated",
                                  "400": "rejected", "500": "rejected", "n": "rejected",
                                  "completion": "rejected"})
        attempts = {row["custom_id"]: row["evalrt"]["attempts"] for row in rows}
        self.assertEqual((attempts["late"], attempts["400"], attempts["cut"], attempts["500"]),
                         (1, 1, 2, 2))
        words = {row["custom_id"]: row["error"]["message"] for row in rows if row["error"]}
        self.assertIn('"n"', words["n"])
        self.assertIn("/v1/completions", words["completion"])
        self.assertEqual(words["late"], "words of invalid_request_error")

    def test_messages_to_a_server_of_the_openai_wire(self):
        lines = [messages("m", "question", system="S"), messages("x", "q", container="c")]
        code, rows, err = self.run_program(lines, "--backend", "mlx-server", "--executable",
                                           SUPPORT / "fake_openai.py", "--model", "fake")
        self.assertEqual(code, 1, err)
        body = rows[0]["response"]["body"]
        self.assertEqual(body["type"], "message")
        self.assertEqual(body["content"], [{"type": "text", "text": "answer to question "}])
        self.assertEqual(body["stop_reason"], "end_turn")
        self.assertEqual(body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"],
                         rows[0]["evalrt"]["prompt_tokens"])
        self.assertIn('"container"', rows[1]["error"]["message"])

    def test_what_is_shared_is_marked(self):
        text = "document " * 800
        lines = [messages(str(i), f"{i} text", system=text) for i in range(4)]
        code, _, err = self.run_program(lines, "--backend", "anthropic-url", "--url", self.url)
        self.assertEqual(code, 0, err)
        bodies = [it["body"] for it in self.asked() if "system" in it["body"]]
        self.assertEqual(len(bodies), 4)
        for body in bodies:
            self.assertEqual(body["system"], [{"type": "text", "text": text,
                                               "cache_control": {"type": "ephemeral"}}])


if __name__ == "__main__":
    unittest.main(verbosity=1)
