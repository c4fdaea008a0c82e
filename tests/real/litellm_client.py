#!/usr/bin/env python3
"""litellm through `evalrt gateway`: whole answers, streams, tool calls, many at once.

    litellm_client.py --evalrt PROGRAM --server PROGRAM --model FOLDER

FOLDER-tools is the same model with a chat template that makes it call tools.
"""

PACKAGES = ["litellm==1.110.2"]

import json
import os
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

QUESTIONS = [f"What is {n} plus {n}?" for n in range(12)]
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]


def child(at_once):
    import litellm

    def ask(question, **more):
        return litellm.completion(model="openai/default_model", temperature=0, timeout=300,
                                  messages=[{"role": "user", "content": question}],
                                  **{"max_tokens": 16} | more)

    with ThreadPoolExecutor(at_once) as pool:
        answers = [it.choices[0].message.content for it in pool.map(ask, QUESTIONS)]
    stream = list(ask("Name a colour.", stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(stream)
    call = ask("What is the weather in Paris?", tools=TOOLS, max_tokens=60).choices[0]
    try:
        ask("x", logprobs=5)
        error = None
    except Exception as refused:  # directly: the server closes the connection
        error = f"{type(refused).__name__}: {refused}"
    Path("results.json").write_text(json.dumps({
        "answers": answers, "streamed": streamed.choices[0].message.content,
        "pieces": len(stream), "stream_tokens": streamed.usage.completion_tokens,
        "finish": call.finish_reason, "error": error,
        "calls": [[it.function.name, json.loads(it.function.arguments)]
                  for it in call.message.tool_calls or []]}))


if sys.argv[1:2] == ["--child"]:
    sys.exit(child(int(sys.argv[2])))

import harness

args, rest = harness.read_arguments(PACKAGES)


class Litellm(unittest.TestCase):
    def test_what_it_gets_is_what_the_server_gives(self):
        folder = harness.scratch(self)
        command = [sys.executable, os.path.abspath(__file__), "--child"]
        model = args.model + "-tools"
        direct = harness.directly(args, [*command, "1"], folder / "direct", model)
        gateway = harness.through_gateway(args, [*command, "12"], folder / "gateway", model)
        before, after = {}, {}
        for done, results in ((direct, before), (gateway, after)):
            self.assertEqual(done.code, 0, done.err)
            results.update(json.loads((done.folder / "results.json").read_text()))
        same = harness.compare("litellm", before["answers"], after["answers"], direct, gateway)
        self.assertGreaterEqual(same, 6)  # not promised; mixed up none would be
        self.assertEqual(after["streamed"], before["streamed"])
        self.assertEqual(after["stream_tokens"], before["stream_tokens"])
        self.assertGreater(after["pieces"], 3)
        self.assertEqual(after["finish"], "tool_calls")
        self.assertEqual(after["calls"], before["calls"])
        self.assertEqual(after["calls"], [["get_weather", {"city": "Paris"}]])
        self.assertRegex(after["error"], "^BadRequestError: .*logprobs")
        self.assertEqual(gateway.summary["answered"], len(QUESTIONS) + 2)


if __name__ == "__main__":
    unittest.main(argv=rest)
