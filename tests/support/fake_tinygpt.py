#!/usr/bin/env python3
"""A stand-in for `tinygpt serve MODEL ...`: one request at a time, answers in one body, errors in
plain text, finish_reason "stop" whatever has ended the answer, prompts cut without a word.
Prints its arguments and the bodies, byte for byte, to the file named in FAKE_OPENAI_LOG."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

host, port = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
if os.path.islink(sys.argv[0]):  # a server with a log of its own
    os.environ["FAKE_OPENAI_LOG"] = sys.argv[0] + ".log"
lock, serial = threading.Lock(), threading.Lock()
waiting = 0


def log(entry):
    with lock, open(os.environ["FAKE_OPENAI_LOG"], "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


log({"argv": sys.argv[1:]})


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        self.answer(200, json.dumps({"object": "list", "data": [
            {"id": "tinygpt", "object": "model", "owned_by": "tinygpt"}]}), "application/json")

    def do_POST(self):
        global waiting
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with lock:
            waiting += 1
            width = waiting
        log({"path": self.path, "text": text, "in_flight": width})
        with serial:
            self.reply(json.loads(text))
        with lock:
            waiting -= 1

    def reply(self, body):
        chat = self.path.endswith("/chat/completions")
        prompt = body["prompt"] if not chat else "".join(
            m["content"] if isinstance(m["content"], str) else "" for m in body["messages"])
        if prompt == "fail":
            return self.answer(500, "error: boom", "text/plain")
        words = ["word"] * min(body.get("max_tokens", 128), 200)
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": " ".join(words)}} if chat else {
            "text": " ".join(words)}
        self.answer(200, json.dumps({
            "id": "tinygpt-1", "model": "tinygpt", "choices": [choice],
            "usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": len(words)}}),
            "application/json")


ThreadingHTTPServer.daemon_threads = True
ThreadingHTTPServer((host, port), Handler).serve_forever()
