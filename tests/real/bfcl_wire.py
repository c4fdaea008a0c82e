#!/usr/bin/env python3
"""Compares what evalrt makes of BFCL with what the real bfcl_eval sends and writes, byte for byte.

Runs bfcl_eval's OpenAICompletionsHandler, through the real openai package, over every row of every
single-turn category in both modes against a server on loopback that keeps the bodies; the same over
made-up rows with what the real ones lack; and answers of all kinds through to the result file.
Exits 0 only if nothing differs.

    bfcl_wire.py --bodies PROGRAM [--data DIR]
"""

# Python 3.10 or later. bfcl_eval itself is installed with --no-deps: the rest of what it asks for
# (torch by way of others) belongs to other models' handlers. It leaves openai open (>=1.86.0);
# versions 1 and 2 send the same bytes, 3 puts "model" before "messages".
PACKAGES = ["openai==1.109.1", "tenacity>=8.5.0", "overrides", "filelock==3.20.0"]
PACKAGES_NO_DEPS = ["bfcl_eval==2026.3.23"]

import sys

if sys.argv[1:] == ["--packages"]:
    print("\n".join(PACKAGES + [f"--no-deps {package}" for package in PACKAGES_NO_DEPS]))
    sys.exit()

import argparse
import json
import os
import random
import re
import socketserver
import subprocess
import tempfile
import threading
import types
from pathlib import Path

CATEGORIES = """simple_python simple_java simple_javascript multiple parallel parallel_multiple
    irrelevance live_simple live_multiple live_parallel live_parallel_multiple live_irrelevance
    live_relevance""".split()
MODEL = 'org/"mödel"-7.5b'

# bfcl_eval makes folders where it is told to when it is imported.
scratch = tempfile.TemporaryDirectory()
os.environ["BFCL_PROJECT_ROOT"] = scratch.name
os.environ["OPENAI_API_KEY"] = "none"
for name in ("http_proxy", "https_proxy", "all_proxy", "OPENAI_DEFAULT_HEADERS"):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)


def stub(name, **members):
    """The parsers of Java and JavaScript answers are imported along, and not used here."""
    try:
        __import__(name)
    except ImportError:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(members)


class Anything:
    def __init__(self, *args): pass
    def set_language(self, language): pass


stub("tree_sitter", Language=Anything, Parser=Anything)
stub("tree_sitter_java", language=lambda: 0)
stub("tree_sitter_javascript", language=lambda: 0)

try:
    import bfcl_eval.utils as utils
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
except ImportError as error:
    sys.exit(f"{error}; pip install {' '.join(PACKAGES)} and, with --no-deps, {PACKAGES_NO_DEPS[0]}")

passed = failed = 0


def check(what, expected, got):
    global passed, failed
    if expected == got:
        passed += 1
        return
    failed += 1
    if failed <= 10:
        at = next((i for i, (a, b) in enumerate(zip(expected, got)) if a != b),
                  min(len(expected), len(got)))
        print(f"FAILED {what}: differs at byte {at}\n  bfcl_eval: ...{expected[max(0, at - 60):at + 60]!r}"
              f"\n  evalrt:    ...{got[max(0, at - 60):at + 60]!r}")


def completion(message):
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 17, "completion_tokens": 4, "total_tokens": 21}}


class Capture(socketserver.StreamRequestHandler):
    """Keeps each body and answers with server.answer."""

    disable_nagle_algorithm = True

    def handle(self):
        while True:
            length, line = 0, self.rfile.readline()
            while line not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
                line = self.rfile.readline()
            if not line:
                return
            self.server.bodies.append(self.rfile.read(length))
            answer = json.dumps(self.server.answer).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                             b"Content-Length: %d\r\n\r\n%s" % (len(answer), answer))


class WithReasoning(OpenAICompletionsHandler):
    """As bfcl_eval's handlers of models that show their reasoning."""

    def _parse_query_response_FC(self, response):
        data = super()._parse_query_response_FC(response)
        self._add_reasoning_content_if_available_FC(response, data)
        return data

    def _parse_query_response_prompting(self, response):
        data = super()._parse_query_response_prompting(response)
        self._add_reasoning_content_if_available_prompting(response, data)
        return data


def compare_bodies(server, handlers, program, data, category, note=""):
    utils.PROMPT_PATH = Path(data)
    for mode, handler in handlers.items():
        run = subprocess.run([program, str(data), category, mode, MODEL], stdout=subprocess.PIPE)
        ours = run.stdout.split(b"\n")[:-1]
        entries = utils.load_dataset_entry(category)
        server.bodies.clear()
        for entry in entries:
            handler.inference(entry, False, False)
        before = failed
        check(f"{category} {mode}: number of rows", [len(server.bodies), 0],
              [len(ours), run.returncode])
        for entry, expected, got in zip(entries, server.bodies, ours):
            check(f"{entry['id']} {mode}", expected, got)
        print(f"{note}{category} {mode}: {len(entries)} rows, {failed - before} differ", flush=True)


# What the real rows have little or nothing of: odd numbers, every type at every depth, escapes.
NUMBERS = """0 -0 7 -12 1.0 -0.0 1.50 0.1 1e5 1E5 1e+05 1e-7 12345.678e-3 1e15 1e16 1e17 123456789012345678
    0.0001 0.00001 1.7976931348623157e308 5e-324 2.2250738585072014e-308 9007199254740993
    18446744073709551616 -9223372036854775809 123456789012345678901234567890 3.141592653589793238
    0.30000000000000004 100000000000000000000.0 1e-400""".split()
TEXTS = ["", "plain", 'quote " and \\ back', "\b\f\n\r\t\x00\x1f\x7f", "é ü ß", "日本語", "🍖👍",
         "\u2028\u2029\ufeff\uffff", "</script> & / {braces} %s", "a.b.c", "\U0010ffff\U00010000"]
TYPES = """integer number float string boolean bool array list dict object tuple any byte short long
    double char ArrayList Array HashMap Hashtable Queue Stack Any String Bigint""".split()


def made_up(rng, category):
    def value(depth=0):
        kind = rng.randrange(8 if depth < 3 else 5)
        if kind == 0: return rng.choice([True, False, None])
        if kind <= 2: return f"@number {rng.choice(NUMBERS)}@"
        if kind <= 4: return rng.choice(TEXTS)
        if kind <= 6: return [value(depth + 1) for _ in range(rng.randrange(3))]
        return {rng.choice(TEXTS) + str(i): value(depth + 1) for i in range(rng.randrange(3))}

    def items(depth):
        made = {"type": rng.choice(TYPES)}
        if rng.random() < 0.5: made["description"] = rng.choice(TEXTS)
        if rng.random() < 0.5 and depth < 3: made["items"] = items(depth + 1)
        if rng.random() < 0.5 and depth < 3: made["properties"] = properties(depth + 1)
        return made

    def parameter(depth):
        made = {"type": rng.choice(TYPES + ["unheard of"]), "description": rng.choice(TEXTS)}
        if depth and rng.random() < 0.1: del made["type"]
        if rng.random() < 0.4: made["default"] = value()
        if rng.random() < 0.2: made["enum"] = [value(), value()]
        if rng.random() < 0.1: made["format"] = "old"
        if rng.random() < 0.5 or made.get("type") in ("array", "Array", "ArrayList"):
            made["items"] = items(depth)
        if rng.random() < 0.3 and depth < 3: made["properties"] = properties(depth + 1)
        pairs = list(made.items())
        rng.shuffle(pairs)
        return dict(pairs)

    def properties(depth):
        return {rng.choice(["a", "b.c", "dé", "type", "items"]) + str(i): parameter(depth)
                for i in range(rng.randrange(4))}

    def function():
        made = {"name": rng.choice(["f", "a.b", "a.b.c_d"]), "description": rng.choice(TEXTS),
                "parameters": {"type": "dict", "properties": properties(0),
                               "required": ["x"], "optional": value()}}
        if rng.random() < 0.2: made["response"] = value()
        if rng.random() < 0.2: del made["parameters"]["type"]
        return made

    lines = []
    for index in range(200):
        messages = [{"role": "user", "content": rng.choice(TEXTS)}]
        if rng.random() < 0.3: messages.insert(0, {"role": "system", "content": rng.choice(TEXTS)})
        if rng.random() < 0.2: messages.append({"content": rng.choice(TEXTS), "role": "assistant"})
        row = {"id": f"{category}_{index}-0-0", "question": [messages],
               "function": [function() for _ in range(rng.randrange(4))]}
        line = json.dumps(row, ensure_ascii=rng.random() < 0.5)
        if rng.random() < 0.1:  # a repeated key: first place, last value
            line = line.replace('"description": ', '"description": "first", "description": ', 1)
        lines.append(re.sub(r'"@number (.*?)@"', r"\1", line))
    return "\n".join(lines)


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWERS = [
    {"role": "assistant", "content": "[f(a=1)]"},
    {"role": "assistant", "content": 'é 日本 🍖 " \\ \n\t\x7f\x01'},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1}')]},
    {"role": "assistant", "content": "x", "tool_calls": [call("a_b", '{"é": "🍖"}'), call("a_b", "")]},
    {"role": "assistant", "content": "lost", "tool_calls": []},
    {"role": "assistant", "content": "kept", "tool_calls": None},
    {"role": "assistant", "content": "c", "reasoning_content": "hmm é"},
    {"role": "assistant", "content": "c", "reasoning_content": ""},
    {"role": "assistant", "content": None, "tool_calls": [call("f", "{}")], "reasoning_content": "h"},
]


def compare_results(server, program):
    """Each answer to the row in the result file, and a whole file to its order."""
    for mode in ("prompt", "fc"):
        handler = WithReasoning(MODEL, 0.001, MODEL, mode == "fc")
        for index, message in enumerate(ANSWERS):
            server.answer = completion(message)
            entry = {"id": f"live_simple_{index}-0-0", "function": [],
                     "question": [[{"role": "user", "content": "q"}]]}
            result, metadata = handler.inference(entry, False, False)
            folder = Path(tempfile.mkdtemp(dir=scratch.name))
            handler.write({"id": entry["id"], "result": result, **metadata}, folder)
            expected, = folder.rglob("*.json")
            name = MODEL.replace("/", "_")
            check("result path", f"{name}/live/BFCL_v4_live_simple_result.json",
                  str(expected.relative_to(folder)))
            run = subprocess.run([program, "row", entry["id"], mode, repr(metadata["latency"])],
                                 input=json.dumps(server.answer).encode(), stdout=subprocess.PIPE)
            check(f"result row {index} {mode}", expected.read_bytes(), run.stdout)

    rng = random.Random(1)
    for ids in ([f"simple_java_{i}" for i in range(120)],
                [f"live_multiple_{i}-{i // 3}-{i % 3}" for i in range(120)]):
        rng.shuffle(ids)
        rows = [json.dumps({"id": id, "result": "é"}) for id in ids]
        ours = Path(scratch.name) / "made" / "here" / "rows.json"
        subprocess.run([program, "write", str(ours)], input="\n".join(rows).encode(), check=True)
        expected = sorted(rows, key=lambda row: utils.sort_key(json.loads(row)))
        check("order of a result file", expected, ours.read_text().splitlines())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=utils.PROMPT_PATH, help="default: the package's own")
    parser.add_argument("--bodies", required=True, help="the program bfcl_bodies")
    args = parser.parse_args()
    program = os.path.abspath(args.bodies)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Capture) as server:
        server.daemon_threads = True
        server.bodies, server.answer = [], completion({"role": "assistant", "content": "hi"})
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["OPENAI_BASE_URL"] = "http://127.0.0.1:%d/v1" % server.server_address[1]
        handlers = {mode: OpenAICompletionsHandler(MODEL, 0.001, MODEL, mode == "fc")
                    for mode in ("prompt", "fc")}
        for category in CATEGORIES:
            compare_bodies(server, handlers, program, args.data, category)
        rng = random.Random(0)
        for category in ("live_multiple", "simple_java", "simple_javascript"):
            path = Path(scratch.name) / f"BFCL_v4_{category}.json"
            path.write_text(made_up(rng, category), encoding="utf-8")
            compare_bodies(server, handlers, program, scratch.name, category, "made up: ")
        compare_results(server, program)
        server.shutdown()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
