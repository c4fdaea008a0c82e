#!/usr/bin/env python3
"""Conversations of an agent with tools and a user that a model plays, in the manner of tau-bench:
one at a time directly, and all at once through `evalrt gateway`.

    agents_client.py --evalrt PROGRAM --server PROGRAM --model FOLDER [--rows N]

N: conversations, 6 by itself and 16 at most, with which it should be 2.5 times as fast.
FOLDER-tools is the same model with a chat template that makes it call tools. Long ones, which it
cannot hold, are in tests/integration/engines.py.
"""

PACKAGES = ["openai==3.57.0", "anthropic==2.14.0"]  # the environment of gateway_clients.py

import json
import os
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CITIES = """Paris Rome Oslo Cairo Lima Madrid Tokyo Delhi Berlin Vienna Athens Lisbon Dublin Prague Warsaw
    Moscow""".split()
TURNS = 8
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}},
                   "required": ["city"]}}}]
RULES = "You are a traveller who talks to an assistant. Ask one short question about the weather."


def converse(client, city):
    """What was said, and the cities that were looked up."""
    agent = [{"role": "user", "content": f"What is the weather in {city}?"}]
    user = [{"role": "system", "content": RULES}, {"role": "assistant", "content": agent[0]["content"]}]
    looked_up, said = [], []
    for _ in range(TURNS):
        message = client.chat.completions.create(
            model="default_model", messages=agent, tools=TOOLS, temperature=0,
            max_tokens=32).choices[0].message
        agent.append(message.model_dump(exclude_none=True))
        if message.tool_calls:
            call = message.tool_calls[0]  # as tau-bench: the first alone
            agent[-1]["tool_calls"] = agent[-1]["tool_calls"][:1]
            found = json.loads(call.function.arguments).get("city")
            looked_up.append(found)
            said.append(f"get_weather {found}")
            agent.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name,
                          "content": f"18 degrees in {found}"})
            if len(looked_up) > 1:
                break
            continue
        said.append(message.content)
        user.append({"role": "user", "content": message.content or "..."})
        reply = client.chat.completions.create(model="default_model", messages=user, temperature=0,
                                               max_tokens=8)
        said.append(reply.choices[0].message.content)
        user.append({"role": "assistant", "content": said[-1]})
        agent.append({"role": "user", "content": said[-1]})
    return {"said": said, "looked_up": looked_up}


def child(count, at_once):
    import openai

    client = openai.OpenAI(timeout=600)
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(lambda city: converse(client, city), CITIES[:count]))
    Path("results.json").write_text(json.dumps(results))


if sys.argv[1:2] == ["--child"]:
    sys.exit(child(int(sys.argv[2]), int(sys.argv[3])))

import harness

args, rest = harness.read_arguments(PACKAGES)
COUNT = args.rows or 6
CACHE = ["--prompt-cache-size", "64"]  # two prompts a conversation, all of them under way


class Agents(unittest.TestCase):
    def test_conversations_at_once(self):
        folder = harness.scratch(self)
        command = [sys.executable, os.path.abspath(__file__), "--child", str(COUNT)]
        model = args.model + "-tools"
        direct = harness.directly(args, [*command, "1"], folder / "direct", model)
        gateway = harness.through_gateway(args, [*command, str(COUNT)], folder / "gateway", model,
                                          CACHE)
        results = []
        for done in (direct, gateway):
            self.assertEqual(done.code, 0, done.err)
            results.append(json.loads((done.folder / "results.json").read_text()))
        calls = [sum(len(it["said"]) for it in result) for result in results]
        rewards = [[city in it["looked_up"] for city, it in zip(CITIES, result)] for result in results]
        same = harness.compare(f"agents and users, {COUNT} conversations, {calls[0]} and {calls[1]} requests",
                               *results, direct, gateway)
        print(f"the right city was looked up in {sum(rewards[0])} and {sum(rewards[1])} of {COUNT}",
              file=sys.stderr)
        self.assertEqual(gateway.summary["answered"], calls[1])
        self.assertEqual(gateway.summary["failed"], 0)
        for reward in rewards:
            self.assertGreaterEqual(sum(reward), COUNT * 3 // 4)
        self.assertGreaterEqual(same, COUNT // 2)  # not promised; mixed up none would be
        self.assertGreater(gateway.summary["in_flight_mean"], 2)


if __name__ == "__main__":
    unittest.main(argv=rest)
