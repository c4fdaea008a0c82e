#!/usr/bin/env python3
"""evalrt gateway from outside: both wires in front of both, its child, its end.

    gateway.py EVALRT_PROGRAM
"""

import fcntl
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

EVALRT = os.path.abspath(sys.argv.pop(1))
SUPPORT = Path(__file__).resolve().parent.parent / "support"
sys.path.insert(0, str(SUPPORT))

from fake_anthropic import ANSWERS, TEXT  # noqa: E402
from patience import LONG, free_port, until  # noqa: E402

KEY = "sk-canary-0123456789"
TOOL_TEXT, *TOOLS = ANSWERS["tools"][0]


class Upstream(BaseHTTPRequestHandler):
    """An OpenAI server that answers the question "tools" with two calls, "hold" with nothing until
    the client goes, "flood" with as much as is read, "slow..." after a while, which lasts until there
    are `together` of them, "gate..." once the gate is open, "busy" at the third time, and /tokenize with
    what it was asked."""
    protocol_version = "HTTP/1.1"
    asked, left, gate, flooded, no_models = [], threading.Event(), threading.Event(), 0, False
    numbers = itertools.count(1)
    slow, most, together, changed = 0, 0, 1, threading.Condition()
    SCORED = [{"index": 0, "text": "ab c", "finish_reason": "length", "logprobs": {
        "tokens": ["a", "b", " c", "d"], "token_logprobs": [None, -1.25, -2.5, -0.125], "text_offset": [0, 1, 2, 4],
        "top_logprobs": [None, {"b": -1.25}, {" x": -0.5, " c": -2.5}, {"d": -0.125}]}}]

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def other(self):
        """What evalrt does not know: the status that the path ends in."""
        status = int(self.path.split("?")[0].rsplit("/", 1)[1])
        data = f"{self.command} {self.path} é ({KEY})".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/x-words; charset=utf-8")
        self.send_header("Content-Length", str(0 if status == 204 else len(data)))
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        if status != 204:
            self.wfile.write(data)

    def do_PUT(self):
        self.do_POST()

    def do_DELETE(self):
        self.other()

    def do_GET(self):
        if "other" in self.path:
            return self.other()
        if self.no_models:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.answer(200, {"object": "list", "data": [{"id": "one", "object": "model"}]})

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        body = json.loads(text)
        self.asked.append({"path": self.path, "text": text, "body": body,
                           "authorization": self.headers["Authorization"]})
        if self.path == "/tokenize":
            return self.answer(200, {"tokens": [1, 2]})
        if self.path == "/v1/completions":
            return self.answer(200, {"id": "cmpl-1", "object": "text_completion", "choices": self.SCORED})
        if "messages" not in body:
            return self.other()
        question = body["messages"][-1]["content"]
        if question == "hold" or question == "hold after text":
            if question != "hold":
                self.begin()
                self.event({"id": "c", "choices": [{"index": 0, "delta": {"content": "so"}}]})
            if self.connection.recv(1) == b"":
                self.left.set()
            self.close_connection = True
            return None
        if question == "flood":  # 200 MB, as far as they are taken
            self.begin()
            event = {"id": "c", "choices": [{"index": 0, "delta": {"content": "x" * 10000}}]}
            try:
                for _ in range(20000):
                    self.event(event)
                    Upstream.flooded += 10000
            except OSError:
                self.left.set()
            return None
        if question == "breaks":
            self.begin()
            self.event({"id": "c", "choices": [{"index": 0, "delta": {"content": "so"}}]})
            return self.event({"error": {"message": "it broke", "type": "overloaded"}})
        if question == "too long":
            return self.answer(400, {"error": {"message": f"maximum context length is 9 ({KEY})"}})
        calls = [{"id": f"call_{i}", "type": "function", "function": {
            "name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate([("get_weather", '{"city": "Zürich"}'), ("now", "")])]
        if question == "busy" and sum(it["text"] == text for it in self.asked) < 3:
            self.send_response(503)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if question.startswith("gate"):
            self.gate.wait(LONG)
        if question.startswith("slow"):  # another answer each time
            self.be_slow()
            text = f"answer {next(self.numbers)} to {question}"
            return self.answer(200, {"id": "c", "choices": [{"index": 0, "finish_reason": "stop",
                "message": {"role": "assistant", "content": text}}]})
        if not body.get("stream"):
            message = {"role": "assistant", "content": TEXT, "tool_calls": []}
            return self.answer(200, {"id": "c", "choices": [
                {"index": 0, "message": message, "finish_reason": "stop"}]})
        self.begin()
        for i in range(0, len(TEXT), 3):
            self.event({"id": "c", "model": "one", "choices": [
                {"index": 0, "delta": {"content": TEXT[i:i + 3]}}]})
        if question == "tools":
            for i, call in enumerate(calls):
                arguments = call["function"]["arguments"]
                first = {**call, "index": i, "function": {**call["function"], "arguments": ""}}
                self.event({"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [first]}}]})
                for c in arguments:
                    self.event({"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [
                        {"index": i, "function": {"arguments": c}}]}}]})
        reason = "tool_calls" if question == "tools" else "stop"
        self.event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self.event({"id": "c", "choices": [], "usage": {
            "prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35,
            "prompt_tokens_details": {"cached_tokens": 10}}})
        self.wfile.write(b"data: [DONE]\n\n")

    def be_slow(self):
        with self.changed:
            Upstream.slow += 1
            Upstream.most = max(self.most, self.slow)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.together, 60)
        time.sleep(0.3)
        with self.changed:
            Upstream.slow -= 1

    def begin(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")


def events(text):
    """Types and data of a stream; and whether it ended as it should."""
    out, done = [], False
    for block in text.split("\n\n"):
        kind, data = None, None
        for line in block.split("\n"):
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        if data == "[DONE]":
            done = True
        elif data is not None:
            out.append((kind, json.loads(data)))
            done = done or kind == "message_stop"
    return out, done


def chat_of(chunks):
    message, reason, usage = {"content": None, "tool_calls": []}, None, None
    for _, chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content") is not None:
                message["content"] = (message["content"] or "") + delta["content"]
            message["tool_calls"] += delta.get("tool_calls", [])
            reason = choice["finish_reason"] or reason
    return message, reason, usage


def message_of(chunks):
    blocks, partial, reason, usage = [], {}, None, {}
    for kind, data in chunks:
        if kind == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"])
        elif kind == "content_block_delta":
            delta, block = data["delta"], blocks[data["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                partial[data["index"]] = partial.get(data["index"], "") + delta["partial_json"]
        elif kind == "message_delta":
            reason, usage = data["delta"]["stop_reason"], data["usage"]
    for index, text in partial.items():
        blocks[index]["input"] = json.loads(text)
    return blocks, reason, usage


class WithGateway(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        Upstream.asked.clear()
        Upstream.left.clear()
        Upstream.gate.clear()
        Upstream.flooded = Upstream.most = 0
        Upstream.together = 1
        server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.openai = ["--backend", "openai-url", "--no-probe", "--url",
                       f"http://127.0.0.1:{server.server_port}/v1"]

    def anthropic(self):
        server = subprocess.Popen([sys.executable, SUPPORT / "fake_anthropic.py"],
                                  env=dict(os.environ, FAKE_ANTHROPIC_KEY=KEY),
                                  stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.stdout.close)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        port = server.stdout.readline().strip()
        return ["--backend", "anthropic-url", "--no-probe", "--url", f"http://127.0.0.1:{port}/v1"]

    def popen(self, args, env=None, under=(), **more):
        clean = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "REMOTE_OPENAI_API_KEY"):
            clean.pop(name, None)
        return subprocess.Popen([*under, EVALRT, "gateway", *map(str, args)], text=True,
                                env={**clean, **(env or {})},
                                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": self.dir, **more})

    def start(self, *args, env=None):
        process = self.popen(args, env or {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY})
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        line = process.stdout.readline()
        self.assertTrue(line, "no address")
        self.address = json.loads(line)
        self.port = int(self.address["url"].rsplit(":", 1)[1].split("/")[0])
        return process

    def child(self, *command, options=(), env=None):
        process = self.popen([*self.openai, *options, "--", *command], env)
        out, err = process.communicate(timeout=LONG)
        return process.returncode, out, err

    def ask(self, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        self.addCleanup(connection.close)
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, json.dumps(body),
                               {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers

    def chat(self, question, **more):
        return {"model": "x", "messages": [{"role": "user", "content": question}], **more}

    def messages(self, question, **more):
        return {"max_tokens": 50, **self.chat(question, **more)}


class Gateway(WithGateway):
    # Both wires in front of both

    def check_chat(self, tools):
        """Streamed or not, the client gets the same."""
        question = "tools" if tools else "text"
        status, text, _ = self.ask("/v1/chat/completions", self.chat(question))
        self.assertEqual(status, 200, text)
        answer = json.loads(text)
        choice, = answer["choices"]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            self.assertIsInstance(answer["usage"][key], int)
        status, text, headers = self.ask("/chat/completions", self.chat(
            question, stream=True, stream_options={"include_usage": True}))
        self.assertEqual(status, 200, text)
        self.assertEqual(headers["Content-Type"], "text/event-stream")
        chunks, done = events(text)
        self.assertTrue(done)
        message, reason, usage = chat_of(chunks)
        self.assertEqual(message["content"], choice["message"]["content"])
        self.assertEqual(reason, choice["finish_reason"])
        self.assertEqual(usage, answer["usage"])
        self.assertEqual({chunk["id"] for _, chunk in chunks}, {chunks[0][1]["id"]})
        if tools:
            self.assertEqual(reason, "tool_calls")
            calls = [{k: v for k, v in call.items() if k != "index"} for call in message["tool_calls"]]
            self.assertEqual([call["index"] for call in message["tool_calls"]], [0, 1])
            self.assertEqual(calls, choice["message"]["tool_calls"])
            self.assertEqual([call["function"]["name"] for call in calls], ["get_weather", "now"])
            self.assertEqual(json.loads(calls[0]["function"]["arguments"])["city"], "Zürich")
            self.assertEqual(calls[1]["function"]["arguments"], "{}")
        else:
            self.assertNotIn("tool_calls", choice["message"])
            self.assertEqual(message["content"], TEXT)

    def check_messages(self, tools):
        question = "tools" if tools else "text"
        status, text, _ = self.ask("/v1/messages?beta=true", self.messages(question),
                                   **{"anthropic-version": "2023-06-01"})
        self.assertEqual(status, 200, text)
        answer = json.loads(text)
        self.assertEqual((answer["type"], answer["role"]), ("message", "assistant"))
        self.assertIsInstance(answer["usage"]["input_tokens"], int)
        status, text, _ = self.ask("/v1/messages", self.messages(question, stream=True))
        self.assertEqual(status, 200, text)
        chunks, done = events(text)
        self.assertTrue(done)
        self.assertEqual(chunks[0][0], "message_start")
        blocks, reason, usage = message_of(chunks)
        self.assertEqual(blocks, answer["content"])
        self.assertEqual(reason, answer["stop_reason"])
        self.assertEqual(usage, answer["usage"])
        if tools:
            self.assertEqual([(it["name"], it["input"]) for it in blocks if it["type"] == "tool_use"][1],
                             ("now", {}))
            self.assertEqual(reason, "tool_use")

    def test_openai_clients_and_an_openai_server(self):
        self.start(*self.openai)
        self.check_chat(tools=False)
        self.check_chat(tools=True)

    def test_anthropic_clients_and_an_openai_server(self):
        self.start(*self.openai)
        self.check_messages(tools=False)
        self.check_messages(tools=True)

    def test_openai_clients_and_an_anthropic_server(self):
        self.start(*self.anthropic())
        self.check_chat(tools=False)
        self.check_chat(tools=True)

    def test_anthropic_clients_and_an_anthropic_server(self):
        self.start(*self.anthropic())
        self.check_messages(tools=False)
        self.check_messages(tools=True)
        for word in ("thinking", "cached", "stopped", "empty"):
            with self.subTest(word):
                _, whole, _ = self.ask("/v1/messages", self.messages(word))
                _, text, _ = self.ask("/v1/messages", self.messages(word, stream=True))
                chunks, done = events(text)
                self.assertTrue(done)
                self.assertEqual([block["type"] for block in message_of(chunks)[0]],
                                 [block["type"] for block in json.loads(whole)["content"]])

    # What goes on, and what does not

    def test_a_body_goes_on_as_it_came(self):
        self.start(*self.openai)
        body = {"model": "x", "messages": [{"role": "user", "content": "é", "mine": {"a": [1.0]}}],
                "stream": False, "zzz": None}
        self.assertEqual(self.ask("/v1/chat/completions", body)[0], 200)
        got = Upstream.asked[-1]
        self.assertEqual(got["authorization"], f"Bearer {KEY}")  # ours, not the client's
        self.assertIn('"messages": [{"role": "user", "content": "\\u00e9", "mine": {"a": [1.0]}}]',
                      got["text"])
        self.assertIn('"zzz": null', got["text"])
        self.assertEqual(got["body"]["model"], "x")

    def test_a_scored_prompt_comes_back_as_the_server_scored_it(self):
        self.start(*self.openai)
        body = {"model": "m", "prompt": [[97, 98, 99]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
                "echo": True}  # as lm_eval asks for log-likelihoods
        status, text, _ = self.ask("/v1/completions", body)
        self.assertEqual(status, 200, text)
        answer = json.loads(text)
        self.assertEqual(answer["choices"], Upstream.SCORED)
        self.assertIsInstance(answer["usage"]["total_tokens"], int)
        asked = Upstream.asked[-1]["body"]
        self.assertEqual({key: asked.get(key) for key in body}, body)
        self.assertFalse(asked.get("stream"))  # of a stream some servers leave log probabilities out

    def test_what_is_no_question_to_a_model_is_passed_on(self):
        self.start(*self.openai)
        status, text, _ = self.ask("/tokenize", {"prompt": "hi", "add_special_tokens": False})
        self.assertEqual((status, json.loads(text)), (200, {"tokens": [1, 2]}))
        self.assertEqual(Upstream.asked[-1]["text"], '{"prompt": "hi", "add_special_tokens": false}')

    def test_models_health_and_metrics(self):
        self.start(*self.openai)
        for path in ("/v1/models", "/models"):
            self.assertEqual(json.loads(self.ask(path)[1])["data"][0]["id"], "one")
        Upstream.no_models = True  # what mlx_lm.server does without a cache of models
        self.addCleanup(setattr, Upstream, "no_models", False)
        listed = json.loads(self.ask("/v1/models")[1])
        self.assertEqual([it["id"] for it in listed["data"]], ["one"])  # as it was at the start
        self.assertEqual(listed["data"][0]["owned_by"], "evalrt")
        self.assertEqual(self.ask("/health")[0], 200)
        self.ask("/v1/chat/completions", self.chat("text"))
        text = self.ask("/metrics")[1]
        for line in ("evalrt_answered_total 1", "evalrt_cached_tokens_total 10", "evalrt_queued 0"):
            self.assertIn(f"\n{line}\n", text)

    def test_errors_have_the_wire_s_shape_and_no_key_in_them(self):
        self.start(*self.openai)
        status, text, headers = self.ask("/v1/chat/completions", self.chat("too long"))
        self.assertEqual(status, 400)
        self.assertEqual(headers["x-should-retry"], "false")
        self.assertEqual(json.loads(text)["error"]["code"], "context_length_exceeded")
        self.assertNotIn(KEY, text)
        status, text, headers = self.ask("/v1/messages", self.messages("too long"))
        self.assertEqual((status, headers["x-should-retry"]), (400, "false"))
        self.assertEqual(json.loads(text)["error"]["type"], "invalid_request_error")

    def test_what_has_no_place_here_is_the_server_s(self):
        self.start(*self.openai)
        for method, path, body, status in (
                ("GET", "/v1/other/200?a=b%20c&d", None, 200), ("GET", "/other/404", None, 404),
                ("POST", "/v1/other/201", '{"x":  1}', 201), ("PUT", "/other/418", "{}", 418),
                ("DELETE", "/v1/other/204", None, 204), ("GET", "/v1/other/503", None, 503)):
            with self.subTest(method=method, path=path):
                Upstream.asked.clear()
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
                self.addCleanup(connection.close)
                connection.request(method, path, body, {"Content-Type": "application/json",
                                                        "Authorization": "Bearer client-key"})
                answer = connection.getresponse()
                text = answer.read().decode()
                self.assertEqual(answer.status, status)
                if status != 204:
                    self.assertEqual(text, f"{method} {path} é ([key])")
                    self.assertEqual(answer.headers["Content-Type"], "text/x-words; charset=utf-8")
                if body:
                    self.assertEqual(Upstream.asked[0]["text"], body)
                    self.assertEqual(Upstream.asked[0]["authorization"], f"Bearer {KEY}")
        # A redirection is not followed, nor is a client sent past us.
        status, text, headers = self.ask("/v1/other/307")
        self.assertEqual((status, headers["Location"]), (502, None))
        self.assertIn("it redirects to", text)

    def test_a_stream_that_breaks_ends_in_an_error_and_not_as_an_answer(self):
        self.start(*self.openai)
        for path, body, end in (("/v1/chat/completions", self.chat, "[DONE]"),
                                ("/v1/messages", self.messages, "message_stop")):
            with self.subTest(path), self.assertRaises(http.client.IncompleteRead) as caught:
                self.ask(path, body("breaks", stream=True))
            text = caught.exception.partial.decode()
            self.assertIn("so", text)
            self.assertIn("it broke", text)
            self.assertNotIn(end, text)

    def test_a_client_that_leaves_takes_its_request_with_it(self):
        self.start(*self.openai)
        for question, stream in (("hold", False), ("hold", True), ("hold after text", True)):
            with self.subTest(question=question, stream=stream):
                Upstream.left.clear()
                Upstream.asked.clear()
                body = json.dumps(self.chat(question, stream=stream)).encode()
                with socket.create_connection(("127.0.0.1", self.port)) as client:
                    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                                   b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                                   % (self.port, len(body), body))
                    if question == "hold":
                        until(lambda: Upstream.asked)
                    else:
                        self.assertIn(b"HTTP/1.1 200", client.recv(100))
                self.assertTrue(Upstream.left.wait(LONG))  # it would be held for ever

    def test_a_client_that_does_not_read_stops_the_server(self):
        process = self.start(*self.openai)

        def memory():
            out = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)],
                                 capture_output=True, text=True).stdout
            return int(out) / 1000
        self.ask("/v1/chat/completions", self.chat("text", stream=True))
        before = memory()
        body = json.dumps(self.chat("flood", stream=True)).encode()
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                           % (self.port, len(body), body))
            deadline, last = time.monotonic() + LONG, -1
            while time.monotonic() < deadline and (last < 1 or Upstream.flooded != last):
                last = Upstream.flooded
                time.sleep(1)
            self.assertGreater(last, 0)
            self.assertEqual(Upstream.flooded, last, "the server still writes")
            self.assertLess(last, 50_000_000)  # what the systems' buffers take
            # What was read of the answer is kept, for it is put together.
            growth = memory() - before
            print(f"{last / 1e6:.0f} MB taken, {growth:.0f} MB more memory", file=sys.stderr)
            if "SANITIZED" not in os.environ:
                self.assertLess(growth, 40)
        self.assertTrue(Upstream.left.wait(LONG))

    # Several clients

    def metric(self, name):
        row, = (it for it in self.ask("/metrics")[1].splitlines() if it.startswith(f"evalrt_{name} "))
        return int(row.split()[1])

    def test_a_client_with_much_to_ask_does_not_keep_another_waiting(self):
        self.start(*self.openai, "--max-in-flight", 1)
        self.addCleanup(Upstream.gate.set)
        threads = []

        def ask(question, key):
            def run():
                answers.append(self.ask("/v1/chat/completions", self.chat(question),
                                        Authorization=f"Bearer {key}")[0])
            threads.append(threading.Thread(target=run, daemon=True))
            threads[-1].start()

        answers = []
        for n in range(60):
            ask(f"gate {n}", "one")
        until(lambda: self.metric("queued") == 59)
        ask("gate of another", "two")
        until(lambda: self.metric("queued") == 60)
        Upstream.gate.set()
        for thread in threads:
            thread.join(LONG)
        self.assertEqual(answers, [200] * 61)
        order = [it["body"]["messages"][0]["content"] for it in Upstream.asked if "messages" in it["body"]]
        self.assertLess([it for it in order if it.startswith("gate")].index("gate of another"), 12)

    def test_conversations_are_recognised_by_their_growing_history(self):
        self.start(*self.openai)
        for question in ("text", "tools"):
            messages = [{"role": "user", "content": question}]
            for _ in range(3):
                answer = json.loads(self.ask("/v1/chat/completions", {"messages": messages})[1])
                messages += [answer["choices"][0]["message"], {"role": "user", "content": question}]
        messages = [{"role": "user", "content": "text"}]
        for stream in (True, False):
            status, text, _ = self.ask("/v1/messages", {"max_tokens": 9, "messages": messages, "stream": stream})
            self.assertEqual(status, 200)
            messages += [{"role": "assistant", "content": [{"type": "text", "text": TEXT}]},
                         {"role": "user", "content": "and?"}]
        self.assertEqual(self.metric("continued_total"), 2 + 2 + 1)

    # Its own affairs

    def test_it_runs_until_it_is_told_to_stop(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(signal=number):
                process = self.start(*self.openai, "--json", "summary.json")
                self.assertEqual(self.address["anthropic_url"] + "/v1", self.address["url"])
                self.ask("/v1/chat/completions", self.chat("text"))
                process.send_signal(number)
                out, err = process.communicate(timeout=LONG)
                self.assertEqual((process.returncode, out), (0, ""), err)
                self.assertIn("prefix cached: 10 tokens", err)
                self.assertIn("1 answered, 0 failed", err)
                summary = json.loads((self.dir / "summary.json").read_text())
                self.assertEqual((summary["requests"], summary["answered"]), (1, 1))

    def test_a_port_and_a_token_of_ones_own(self):
        (self.dir / "token").write_text("tok-0123456789\n")
        port = free_port()
        self.start(*self.openai, "--listen", f"127.0.0.1:{port}", "--token-file", "token")
        self.assertEqual(self.port, port)
        status, text, headers = self.ask("/v1/models", Authorization="Bearer wrong-0123456789")
        self.assertEqual((status, headers["WWW-Authenticate"]), (401, "Bearer"))
        self.assertNotIn("0123456789", text)
        for name, value in (("Authorization", "Bearer tok-0123456789"), ("x-api-key", "tok-0123456789")):
            self.assertEqual(self.ask("/v1/models", **{name: value})[0], 200)
        self.assertEqual(self.ask("/v1/models", Authorization="tok-0123456789")[0], 401)
        code, _, err = self.child("true", options=["--listen", str(port)])
        self.assertEqual(code, 2)
        self.assertIn(f"cannot listen at 127.0.0.1 port {port}", err)

    def test_bad_usage_is_said_before_anything_is_run(self):
        for options, words in ((["--listen", "0.0.0.0:0"], "--token-file"),
                               (["--listen", "127.0.0.1:99999"], "HOST:PORT"),
                               (["--token-file", "none"], "cannot read a token"),
                               (["--parity", "3"], "--parity")):
            with self.subTest(options):
                code, _, err = self.child("true", options=options)
                self.assertEqual(code, 2)
                self.assertIn(words, err)
        code, _, err = self.child("no-such-program-here")
        self.assertEqual(code, 2)
        self.assertIn("there is no program 'no-such-program-here'", err)
        for number in ("0", "-1", "1.5", "101", "99999999999", "x"):
            code, _, err = self.child("true", options=[f"--rehearse={number}"])
            self.assertEqual(code, 2, number)
            self.assertIn("--rehearse=N: 1 to 100", err)
        process = self.popen([*self.openai, "--rehearse"])
        self.assertIn("--rehearse is for a command", process.communicate(timeout=LONG)[1])
        process = self.popen([*self.openai, "--"])
        self.assertIn("no command behind --", process.communicate(timeout=LONG)[1])
        self.assertEqual(process.returncode, 2)
        self.assertEqual(Upstream.asked, [])

    # The child

    SHOW = ("import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], "
            "sorted(map(int, os.listdir('/proc/self/fd'))) if os.path.exists('/proc/self/fd') else []]))")

    def test_a_child_is_led_to_the_gateway_and_only_the_child(self):
        (self.dir / "model").mkdir()
        code, out, err = self.child(sys.executable, "-c", self.SHOW, "--url", "--", "x y",
                                    options=["--model", "model"],
                                    env={"http_proxy": "http://127.0.0.1:1", "NO_PROXY": "a"})
        self.assertEqual(code, 0, err)
        env, arguments, descriptors = json.loads(out)  # and nothing else is on its stdout
        self.assertEqual(arguments, ["--url", "--", "x y"])
        url = env["ANTHROPIC_BASE_URL"]
        self.assertRegex(url, r"^http://127\.0\.0\.1:\d+$")
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "REMOTE_OPENAI_BASE_URL"):
            self.assertEqual(env[name], url + "/v1")
        self.assertEqual(f'http://{env["LOCAL_SERVER_ENDPOINT"]}:{env["LOCAL_SERVER_PORT"]}', url)
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "REMOTE_OPENAI_API_KEY"):
            self.assertEqual(env[name], "evalrt")
        self.assertEqual(env["REMOTE_OPENAI_TOKENIZER_PATH"], "model")
        self.assertEqual(env["NO_PROXY"], "a,127.0.0.1,localhost")
        self.assertEqual(env["no_proxy"], "a,127.0.0.1,localhost")
        self.assertLessEqual(set(descriptors), {0, 1, 2, 3})  # 3: the listing itself
        self.assertIn("0 answered, 0 failed", err)

    def test_what_no_proxy_is_for_stays(self):
        for given, wanted in (({"no_proxy": "a"}, ["a,127.0.0.1,localhost"] * 2),
                              ({"no_proxy": "a", "NO_PROXY": "b"}, ["a,127.0.0.1,localhost", "b,127.0.0.1,localhost"]),
                              ({"NO_PROXY": "127.0.0.1"}, ["127.0.0.1"] * 2), ({"no_proxy": "*"}, ["*"] * 2)):
            _, out, err = self.child(sys.executable, "-c", self.SHOW, env={"all_proxy": "http://127.0.0.1:1", **given})
            env = json.loads(out)[0]
            self.assertEqual([env["no_proxy"], env["NO_PROXY"]], wanted, err)

    def test_keys_that_are_set_stay_unless_there_is_a_token(self):
        (self.dir / "token").write_text("tok")
        keys = {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY}
        _, out, _ = self.child(sys.executable, "-c", self.SHOW, env=keys)
        self.assertEqual(json.loads(out)[0]["OPENAI_API_KEY"], KEY)
        _, out, err = self.child(sys.executable, "-c", self.SHOW, env=keys,
                                 options=["--token-file", "token"])
        for name in keys:
            self.assertEqual(json.loads(out)[0][name], "tok")
        self.assertNotIn(KEY, err)

    def test_a_child_s_questions_are_answered_and_its_exit_code_is_ours(self):
        script = """
import json, os, sys, urllib.request
def ask(question):
    body = {"messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                                     json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
print(ask("text")["usage"]["prompt_tokens"])
try:
    ask("too long")
except urllib.error.HTTPError as error:
    print(error.code)
sys.exit(7)
"""
        code, out, err = self.child(sys.executable, "-c", script, options=["--json", "s.json"])
        self.assertEqual((code, out.split()), (7, ["30", "400"]), err)
        self.assertIn("1 answered, 1 failed (1 context_too_long)", err)
        self.assertEqual(json.loads((self.dir / "s.json").read_text())["failed"], 1)

    def test_with_a_journal_a_second_run_asks_only_for_the_rest(self):
        script = """
import json, os, sys, urllib.request
for question in sys.argv[1:]:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                                     json.dumps(body).encode(), {"Content-Type": "application/json"})
    print(len(urllib.request.urlopen(request).read()))
"""
        command = (sys.executable, "-c", script, "a", "b")
        code, first, err = self.child(*command, options=["--journal", "j"])
        self.assertEqual(code, 0, err)
        asked = len(Upstream.asked)
        code, second, err = self.child(*command, "c", options=["--journal", "j"])
        self.assertEqual(code, 0, err)
        self.assertIn("3 answered (2 of them from the journal), 0 failed", err)
        self.assertEqual(len(second.split()), 3)
        questions = [it["body"]["messages"][-1]["content"] for it in Upstream.asked[asked:]]
        self.assertEqual([it for it in questions if it in "abc"], ["c"])

    def test_a_child_that_a_signal_ends(self):
        code, _, _ = self.child("sh", "-c", "kill -9 $$")
        self.assertEqual(code, 128 + 9)

    def test_signals_go_to_the_child_which_decides(self):
        script = """
import signal, sys, time
def stop(number, _):
    print("got", number, flush=True)
    sys.exit(5)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGHUP, stop)
signal.signal(signal.SIGQUIT, stop)
print("ready", flush=True)
time.sleep(600)
"""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            with self.subTest(signal=number):
                # In a session of its own: no terminal would pass the signal on.
                process = self.popen([*self.openai, "--", sys.executable, "-c", script],
                                     start_new_session=True)
                self.assertEqual(process.stdout.readline(), "ready\n")
                process.send_signal(number)
                out, err = process.communicate(timeout=LONG)
                self.assertEqual((process.returncode, out), (5, f"got {int(number)}\n"), err)

    def test_under_nohup_the_end_of_a_terminal_ends_nothing(self):
        script = "print('ready', flush=True); input(); print('done')"
        process = self.popen([*self.openai, "--", sys.executable, "-c", script], under=("nohup",),
                             stdin=subprocess.PIPE, start_new_session=True)
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate("\n", timeout=LONG)
        self.assertEqual((process.returncode, out), (0, "done\n"), err)

    STUBBORN = """
import signal, subprocess, sys, time
def say(number, _):
    print("got", int(number), flush=True)
if len(sys.argv) > 1:  # has another one that ignores everything
    ignoring = "import signal, time; [signal.signal(it, signal.SIG_IGN) for it in (2, 15)]; print('up', flush=True); "
    subprocess.Popen([sys.executable, "-c", ignoring + "time.sleep(100000)"])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, say)
print("ready", flush=True)
for text in sys.stdin:
    print("read", text, flush=True)
while True:
    time.sleep(1)
"""

    def test_a_child_that_goes_on_is_told_to_end_and_then_killed_with_its_own(self):
        process = self.popen([*self.openai, "--", sys.executable, "-c", self.STUBBORN, "x"],
                             stdin=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(process.kill)
        self.assertEqual({process.stdout.readline() for _ in range(2)}, {"ready\n", "up\n"})
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.readline(), "got 2\n")
        for _ in range(100):  # one that comes too late is a first again
            process.send_signal(signal.SIGINT)
            if (said := process.stdout.readline()) != "got 2\n":
                break
        self.assertEqual(said, "got 15\n")
        until(lambda: (process.send_signal(signal.SIGINT), process.poll() is not None)[1])
        _, err = process.communicate(timeout=LONG)  # so nobody has its stdout any more
        self.assertEqual(process.returncode, 128 + signal.SIGKILL, err)
        self.assertIn("the command gets SIGTERM; once more, and it is killed", err)

    def test_what_a_child_leaves_behind_ends_with_it(self):
        def gone(pid):
            state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
            return not state or state.startswith("Z")
        for script in ("sleep 100000 >/dev/null 2>&1 & echo $!",
                       "(trap '' TERM; exec sleep 100000) >/dev/null 2>&1 & echo $!"):
            with self.subTest(script):
                process = self.popen([*self.openai, "--", "sh", "-c", script + "; exit 4"],
                                     stdin=subprocess.DEVNULL, start_new_session=True)
                out, err = process.communicate(timeout=LONG)
                self.addCleanup(lambda: gone(out.strip()) or os.kill(int(out), signal.SIGKILL))
                self.assertEqual(process.returncode, 4, err)
                until(lambda: gone(out.strip()), 60)

    def test_in_a_terminal_a_child_reads_from_it_and_ctrl_c_reaches_it(self):
        master, slave = os.openpty()
        self.addCleanup(os.close, master)
        process = subprocess.Popen([EVALRT, "gateway", *self.openai, "--", sys.executable, "-c", self.STUBBORN],
                                   stdin=slave, stdout=slave, stderr=slave, cwd=self.dir, start_new_session=True,
                                   preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        seen = b""

        def shows(text):
            nonlocal seen
            while text not in seen:
                seen += os.read(master, 1000)
            seen = seen.split(text, 1)[1]

        def ctrl_c():
            os.write(master, b"\x03")
            return process.poll() is not None
        shows(b"ready")
        os.write(master, b"hello\n")
        shows(b"read hello")
        ctrl_c()
        shows(b"got 2")
        self.assertIsNone(process.poll())
        until(ctrl_c)
        self.assertEqual(process.wait(), 128 + signal.SIGKILL)

    @unittest.skipUnless(sys.platform == "linux", "only Linux tells a child of its parent's death")
    def test_a_killed_gateway_takes_its_child_with_it(self):
        process = self.popen([*self.openai, "--", sys.executable, "-c",
                              "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
        pid = int(process.stdout.readline())
        process.kill()
        process.communicate(timeout=LONG)

        def gone():
            try:
                return "Z" in Path(f"/proc/{pid}/stat").read_text().split(") ")[1][:1]
            except (FileNotFoundError, ProcessLookupError):
                return True
        until(gone)

    def test_a_server_of_our_own_is_started_and_not_left_behind(self):
        model = f"model-{os.getpid()}-{id(self)}"
        process = self.popen(["--backend", "mlx-server", "--executable", SUPPORT / "fake_openai.py",
                              "--model", model, "--", "sh", "-c", "echo $OPENAI_BASE_URL; exit 3"])
        out, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 3, err)
        self.assertIn("/v1", out)
        rows = subprocess.run(["ps", "-axo", "command="], capture_output=True, text=True).stdout
        self.assertNotIn(model, rows)

    def test_overload_and_a_server_that_dies_are_not_the_client_s_affair(self):
        self.start(*self.openai)
        self.assertEqual(self.ask("/v1/chat/completions", self.chat("busy"))[0], 200)
        self.assertEqual(sum(it["body"]["messages"][0]["content"] == "busy" for it in Upstream.asked
                             if "messages" in it["body"]), 3)
        script = """
import json, os, urllib.request
body = {"messages": [{"role": "user", "content": "die once"}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                                 json.dumps(body).encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).status)
"""
        process = self.popen(["--backend", "mlx-server", "--executable", SUPPORT / "fake_openai.py", "--model", "m",
                              "--json", "s", "--", sys.executable, "-c", script],
                             env={"FAKE_OPENAI_LOG": str(self.dir / "log")})
        out, err = process.communicate(timeout=LONG)
        self.assertEqual((process.returncode, out), (0, "200\n"), err)
        summary = json.loads((self.dir / "s").read_text())
        self.assertEqual((summary["answered"], summary["failed"], summary["server_restarts"]), (1, 0, 1))

    def test_a_server_that_is_not_there_is_said_and_the_child_not_run(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            self.openai[-1] = f"http://127.0.0.1:{port}/v1"
            code, out, err = self.child("echo", "ran")
        self.assertEqual((code, out), (3, ""), err)
        self.assertIn("cannot connect", err)


if __name__ == "__main__":
    unittest.main(verbosity=1)
