#!/usr/bin/env python3
"""The official openai and anthropic packages through `evalrt gateway`, in front of the real
mlx_lm.server with a real small model that calls tools: what they get is what the openai package
gets from the server directly.

    gateway_clients.py --evalrt PROGRAM --server PROGRAM --model FOLDER

FOLDER-tools is the same model with a chat template that makes it call tools.
"""

PACKAGES = ["openai==3.57.0", "anthropic==2.14.0"]

import sys

if sys.argv[1:] == ["--packages"]:
    print("\n".join(PACKAGES))
    sys.exit()

import argparse
import json
import os
import signal
import subprocess
import unittest
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from patience import LONG, answers, free_port, until  # noqa: E402

parser = argparse.ArgumentParser()
for name in ("--evalrt", "--server", "--model"):
    parser.add_argument(name, required=True)
args, rest = parser.parse_known_args()

QUESTION = "What is the weather in Paris?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}}]
TOOLS = [{"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}]


def ask(question, **more):
    return {"model": "default_model", "messages": [{"role": "user", "content": question}],
            "temperature": 0, "max_tokens": 24, **more}


class Clients(unittest.TestCase):
    maxDiff = 4000

    @classmethod
    def setUpClass(cls):
        port = free_port()
        cls.server = subprocess.Popen(
            [args.server, "--model", args.model + "-tools", "--port", str(port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        cls.addClassCleanup(cls.server.wait)
        cls.addClassCleanup(os.killpg, cls.server.pid, signal.SIGKILL)
        cls.url = f"http://127.0.0.1:{port}/v1"
        until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        cls.backend = ["--backend", "mlx-server", "--url", cls.url]
        gateway = subprocess.Popen([args.evalrt, "gateway", "--quiet", *cls.backend],
                                   stdout=subprocess.PIPE, text=True)
        cls.addClassCleanup(gateway.stdout.close)
        cls.addClassCleanup(gateway.wait)
        cls.addClassCleanup(gateway.terminate)
        address = json.loads(gateway.stdout.readline())
        cls.base = address["anthropic_url"]
        # With the retries that they make by themselves.
        cls.direct = openai.OpenAI(base_url=cls.url, api_key="none")
        cls.chat = openai.OpenAI(base_url=address["url"], api_key="none")
        cls.messages = anthropic.Anthropic(base_url=cls.base, api_key="none")

    def metric(self, name):
        text = urllib.request.urlopen(self.base + "/metrics", timeout=LONG).read().decode()
        row, = (row for row in text.splitlines() if row.startswith(f"evalrt_{name} "))
        return int(row.split()[1])

    def direct_text(self, question):
        return self.direct.chat.completions.create(**ask(question)).choices[0].message.content

    # OpenAI

    def test_a_chat_is_what_the_server_gives_streamed_and_not(self):
        question = "What is the capital of France?"
        truth = self.direct.chat.completions.create(**ask(question))
        whole = self.chat.chat.completions.create(**ask(question))
        self.assertEqual(whole.choices[0].message.content, truth.choices[0].message.content)
        self.assertEqual(whole.choices[0].finish_reason, truth.choices[0].finish_reason)
        self.assertIsNone(whole.choices[0].message.tool_calls)
        self.assertEqual((whole.usage.prompt_tokens, whole.usage.completion_tokens),
                         (truth.usage.prompt_tokens, truth.usage.completion_tokens))
        text, reasons, usage, pieces = "", [], None, 0
        for chunk in self.chat.chat.completions.create(
                **ask(question), stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces += bool(choice.delta.content)
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
        self.assertEqual(text, truth.choices[0].message.content)
        self.assertEqual(reasons, [truth.choices[0].finish_reason])
        self.assertEqual(usage.completion_tokens, truth.usage.completion_tokens)
        self.assertGreater(pieces, 3, "it did not come piece by piece")

    def test_the_package_s_own_accumulator_puts_the_stream_together(self):
        question = "Name a colour."
        with self.chat.chat.completions.stream(**ask(question)) as stream:
            for _ in stream:
                pass
            try:
                final = stream.get_final_completion()
            except openai.LengthFinishReasonError as error:
                final = error.completion
        self.assertEqual(final.choices[0].message.content, self.direct_text(question))

    def test_a_completion_streamed_and_not(self):
        body = {"model": "default_model", "prompt": "The sky is", "max_tokens": 8, "temperature": 0}
        truth = self.direct.completions.create(**body).choices[0]
        self.assertEqual(self.chat.completions.create(**body).choices[0].text, truth.text)
        chunks = list(self.chat.completions.create(**body, stream=True))
        self.assertEqual("".join(chunk.choices[0].text for chunk in chunks), truth.text)
        self.assertEqual(chunks[-1].choices[0].finish_reason, truth.finish_reason)

    def test_tool_calls_streamed_and_not_and_their_results(self):
        body = ask(QUESTION, tools=CHAT_TOOLS, max_tokens=60)
        truth = self.direct.chat.completions.create(**body).choices[0]
        expected, = truth.message.tool_calls
        whole = self.chat.chat.completions.create(**body).choices[0]
        with self.chat.chat.completions.stream(**body) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            self.assertEqual(choice.finish_reason, "tool_calls")
            call, = choice.message.tool_calls
            self.assertTrue(call.id)
            self.assertEqual(call.type, "function")
            self.assertEqual(call.function.name, expected.function.name)
            self.assertEqual(json.loads(call.function.arguments),
                             json.loads(expected.function.arguments))
        self.assertEqual(json.loads(expected.function.arguments), {"city": "Paris"})
        history = [*body["messages"], whole.message.model_dump(exclude_none=True),
                   {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id,
                    "content": "18 degrees"}]
        again = {**body, "messages": history, "max_tokens": 16}
        self.assertEqual(self.chat.chat.completions.create(**again).choices[0].message.content,
                         self.direct.chat.completions.create(**again).choices[0].message.content)

    # Anthropic

    def test_a_message_is_what_the_server_gives_streamed_and_not(self):
        question = "What is the capital of France?"
        truth = self.direct.chat.completions.create(**ask(question))
        body = {"model": "default_model", "max_tokens": 24,
                "messages": [{"role": "user", "content": question}],
                "extra_body": {"temperature": 0}}  # which this version does not declare
        whole = self.messages.messages.create(**body)
        with self.messages.messages.stream(**body) as stream:
            heard = list(stream.text_stream)
            streamed = stream.get_final_message()
        reason = {"stop": "end_turn", "length": "max_tokens"}[truth.choices[0].finish_reason]
        for message in (whole, streamed):
            block, = message.content
            self.assertEqual(block.text, truth.choices[0].message.content)
            self.assertEqual(message.stop_reason, reason)
            self.assertEqual(message.usage.output_tokens, truth.usage.completion_tokens)
            self.assertEqual(message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
                             truth.usage.prompt_tokens)
        self.assertEqual("".join(heard), truth.choices[0].message.content)
        self.assertGreater(len(heard), 3, "it did not come piece by piece")

    def test_tool_use_streamed_and_not_and_its_results(self):
        body = {"model": "default_model", "max_tokens": 60, "tools": TOOLS,
                "messages": [{"role": "user", "content": QUESTION}],
                "extra_body": {"temperature": 0}}
        whole = self.messages.messages.create(**body)
        with self.messages.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            self.assertEqual(message.stop_reason, "tool_use")
            use = message.content[-1]
            self.assertEqual((use.type, use.name, use.input),
                             ("tool_use", "get_weather", {"city": "Paris"}))
            self.assertTrue(use.id)
        body["messages"] += [
            {"role": "assistant", "content": [it.model_dump(exclude_none=True) for it in whole.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole.content[-1].id,
                                          "content": "18 degrees"}]}]
        after = self.messages.messages.create(**{**body, "max_tokens": 16})
        self.assertGreater(after.usage.output_tokens, 0)

    # Both

    def test_errors_are_the_packages_own_and_not_tried_again(self):
        before = self.metric("requests_total")
        with self.assertRaises(openai.APIStatusError) as caught:
            self.chat.chat.completions.create(**ask("x", extra_body={"temperature": "hot"}))
        self.assertGreaterEqual(caught.exception.status_code, 400)
        with self.assertRaises(anthropic.APIStatusError):
            self.messages.messages.create(model="m", max_tokens=4, extra_body={"temperature": "hot"},
                                          messages=[{"role": "user", "content": "x"}])
        self.assertEqual(self.metric("requests_total"), before + 2)
        # A stream that cannot begin is an error as well.
        with self.assertRaises(openai.APIStatusError):
            self.chat.chat.completions.create(**ask("x", extra_body={"temperature": "hot"}), stream=True)
        with self.assertRaises(openai.NotFoundError):
            self.chat.embeddings.create(model="m", input="x")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat.chat.completions.create(**ask("x", extra_body={"logprobs": 5}))
        self.assertIn("logprobs", str(caught.exception))
        self.assertTrue(list(self.chat.models.list()))
        self.assertTrue(list(self.messages.models.list()))

    def test_many_at_once_get_their_own_answers(self):
        questions = [f"What is {n} plus {n}?" for n in range(12)]
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda q: self.chat.chat.completions.create(
                **ask(q, max_tokens=12)).choices[0].message.content, questions))
        alone = [self.direct.chat.completions.create(**ask(q, max_tokens=12))
                 .choices[0].message.content for q in questions]
        same = sum(a == b for a, b in zip(answers, alone))
        print(f"the same answer as one at a time: {same} of 12", file=sys.stderr)
        self.assertGreaterEqual(same, 6)  # not promised, but mixed up none would be

    def test_a_stream_that_is_closed_ends_at_the_server(self):
        stream = self.chat.chat.completions.create(
            **ask("Tell a long story.", max_tokens=2000), stream=True)
        next(iter(stream))
        stream.close()
        until(lambda: self.metric("in_flight") == 0)

    def test_a_child_needs_nothing_but_its_environment(self):
        script = """
import anthropic, openai
chat = openai.OpenAI().chat.completions.create(
    model="x", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
message = anthropic.Anthropic().messages.create(
    model="x", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
print(chat.usage.completion_tokens, message.usage.output_tokens)
"""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "ANTHROPIC_"))}
        done = subprocess.run([args.evalrt, "gateway", *self.backend, "--", sys.executable, "-c", script],
                              env=env, capture_output=True, text=True, timeout=LONG)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"^\d \d\n$")
        self.assertIn("2 answered, 0 failed", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *rest])
