#!/usr/bin/env python3
"""A model server for tests of the program: starts like mlx_lm.server, answers at once.

What it does wrong depends on the name of the model, what it answers on the question. Standard
library only. Prints what it is asked to the file named in FAKE_OPENAI_LOG, a JSON object a line;
with --port 0 the port that it has to stdout. FAKE_OPENAI_GATE="N FILE": after N requests it answers
no more of them until FILE is there. FAKE_OPENAI_VERSION: what it says of itself.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--decode-concurrency", type=int)
parser.add_argument("--prompt-cache-size", type=int)
parser.add_argument("--kv-bits", type=int)
args = parser.parse_args()
if os.path.islink(sys.argv[0]):  # a server with a log of its own
    os.environ["FAKE_OPENAI_LOG"] = sys.argv[0] + ".log"


def first_time():
    """Whether no server before this one came here."""
    try:
        os.close(os.open(os.environ["FAKE_OPENAI_LOG"] + ".once", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


if args.model == "finds-its-port-taken" and first_time():
    print("OSError: [Errno 98] Address already in use", file=sys.stderr, flush=True)
    sys.exit(1)
if args.model == "dies-while-loading":
    print("loading weights\nValueError: no such model in this folder", file=sys.stderr, flush=True)
    sys.exit(3)

lock = threading.Lock()
crowd = threading.Condition(lock)
one = threading.Lock()  # of those that are answered one at a time
running = most = 0  # requests at once, now and so far
hung = threading.Event()
counter = itertools.count()
arrivals, turns = itertools.count(), itertools.count()
gate = os.environ.get("FAKE_OPENAI_GATE", "").split(" ", 1) if "FAKE_OPENAI_GATE" in os.environ else []
heard = set()
VERSION = os.environ.get("FAKE_OPENAI_VERSION", "fake-1.0")


def busy():
    """Whether the test has asked for one more refusal: a byte of this file each."""
    try:
        with lock, open(os.environ.get("FAKE_OPENAI_LOG", "") + ".busy", "r+b") as file:
            left = file.seek(0, os.SEEK_END)
            file.truncate(max(left - 1, 0))
            return left > 0
    except FileNotFoundError:
        return False


def keep_abreast():
    """Waits, not for ever, until all servers with a log in this folder have been asked about as much."""
    own = Path(os.environ["FAKE_OPENAI_LOG"])
    for _ in range(3000):
        lines = {path: path.read_bytes().count(b"\n") for path in own.parent.glob("*.log")}
        if lines[own] <= min(lines.values()) + 8:
            break
        time.sleep(0.01)


def log(entry):
    if path := os.environ.get("FAKE_OPENAI_LOG"):
        with lock, open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Handler(BaseHTTPRequestHandler):
    inside = False

    def log_message(self, *_):
        pass

    def leave(self):
        """Not running any more: before its client can know that it is answered."""
        global running
        if self.inside:
            self.inside = False
            with lock:
                running -= 1

    def answer(self, status, body, kind="application/json"):
        self.leave()
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        while os.path.exists("busy-with-something"):
            time.sleep(0.01)
        if self.path == "/health" and args.model == "like-mlx":
            return self.answer(200, json.dumps({"status": "ok"}))
        if self.path != "/v1/models" and args.model == "like-mlx":
            return self.answer(404, "{}")
        if self.path == "/version" and args.model == "like-vllm":
            return self.answer(200, json.dumps({"version": VERSION}))
        owner = {"owned_by": "vllm"} if args.model == "like-vllm" else {}
        self.answer(200, json.dumps({"object": "list", "data": [{"id": args.model, **owner}]}))

    def do_POST(self):
        global running, most
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        with crowd:
            running += 1
            now = running
            most = max(most, now)
            crowd.notify_all()
        self.inside = True
        log({"path": self.path, "body": body, "in_flight": now})
        try:
            if question.startswith("meet"):  # until so many have been here at once
                with crowd:
                    crowd.wait_for(lambda: most >= int(question.split()[1]), 120)
            self.reply(body, question)
        finally:
            self.leave()

    def reply(self, body, question):
        if busy() or (args.model == "refuses" and body.get("max_tokens") != 1):
            return self.answer(503, json.dumps({"error": {"message": "warming up"}}))
        # "sick-404" answers nothing else, "fails-404" nothing but one token, "turns-404" nothing else
        # after five; -0: no answer at all; -ctx: all is too long.
        kind, _, status = args.model.partition("-")
        more = body.get("max_tokens") != 1
        if kind == "sick" or (kind == "fails" and more) or (kind == "turns" and more and next(turns) >= 5):
            if status == "0":
                return self.answer(200, json.dumps({"choices": []}))
            if status == "ctx":
                return self.answer(400, json.dumps({"error": {
                    "message": "This model's maximum context length is 16 tokens. However, you requested 50"}}))
            return self.answer(int(status), json.dumps({"error": {"message": f"bad replica {status}"}}))
        if question == "fail":
            return self.answer(400, json.dumps({"error": {"message": "this one is refused"}}))
        if question.startswith("fail once") and not os.path.exists("failed-once"):
            return self.answer(500, json.dumps({"error": {"message": "this once"}}))
        if question == "die" or (question == "die once" and first_time()):
            print("Segmentation fault in the engine", file=sys.stderr, flush=True)
            os._exit(9)
        if question == "hang once" and first_time():
            hung.set()  # the engine's thread has died, the HTTP server goes on
        if question == "hang up once" and first_time():
            self.close_connection = True
            return None
        if gate and body.get("max_tokens") != 1 and next(arrivals) >= int(gate[0]):
            while not os.path.exists(gate[1]):
                time.sleep(0.01)
        if question.startswith("abreast"):
            keep_abreast()
        if question == "hold" or (question == "hold the second time" and question in heard):
            # until the client goes
            self.connection.recv(1)
            return log({"gone": question})
        heard.add(question)
        if question == "talk":
            return self.talk(body)
        if args.model == "dies-always" and body.get("max_tokens") != 1:
            os._exit(9)
        if hung.is_set():
            time.sleep(1000)
        if "sleep" in question:
            time.sleep(float(question.split()[1]))
        if args.model == "wrong-key":
            return self.answer(401, json.dumps({"error": {"message": "Incorrect API key"}}))
        text = f"answer {next(counter)}" if question == "count" else f"answer to {question}"
        usage = {"prompt_tokens": 40, "completion_tokens": len(text.split()),
                 "prompt_tokens_details": {"cached_tokens": 20}}
        head = {"id": "chatcmpl-1", "model": body.get("model"), "created": 1,
                "system_fingerprint": VERSION}
        if "prompt" in body:
            return self.answer(200, json.dumps(head | {
                "object": "text_completion", "usage": usage,
                "choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}))
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            return self.answer(200, json.dumps(
                head | {"object": "chat.completion", "usage": usage,
                        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if question == "alone":
            with one:
                time.sleep(0.1)  # until the one before has been read
                return self.stream(body, head, usage | {"completion_tokens": 50}, ["word"] * 50, 0.002)
        return self.stream(body, head, usage, text.split(" "))

    def stream(self, body, head, usage, words, pause=0):
        for word in words:
            delta = {"role": "assistant", "content": word + " "}
            self.event(head | {"object": "chat.completion.chunk",
                               "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            if pause:
                time.sleep(pause)
        self.event(head | {"object": "chat.completion.chunk",
                           "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event(head | {"object": "chat.completion", "choices": [], "usage": usage})
        self.leave()
        self.wfile.write(b"data: [DONE]\n\n")

    def talk(self, body):
        """Goes on until the client goes."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            while True:
                delta = {"role": "assistant", "content": "word "}
                self.event({"id": "chatcmpl-1", "model": body.get("model"), "created": 1,
                            "object": "chat.completion.chunk",
                            "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                time.sleep(0.01)
        except OSError:
            log({"gone": "talk"})

    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")


class Server(ThreadingHTTPServer):
    allow_reuse_address = args.model != "holds-its-port"
    request_queue_size = 5  # as mlx_lm.server
    daemon_threads = True


server = Server((args.host, args.port), Handler)
if args.port == 0:
    print(server.server_port, flush=True)
server.serve_forever()
