#!/usr/bin/env python3
"""Replays oMLX as it was recorded (tests/data/omlx): `fake_omlx.py serve --model-dir D ...`.

Loads at the first request. Answers in one piece with 200 and a space at once, streams with a chunk
of the model "keepalive" first and several tokens in a chunk. Its prefix cache has whole blocks of
256 tokens (here: of 4 bytes), which show FAKE_OMLX_COMMIT seconds after the request has ended.
FAKE_OMLX_OLD=1: the older shape of cached tokens, left out where they are 0.
Prints what it is asked to the file named in FAKE_OPENAI_LOG, a JSON object a line.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("verb", choices=["serve"])
parser.add_argument("--model-dir", required=True)
parser.add_argument("--base-path", required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--max-concurrent-requests", type=int, default=8)
args = parser.parse_args()

MODELS = sorted(p.name for p in Path(args.model_dir).iterdir() if (p / "config.json").exists())
OLD = "FAKE_OMLX_OLD" in os.environ
COMMIT = float(os.environ.get("FAKE_OMLX_COMMIT", "1.5"))
(Path(args.base_path) / "settings.json").write_text(json.dumps(vars(args)))

lock = threading.Lock()
met = threading.Event()
stored = {}  # a prompt's beginning -> when it shows
loaded = False
running = 0


def log(entry):
    with lock, open(os.environ["FAKE_OPENAI_LOG"], "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


log({"argv": sys.argv[1:], "base_path_env": os.environ.get("OMLX_BASE_PATH")})


def blocks(prompt):
    return [prompt[:end] for end in range(1024, len(prompt) + 1, 1024)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5  # as uvicorn closes what is idle

    def log_message(self, *_):
        pass

    def whole(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def chunked(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def event(self, data):
        self.chunk(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")

    def do_GET(self):
        log({"get": self.path})
        if self.path == "/v1/models":
            return self.whole(200, {"object": "list", "data": [
                {"id": m, "object": "model", "created": 1, "owned_by": "omlx"} for m in MODELS]})
        if self.path == "/health":
            return self.whole(200, {"status": "healthy", "engine_pool": {"loaded_count": int(loaded)}})
        if self.path == "/api/status":
            return self.whole(200, {"status": "ok", "version": "0.4.5.dev1", "total_cached_tokens": 0})
        self.whole(404, {"error": {"message": "Not Found", "type": "not_found_error"}})

    def do_POST(self):
        global loaded, running
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("model") not in MODELS:
            return self.whole(404, {"error": {
                "message": f"Model '{body.get('model')}' not found. Available models: "
                           + ", ".join(MODELS), "type": "not_found_error"}})
        if not loaded:
            time.sleep(0.3)
            loaded = True
        prompt = json.dumps(body["messages"])
        now = time.monotonic()
        with lock:
            running += 1
            cached = max((len(b) // 4 for b in blocks(prompt) if stored.get(b, now + 1) <= now),
                         default=0)
            width = running
        log({"body": body, "in_flight": width, "cached": cached})
        self.prompt = prompt
        if width > 1:
            met.set()
        if cached:
            met.wait(60)  # those who waited for a leader come together
        try:
            self.answer(body, len(prompt) // 4, cached)
        finally:
            self.commit()

    def commit(self):
        """Before its client can know that it has ended."""
        global running
        with lock:
            if self.prompt is None:
                return
            running -= 1
            for block in blocks(self.prompt):
                stored.setdefault(block, time.monotonic() + COMMIT)
            self.prompt = None

    def answer(self, body, tokens, cached):
        pieces = ["" if "nothing" in body["messages"][-1]["content"] else "The answer", " is", " yes."]
        if not pieces[0]:
            pieces = []
        usage = {"prompt_tokens": tokens, "completion_tokens": 2 * len(pieces),
                 "total_tokens": tokens + 2 * len(pieces)}
        if not OLD:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        elif cached:
            usage["cached_tokens"] = cached
        head = {"id": "chatcmpl-1", "created": 7, "model": body["model"]}
        if not body.get("stream"):
            self.chunked("application/json")
            self.chunk(b" ")
            time.sleep(0.2)
            if "too long" in body["messages"][-1]["content"]:
                error = {"message": "Prompt too long: 9031 tokens exceeds max context window of 8192 tokens"}
                self.chunk(json.dumps({"error": error}).encode())
            else:
                message = {"role": "assistant"} | ({"content": "".join(pieces)} if pieces else {})
                self.chunk(json.dumps(head | {
                    "object": "chat.completion", "usage": usage,
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode())
            self.commit()
            return self.chunk(b"")
        head["object"] = "chat.completion.chunk"
        self.chunked("text/event-stream; charset=utf-8")
        self.event(head | {"id": "chatcmpl-other", "created": 0, "model": "keepalive", "choices": [
            {"index": 0, "delta": {"content": ""}, "finish_reason": None}]})
        self.event(head | {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        for piece in pieces:
            time.sleep(0.1)
            self.event(head | {"choices": [{"index": 0, "delta": {"content": piece}}]})
        self.event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event(head | {"choices": [], "usage": usage})
        self.commit()
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")


ThreadingHTTPServer.daemon_threads = True
ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
