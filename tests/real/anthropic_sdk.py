#!/usr/bin/env python3
"""Holds evalrt against the official anthropic package, with a server on loopback between them.

What the package makes of each answer, streamed (by its own accumulator) and in one piece, is what
evalrt writes into its output; the bodies that evalrt sends are of the types that the package
declares; what it translates from other wires is a Message to the package; and where the package
raises an error, evalrt reports the failure of that class. Exits 0 only if nothing differs.

    anthropic_sdk.py --evalrt PROGRAM
"""

# The last one that declares temperature and sends anthropic-version 2023-06-01 with x-api-key, as
# evalrt does. 2.x sends another version and the key as a bearer token.
PACKAGES = ["anthropic==0.125.0"]

import sys

if sys.argv[1:] == ["--packages"]:
    print("\n".join(PACKAGES))
    sys.exit()

import argparse
import functools
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import anthropic
import pydantic
import typing_extensions
from anthropic.types import Message
from anthropic.types.message_create_params import (MessageCreateParamsNonStreaming,
                                                   MessageCreateParamsStreaming)

SUPPORT = Path(__file__).resolve().parent.parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_anthropic import ANSWERS

KEY = "sk-ant-test-0123456789"
ERRORS = {  # status, type: what the package raises, what evalrt reports
    (400, "invalid_request_error"): (anthropic.BadRequestError, "rejected"),
    (401, "authentication_error"): (anthropic.AuthenticationError, "auth"),
    (403, "permission_error"): (anthropic.PermissionDeniedError, "auth"),
    (404, "not_found_error"): (anthropic.NotFoundError, "rejected"),
    (413, "request_too_large"): (anthropic.APIStatusError, "rejected"),
    (422, "invalid_request_error"): (anthropic.UnprocessableEntityError, "rejected"),
    (429, "rate_limit_error"): (anthropic.RateLimitError, "rate_limited"),
    (500, "api_error"): (anthropic.InternalServerError, "rejected"),
    (529, "overloaded_error"): (anthropic.APIStatusError, "overloaded"),
}
TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CALL = {"id": "toolu_1", "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Zürich\"}"}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
CHATS = {
    "plain": {"messages": [{"role": "user", "content": "text"}], "max_tokens": 5},
    "settings": {"messages": [{"role": "developer", "content": "S"},
                              {"role": "user", "content": "text"}], "temperature": 0.5,
                 "top_p": 0.9, "stop": ["a", "\n"], "user": "u", "max_completion_tokens": 6,
                 "seed": 3, "store": False, "n": 1},
    "tools": {"messages": [{"role": "user", "content": "what is it like"},
                           {"role": "assistant", "content": None,
                            "tool_calls": [CALL, dict(CALL, id="toolu_2")]},
                           {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
                           {"role": "tool", "tool_call_id": "toolu_2",
                            "content": [{"type": "text", "text": "rain"}]},
                           {"role": "user", "content": "text"}],
              "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "image": {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": PIXEL}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "text", "text": "text"}]}]},
    "whole": {"messages": [{"role": "user", "content": "text"}], "stream": False},
    "shared 1": {"messages": [{"role": "system", "content": "rule " * 1500},
                              {"role": "user", "content": "first text"}]},
    "shared 2": {"messages": [{"role": "system", "content": "rule " * 1500},
                              {"role": "user", "content": "second text"}]},
}


def close_types():
    """What the declared types do not name is an error from here on."""
    for module in list(sys.modules.values()):
        if (getattr(module, "__name__", "") or "").startswith("anthropic.types."):
            for kind in vars(module).values():
                if typing_extensions.is_typeddict(kind):
                    kind.__pydantic_config__ = pydantic.ConfigDict(
                        extra="forbid", arbitrary_types_allowed=True)


def consumed(value):
    """Iterables are checked as they are gone through."""
    if isinstance(value, dict):
        return {key: consumed(it) for key, it in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [consumed(it) for it in value]


@functools.cache
def adapter(kind):
    return pydantic.TypeAdapter(kind)


def check_request(body):
    kind = MessageCreateParamsStreaming if body.get("stream") else MessageCreateParamsNonStreaming
    return consumed(adapter(kind).validate_python(body))


class Sdk(unittest.TestCase):
    maxDiff = 4000

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        self.log = self.dir / "asked"
        self.log.touch()
        server = subprocess.Popen([sys.executable, SUPPORT / "fake_anthropic.py"],
                                  env=dict(os.environ, FAKE_ANTHROPIC_LOG=str(self.log)),
                                  stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.stdout.close)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        self.base = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        self.client = anthropic.Anthropic(base_url=self.base, api_key=KEY, max_retries=0)

    def evalrt(self, lines, *args):
        env = dict(os.environ, ANTHROPIC_API_KEY=KEY)
        text = "\n".join(json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
                         for name, url, body in lines)
        done = subprocess.run([options.evalrt, "run", "-", "--quiet", *map(str, args)], input=text,
                              env=env, cwd=self.dir, capture_output=True, text=True, timeout=600)
        self.assertIn(done.returncode, (0, 1), done.stderr)
        rows = [json.loads(row) for row in done.stdout.split("\n") if row]
        return {row["custom_id"]: row for row in rows}

    def ask_evalrt(self, lines, *args):
        return self.evalrt(lines, "--backend", "anthropic-url", "--url", self.base + "/v1", *args)

    def asked(self):
        return [json.loads(row) for row in self.log.read_text().splitlines()]

    def test_answers_are_put_together_as_the_package_does(self):
        def body(word, **more):
            return {"model": "claude-fake", "max_tokens": 50,
                    "messages": [{"role": "user", "content": word}], **more}

        rows = self.ask_evalrt(
            [(f"{word} {stream}", "/v1/messages", body(word, stream=stream))
             for word in ANSWERS for stream in (True, False)])
        for word, (content, reason, sequence, _) in ANSWERS.items():
            with self.client.messages.stream(**body(word)) as stream:
                heard = "".join(stream.text_stream)
                streamed = stream.get_final_message()
            whole = self.client.messages.create(**body(word))
            for name, truth in (("True", streamed), ("False", whole)):
                with self.subTest(word=word, stream=name):
                    row = rows[f"{word} {name}"]
                    self.assertIsNone(row["error"])
                    ours = row["response"]["body"]
                    # What the accumulator adds of its own, and no server has sent.
                    theirs = json.loads(truth.to_json(exclude_unset=True))
                    if theirs.get("stop_details", 0) is None:
                        del theirs["stop_details"]
                    for block in theirs["content"]:
                        block.pop("parsed_output", None)
                    self.assertEqual(ours, theirs)
                    parsed = Message.model_validate(ours, strict=True)
                    self.assertEqual(parsed.stop_reason, reason)
                    self.assertEqual(parsed.stop_sequence, sequence)
                    self.assertEqual(ours["content"], content)
                    usage = truth.usage
                    self.assertEqual(row["evalrt"]["prompt_tokens"],
                                     usage.input_tokens + (usage.cache_read_input_tokens or 0)
                                     + (usage.cache_creation_input_tokens or 0))
                    self.assertEqual(row["evalrt"]["cached_tokens"], usage.cache_read_input_tokens)
                    self.assertEqual(row["evalrt"]["completion_tokens"], usage.output_tokens)
            self.assertEqual(heard, "".join(it.get("text", "") for it in content))

    def test_what_is_sent_is_of_the_declared_types(self):
        self.ask_evalrt([(name, "/v1/chat/completions", body) for name, body in CHATS.items()])
        asked = self.asked()
        self.assertEqual(len(asked), len(CHATS) + 1)  # and the one token that shows it is there
        for it in asked:
            self.assertEqual(check_request(it["body"]), it["body"])
        # The package itself sends the same headers and, given the same, the same body.
        before = len(asked)
        for it in asked:
            self.client.messages.create(**it["body"])
        for ours, theirs in zip(asked, self.asked()[before:]):
            self.assertEqual(ours["body"], theirs["body"])
            for name in ("x-api-key", "anthropic-version", "content-type"):
                self.assertEqual(ours["headers"][name], theirs["headers"][name])
        marked = [it["body"] for it in asked if "rule rule" in json.dumps(it["body"])]
        self.assertEqual([body["system"][0]["cache_control"] for body in marked],
                         [{"type": "ephemeral"}] * 2)

    def test_what_the_types_do_not_have_is_seen(self):
        body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        check_request(body)
        for wrong in ({"n": 1}, {"max_tokens": "many"}, {"messages": [{"role": "tool", "content": ""}]},
                      {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}):
            with self.subTest(wrong=wrong), self.assertRaises(pydantic.ValidationError):
                check_request(body | wrong)

    def test_errors_are_of_the_class_that_the_package_raises(self):
        rows = self.ask_evalrt(
            [(f"{status} {kind}", "/v1/messages",
              {"model": "m", "max_tokens": 5,
               "messages": [{"role": "user", "content": f"status-{status}-{kind}"}]})
             for status, kind in ERRORS], "--retries", 0, "--timeout", 600)
        for (status, kind), (raised, errc) in ERRORS.items():
            with self.subTest(status=status):
                with self.assertRaises(raised) as caught:
                    self.client.messages.create(
                        model="m", max_tokens=5,
                        messages=[{"role": "user", "content": f"status-{status}-{kind}"}])
                row = rows[f"{status} {kind}"]
                self.assertEqual(row["error"]["code"], errc)
                self.assertEqual(row["response"]["status_code"], caught.exception.status_code)
                self.assertEqual(row["response"]["body"], caught.exception.body)
                self.assertIn(f"words of {kind}", row["error"]["message"])

    def test_errors_inside_a_stream(self):
        for kind in ("overloaded_error", "invalid_request_error"):
            body = {"model": "m", "max_tokens": 5,
                    "messages": [{"role": "user", "content": f"late-{kind}"}]}
            with self.assertRaises(anthropic.APIStatusError):
                with self.client.messages.stream(**body) as stream:
                    stream.get_final_message()
        row = self.ask_evalrt([("late", "/v1/messages", body)])["late"]
        self.assertEqual((row["error"]["code"], row["evalrt"]["attempts"]), ("rejected", 1))

    def test_a_translated_answer_is_a_message_to_the_package(self):
        lines = [("a", "/v1/messages", {"max_tokens": 5, "system": "S",
                                        "messages": [{"role": "user", "content": "question"}]})]
        row = self.evalrt(lines, "--backend", "mlx-server", "--executable",
                          SUPPORT / "fake_openai.py", "--model", "fake")["a"]
        self.assertIsNone(row["error"])
        message = Message.model_validate(row["response"]["body"], strict=True)
        self.assertEqual(message.content[0].text.strip(), "answer to question")
        self.assertEqual(message.stop_reason, "end_turn")
        self.assertEqual(message.usage.input_tokens + message.usage.cache_read_input_tokens, 40)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--evalrt", required=True, type=os.path.abspath)
    options, rest = parser.parse_known_args()
    close_types()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=1)
