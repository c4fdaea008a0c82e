#!/usr/bin/env python3
"""An Anthropic server for tests: /v1/messages, streamed and not, in the shape of the real API.

What it answers depends on the last word of the question: one of ANSWERS, "status-N-TYPE" for an
HTTP error, "late-TYPE" for one inside a stream, "cut" for a stream that ends too early. Prints its
port. Standard library only. Prints what it is asked to the file named in FAKE_ANTHROPIC_LOG, a JSON
object a line.
"""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TEXT = "Grüße \u2028 \"quoted\" \\ 😀\n\ttab"
ANSWERS = {  # content, stop_reason, stop_sequence, more members of usage
    "text": ([{"type": "text", "text": TEXT}], "end_turn", None, {}),
    "cached": ([{"type": "text", "text": "a"}], "end_turn", None,
               {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 1800,
                "cache_creation": {"ephemeral_5m_input_tokens": 0,
                                   "ephemeral_1h_input_tokens": 0},
                "service_tier": "standard"}),
    "written": ([{"type": "text", "text": "a"}], "end_turn", None,
                {"cache_creation_input_tokens": 1700, "cache_read_input_tokens": 0}),
    "empty": ([], "end_turn", None, {}),
    "stopped": ([{"type": "text", "text": "one"}], "stop_sequence", "\n\n", {}),
    "long": ([{"type": "text", "text": "word " * 400}], "max_tokens", None, {}),
    "refusal": ([{"type": "text", "text": ""}], "refusal", None, {}),
    "tools": ([{"type": "text", "text": "I look."},
               {"type": "tool_use", "id": "toolu_01", "name": "get_weather",
                "input": {"city": "Zürich", "days": [1, 2.5, -3e-7], "deep": {"a": [None, True]}}},
               {"type": "tool_use", "id": "toolu_02", "name": "now", "input": {}}],
              "tool_use", None, {}),
    "thinking": ([{"type": "thinking", "thinking": "Let me see…", "signature": "c2lnbmF0dXJl"},
                  {"type": "redacted_thinking", "data": "ZGF0YQ=="},
                  {"type": "text", "text": "Done."}], "end_turn", None, {}),
    "citations": ([{"type": "text", "text": "The grass is green.", "citations": [
        {"type": "char_location", "cited_text": "grass", "document_index": 0,
         "document_title": "T", "start_char_index": 0, "end_char_index": 5, "file_id": None},
        {"type": "char_location", "cited_text": "green", "document_index": 0,
         "document_title": "T", "start_char_index": 9, "end_char_index": 14, "file_id": None}]}],
        "end_turn", None, {}),
}


def pieces(text, size):
    return [text[i:i + size] for i in range(0, len(text), size)]


def deltas(block):
    """How a block is begun, and what then comes of it."""
    if block["type"] == "text":
        yield from ({"type": "citations_delta", "citation": it} for it in block.get("citations", []))
        yield from ({"type": "text_delta", "text": it} for it in pieces(block["text"], 3))
    elif block["type"] == "thinking":
        yield from ({"type": "thinking_delta", "thinking": it} for it in pieces(block["thinking"], 4))
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "tool_use":
        yield {"type": "input_json_delta", "partial_json": ""}
        if block["input"]:
            yield from ({"type": "input_json_delta", "partial_json": it}
                        for it in pieces(json.dumps(block["input"], ensure_ascii=False), 5))


def begun(block):
    empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""},
             "tool_use": {"input": {}}}.get(block["type"], {})
    return {**{k: v for k, v in block.items() if k != "citations"}, **empty,
            **({"citations": []} if "citations" in block else {})}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("request-id", "req_fake")
        self.end_headers()
        self.wfile.write(data)

    def error(self, kind):
        return {"type": "error", "error": {"type": kind, "message": f"words of {kind}"},
                "request_id": "req_fake"}

    def do_GET(self):
        if self.path != "/v1/models":
            return self.answer(404, self.error("not_found_error"))
        self.answer(200, {"data": [{"type": "model", "id": "claude-fake", "display_name": "Fake",
                                    "created_at": "2026-01-01T00:00:00Z"}],
                          "has_more": False, "first_id": "claude-fake", "last_id": "claude-fake"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if path := os.environ.get("FAKE_ANTHROPIC_LOG"):
            with lock, open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"path": self.path, "body": body,
                                       "headers": {k.lower(): v for k, v in self.headers.items()}})
                           + "\n")
        key = os.environ.get("FAKE_ANTHROPIC_KEY")
        if key and self.headers["x-api-key"] != key:
            return self.answer(401, self.error("authentication_error"))
        if self.path != "/v1/messages" or self.headers["anthropic-version"] != "2023-06-01":
            return self.answer(404, self.error("not_found_error"))
        for field in ("model", "max_tokens", "messages"):
            if field not in body:
                return self.answer(400, self.error("invalid_request_error"))
        content = body["messages"][-1]["content"]
        if not isinstance(content, str):
            content = content[-1].get("text", "text")
        word = content.split()[-1]
        if word.startswith("status-"):
            _, status, kind = word.split("-")
            return self.answer(int(status), self.error(kind))
        content, reason, sequence, more = ANSWERS.get(word, ANSWERS["text"])
        usage = {"input_tokens": 25, **more}
        head = {"id": f"msg_{word}", "type": "message", "role": "assistant", "model": body["model"]}
        if not body.get("stream"):
            return self.answer(200, {**head, "content": content, "stop_reason": reason,
                                     "stop_sequence": sequence,
                                     "usage": {**usage, "output_tokens": 17}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.event("message_start", message={**head, "content": [], "stop_reason": None,
                                             "stop_sequence": None,
                                             "usage": {**usage, "output_tokens": 1}})
        self.event("ping")
        for index, block in enumerate(content):
            self.event("content_block_start", index=index, content_block=begun(block))
            for delta in deltas(block):
                self.event("content_block_delta", index=index, delta=delta)
                if word.startswith("late-"):
                    return self.event("error", **{k: v for k, v in self.error(word[5:]).items()
                                                  if k != "type"})
                if word == "cut":
                    return None
            self.event("content_block_stop", index=index)
        self.event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence},
                   usage={"output_tokens": 17})
        self.event("message_stop")

    def event(self, kind, **members):
        data = json.dumps({"type": kind, **members}, ensure_ascii=False)
        self.wfile.write(f"event: {kind}\ndata: {data}\n\n".encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    lock = threading.Lock()
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
