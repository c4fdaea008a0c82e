#!/usr/bin/env python3
"""No byte that the evalrt program writes has the API key in it, whatever the server says.

    canary_key.py EVALRT_PROGRAM
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

EVALRT = os.path.abspath(sys.argv.pop(1))
KEY = "sk-canary-5d41402abc4b2a76b9719d911017c592"


class Handler(BaseHTTPRequestHandler):
    """Answers, but repeats the key wherever a server can put it when it fails."""

    def log_message(self, *_):
        pass

    def send(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("x-request-id", self.key())
        self.end_headers()
        self.wfile.write(data)

    def key(self):
        return self.headers.get("Authorization", "Bearer none").removeprefix("Bearer ")

    def do_GET(self):
        if self.path != "/v1/models":
            return self.send(404, {"error": f"no {self.key()}"})
        self.send(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.key())
        word = body["messages"][-1]["content"]
        error = {"message": f"wrong key {self.key()}", "type": self.key(), "code": self.key()}
        if word.isdigit():
            return self.send(int(word), {"error": error, "request_id": self.key()})
        if word == "late":
            return self.send(200, {"error": error, "usage": {"prompt_tokens": 1}})
        if word == "stream":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
            return
        if word == "broken":
            self.wfile.write(f"{self.key()} is no HTTP\r\n\r\n".encode())
            return
        self.send(200, {"id": "1", "model": "m", "choices": [{
            "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}]})


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class Canary(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.keys = set()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        words = ["hello", "400", "404", "422", "500", "late", "stream", "broken", "413"]
        (self.dir / "suite").write_text("".join(json.dumps({
            "custom_id": f"{i}", "url": "/v1/chat/completions", "body": {
                "messages": [{"role": "user", "content": word}], "stream": word == "stream"}}) + "\n"
            for i, word in enumerate(words)))
        self.env = dict(os.environ, OPENAI_API_KEY=KEY, TMPDIR=folder.name)

    def run_program(self, *args, env=None):
        done = subprocess.run([EVALRT, *args], cwd=self.dir, capture_output=True, timeout=600,
                              env=env or self.env)
        self.look("stdout", done.stdout)
        self.look("stderr", done.stderr)
        return done

    def look(self, name, data):
        # Also what is left of it where a text was cut.
        for part in (KEY, KEY[:16]):
            self.assertNotIn(part.encode(), data, name)

    def look_at_files(self, *expected):
        found = set()
        for path in self.dir.rglob("*"):
            if path.is_file() and path.name != "key":
                found.add(path.name)
                self.look(path.name, path.read_bytes())
        self.assertLessEqual(set(expected), found)

    def test_a_run_with_every_kind_of_failure(self):
        (self.dir / "key").write_text(KEY + "\n")
        without = {k: v for k, v in self.env.items() if k != "OPENAI_API_KEY"}
        for name, env, more in (("a", self.env, ()), ("b", without, ("--api-key-file", "key"))):
            self.server.keys.clear()
            done = self.run_program("run", "suite", "-o", f"out-{name}", "--journal", f"journal-{name}",
                                    "--json", f"summary-{name}", "--backend", "openai-url", "--url",
                                    self.url, "--retries", "1", *more, env=env)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertEqual(self.server.keys, {KEY})
            rows = [json.loads(row) for row in (self.dir / f"out-{name}").read_text().splitlines()]
            self.assertEqual([bool(row["error"]) for row in rows], [False] + [True] * 8)
            self.assertIn("[key]", json.dumps(rows))
            self.run_program("report", f"journal-{name}")
            self.run_program("report", f"journal-{name}", "--json")
            self.look_at_files(f"out-{name}", f"journal-{name}", f"summary-{name}")

    def test_a_key_that_is_refused(self):
        (self.dir / "suite").write_text("".join(json.dumps({
            "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "401"}],
                                                    "seed": i}}) + "\n" for i in range(8)))
        done = self.run_program("run", "suite", "-o", "out", "--json", "summary", "--journal", "j",
                                "--backend", "openai-url", "--url", self.url, "--max-in-flight", "1")
        self.assertEqual(done.returncode, 5, done.stderr)
        self.look_at_files("j", "summary")
        self.run_program("backends", "--probe", self.url)

    def test_a_gateway(self):
        program = subprocess.Popen([EVALRT, "gateway", "--backend", "openai-url", "--url", self.url,
                                    "--journal", "journal", "--retries", "1"], cwd=self.dir,
                                   env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(program.kill)
        first = program.stdout.readline()
        self.look("stdout", first)
        for line in (self.dir / "suite").read_text().splitlines():
            request = urllib.request.Request(
                json.loads(first)["url"] + "/chat/completions",
                json.dumps(json.loads(line)["body"]).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:
                    self.look("answer", answer.read() + str(answer.headers).encode())
            except urllib.error.HTTPError as error:
                self.look("answer", error.read() + str(error.headers).encode())
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=600)
        self.look("stdout", out)
        self.look("stderr", err)
        self.look_at_files("journal")


if __name__ == "__main__":
    unittest.main()
