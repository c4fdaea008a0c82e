#!/usr/bin/env python3
"""The evalrt program with stand-ins for servers that do not run here: their rows, and how a server
behind a URL is recognised.

    servers.py EVALRT_PROGRAM
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

EVALRT = os.path.abspath(sys.argv.pop(1))
SUPPORT = Path(__file__).resolve().parent.parent / "support"
sys.path.insert(0, str(SUPPORT))

from patience import LONG, until  # noqa: E402


def line(custom_id, question, url="/v1/chat/completions", system=None, **body):
    if url.endswith("/chat/completions"):
        messages = [{"role": "system", "content": system}] if system else []
        body = {"messages": messages + [{"role": "user", "content": question}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        self.log = self.dir / "asked"
        (self.dir / "tmp").mkdir()

    def run_program(self, *args, env={}):
        done = subprocess.run([EVALRT, *map(str, args)], cwd=self.dir, text=True, timeout=LONG,
                              capture_output=True, env=dict(
                                  os.environ, FAKE_OPENAI_LOG=str(self.log),
                                  TMPDIR=str(self.dir / "tmp"), OPENAI_API_KEY="", **env))
        return done.returncode, done.stdout, done.stderr

    def run_lines(self, lines, *args, code=0, **more):
        (self.dir / "suite").write_text("\n".join(lines) + "\n")
        got, out, err = self.run_program("run", "suite", "--json", "summary", *args, **more)
        self.assertEqual(got, code, err)
        self.summary = json.loads((self.dir / "summary").read_text())
        return {row["custom_id"]: row for row in map(json.loads, out.splitlines())}, err

    def logged(self, key):
        return [row for row in map(json.loads, self.log.read_text().splitlines()) if key in row]


class TinyGpt(Case):
    SERVER = ("--backend", "tinygpt", "--executable", SUPPORT / "fake_tinygpt.py", "--model", "m.tinygpt")

    def asked(self):
        return [row for row in self.logged("text") if '"max_tokens": 1,' not in row["text"]]

    def test_it_is_started_and_asked_as_the_present_harness_does(self):
        bodies = ['{"max_tokens":128,"model":"tinygpt","prompt":"Once upon %d","temperature":0}' % i
                  for i in range(6)]
        rows, err = self.run_lines(
            ['{"custom_id":"%d","url":"/v1/completions","body":%s}' % it for it in enumerate(bodies)],
            *self.SERVER)
        argv = self.logged("argv")[0]["argv"]
        port = argv[5]
        self.assertEqual(argv, ["serve", "m.tinygpt", "--host", "127.0.0.1", "--port", port,
                                "--max-context", "4096"])
        self.assertEqual(sorted(row["text"] for row in self.asked()), bodies)
        self.assertEqual({row["in_flight"] for row in self.asked()}, {1})
        self.assertEqual({row["path"] for row in self.asked()}, {"/v1/completions"})
        self.assertEqual(rows["3"]["response"]["body"]["choices"][0]["finish_reason"], "stop")
        # What it does not say, we do, once.
        self.assertEqual(err.count("it is cut short"), 1)
        self.assertIn("prefix cached: n/a (tinygpt does not report cached tokens)", err)

    def test_what_it_would_do_in_silence_is_said_once(self):
        long = line("long", "word " * 60, max_tokens=5)
        _, err = self.run_lines([line("a", "x"), line("b", "y"), long], *self.SERVER,
                                "--max-context", "50")
        self.assertEqual(err.count("ends answers after 128 tokens"), 1)
        self.assertEqual(err.count("cuts off its beginning"), 1)
        self.assertEqual(sum("cuts off its beginning" in note for note in self.summary["notes"]), 1)
        self.assertEqual(self.logged("argv")[0]["argv"][-1], "50")

    def test_parts_become_a_string_and_images_are_refused(self):
        text = {"type": "text", "text": "hello there"}
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        rows, err = self.run_lines(
            [line("parts", [text, text], max_completion_tokens=2), line("image", [text, image])],
            *self.SERVER, code=1)
        body = json.loads(self.asked()[0]["text"])
        self.assertEqual(body["messages"], [{"role": "user", "content": "hello therehello there"}])
        self.assertEqual(body["max_tokens"], 2)
        self.assertNotIn("max_completion_tokens", body)
        self.assertEqual(rows["parts"]["evalrt"]["prompt_tokens"], 3)
        self.assertEqual(rows["image"]["error"]["code"], "rejected")
        self.assertIn("image_url", rows["image"]["error"]["message"])
        self.assertEqual(len(self.asked()), 1)

    def test_its_plain_text_error_fails_one_item(self):
        rows, _ = self.run_lines([line("bad", "fail", max_tokens=3), line("good", "x", max_tokens=3)],
                                 *self.SERVER, "--retries", "0", code=1)
        self.assertIn("error: boom", rows["bad"]["error"]["message"])
        self.assertIsNone(rows["good"]["error"])


class OMlx(Case):
    def setUp(self):
        super().setUp()
        self.model = self.dir / "models" / "smol"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        self.server = ("--backend", "omlx", "--executable", SUPPORT / "fake_omlx.py", "--model")

    def asked(self):
        return [row for row in self.logged("body") if row["body"].get("max_tokens") != 1]

    def siblings(self, count=6):
        system = "You answer with yes or no. " * 100  # 2,700 bytes: two whole blocks
        return [line(f"q{i}", f"question {i}", system=system, temperature=0) for i in range(count)]

    def test_it_gets_the_folder_of_its_model_and_a_private_one_that_is_removed(self):
        for given in (self.model, f"{self.model}/", "models/smol"):
            self.log.unlink(missing_ok=True)
            self.run_lines([line("a", "x", temperature=0)], *self.server, given)
            first = self.logged("argv")[0]
            argv = dict(zip(first["argv"][1::2], first["argv"][2::2]))
            self.assertEqual(argv["--model-dir"], str(self.model.parent))
            self.assertEqual(Path(argv["--base-path"]).parent, self.dir / "tmp")
            self.assertEqual(first["base_path_env"], argv["--base-path"])
            self.assertNotIn("--max-concurrent-requests", argv)
            self.assertEqual(list((self.dir / "tmp").iterdir()), [])
            self.assertEqual([row["body"]["model"] for row in self.asked()], ["smol"])

    def test_its_private_folder_goes_with_it_when_the_program_is_killed(self):
        (self.dir / "suite").write_text("\n".join(self.siblings()) + "\n")
        program = subprocess.Popen(
            [EVALRT, "run", "suite", *map(str, self.server), self.model], cwd=self.dir,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(
                os.environ, FAKE_OPENAI_LOG=str(self.log), TMPDIR=str(self.dir / "tmp"), OPENAI_API_KEY=""))
        until(lambda: self.log.exists() and self.log.read_text().endswith("\n") and self.asked())
        self.assertEqual(len(list((self.dir / "tmp").iterdir())), 1)
        program.kill()
        program.wait()
        until(lambda: not list((self.dir / "tmp").iterdir()))

    def test_siblings_wait_until_the_leaders_blocks_show(self):
        rows, err = self.run_lines(self.siblings(), *self.server, self.model)
        self.assertEqual(sorted(row["evalrt"]["cached_tokens"] for row in rows.values()),
                         [0] + 5 * [512])
        self.assertIn("prefix cached: 2560 tokens", err)
        self.assertGreater(max(row["in_flight"] for row in self.asked()), 1)
        for row in rows.values():
            self.assertEqual(row["response"]["body"]["choices"][0]["message"]["content"],
                             "The answer is yes.")
            self.assertEqual(row["response"]["request_id"], "chatcmpl-1")
            self.assertGreater(row["evalrt"]["first_text_ms"], 90)  # not the chunk that keeps alive
        # Two tokens in a chunk: the time between two is not known.
        self.assertIsNone(self.summary["inter_token_ms"]["p50"])
        self.assertIsNotNone(self.summary["ttft_ms"]["p50"])

    def test_cached_tokens_left_out_are_zero_once_there_were_some(self):
        rows, err = self.run_lines(self.siblings(), *self.server, self.model,
                                   env={"FAKE_OMLX_OLD": "1"})
        self.assertEqual(sorted(str(row["evalrt"]["cached_tokens"]) for row in rows.values()),
                         5 * ["512"] + ["None"])
        self.assertEqual(self.summary["cached_tokens"]["actual"], 2560)
        self.assertIn("prefix cached: 2560 tokens", err)

    def test_an_answer_without_content_and_one_body_after_a_space(self):
        rows, err = self.run_lines(
            [line("none", "say nothing"), line("whole", "x", stream=False),
             line("none too", "say nothing", stream=False)], *self.server, self.model)
        for row in rows.values():
            self.assertIsNone(row["error"])
        self.assertEqual(rows["whole"]["response"]["body"]["choices"][0]["message"]["content"],
                         "The answer is yes.")
        self.assertEqual(err.count("omlx then takes 1"), 1)  # the temperature
        self.assertNotIn("temperature", self.asked()[0]["body"])

    def test_an_error_after_200_and_a_space_has_its_class(self):
        rows, _ = self.run_lines([line("a", "too long", stream=False, temperature=0)], *self.server,
                                 self.model, "--retries", "0", code=1)
        self.assertEqual(rows["a"]["error"]["code"], "context_too_long")

    def test_more_at_once_than_by_itself_are_told_to_it(self):
        self.run_lines([line("a", "x", temperature=0)], *self.server, self.model,
                       "--max-in-flight", "24")
        argv = self.logged("argv")[0]["argv"]
        self.assertEqual(argv[-2:], ["--max-concurrent-requests", "24"])

    def test_a_model_that_is_no_folder_is_said_before_anything_is_started(self):
        (self.dir / "suite").write_text(line("a", "x"))
        code, out, err = self.run_program("run", "suite", *self.server, "smol")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("give --model with the path", err)
        self.assertFalse(self.log.exists())


class Recognised(Case):
    """A server in this process whose GETs are given."""

    def serve(self, answers, hang=(), together=1):
        """Once asked for one token, it answers nobody until so many ask `together`."""
        test = self
        self.gets, self.bodies, self.keys, self.most = [], [], {}, 0
        running, changed, stop = [0], threading.Condition(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def send(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self):
                test.gets.append(self.path)
                if self.path in hang:
                    stop.wait(LONG)
                answer = answers.get(self.path)
                self.send(200 if answer is not None else 404,
                          answer if isinstance(answer, str) else json.dumps(answer))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with changed:
                    running[0] += 1
                    test.most = max(test.most, running[0])
                    test.bodies.append(body)
                    test.keys[body["messages"][-1]["content"]] = self.headers["X-SMG-Routing-Key"]
                    changed.notify_all()
                    if body.get("max_tokens") != 1:
                        changed.wait_for(lambda: test.most >= together, 60)
                stop.wait(0.05)  # so that one too many would be seen
                with changed:
                    running[0] -= 1
                    status = answers["first"].pop(0) if answers.get("first") else 200
                if status != 200:
                    return self.send(status, json.dumps({"error": {"message": "not so"}}))
                choice = {"index": 0, "finish_reason": "stop",
                          "message": {"role": "assistant", "content": "yes"}}
                self.send(200, json.dumps({"id": "1", "model": answers.get("model", body["model"]),
                                           "choices": [choice]}))

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_):
                pass  # who has asked does not wait any more

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.addCleanup(stop.set)
        return f"http://127.0.0.1:{server.server_port}/v1"

    def models(self, owner):
        return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner}]}

    def suite(self, count=40):
        return [line(f"q{i}", f"{i}", stream=False) for i in range(count)]

    def test_a_server_that_is_loading_is_waited_for(self):
        url = self.serve({"model": "m", "/v1/models": self.models("me"), "first": [503, 429]})
        rows, err = self.run_lines(self.suite(3), "--backend", "openai-url", "--url", url)
        self.assertEqual(len(rows), 3)
        self.assertIn("it is asked again", err)
        url = self.serve({"model": "m", "/v1/models": self.models("me"), "first": [503]})
        (self.dir / "suite").write_text(line("a", "x"))
        code, _, err = self.run_program("run", "suite", "--backend", "openai-url", "--url", url,
                                        "--retries", "0")
        self.assertEqual(code, 3)
        self.assertIn("openai-url: HTTP 503: not so", err)

    def test_a_refusal_of_our_own_request_is_no_refusal_of_theirs(self):
        for status in (400, 422):
            url = self.serve({"model": "m", "/v1/models": self.models("me"), "first": [status]})
            rows, _ = self.run_lines(self.suite(3), "--backend", "openai-url", "--url", url)
            self.assertEqual(len(rows), 3)
        url = self.serve({"model": "m", "/v1/models": self.models("me"), "first": [404]})
        code, _, err = self.run_program("run", "suite", "--backend", "openai-url", "--url", url)
        self.assertEqual(code, 3, err)

    def test_a_server_is_asked_who_it_is_and_sent_as_many_as_it_takes(self):
        url = self.serve({"/v1/models": self.models("llamacpp"),
                          "/props": {"total_slots": 3, "build_info": "b7-x"}}, together=3)
        _, err = self.run_lines(self.suite(), "--backend", "openai-url", "--url", url)
        self.assertIn('the server is llama-server b7-x (its models are owned_by "llamacpp"); 3 '
                      "requests at once, its total_slots", err)
        self.assertEqual(self.most, 3)
        self.assertEqual((self.summary["max_in_flight"], self.summary["server_version"]), (3, "b7-x"))
        self.assertTrue(any("llama-server" in note for note in self.summary["notes"]))
        self.assertEqual({body["model"] for body in self.bodies}, {"m"})

    def test_a_number_that_was_given_wins(self):
        url = self.serve({"/props": {"total_slots": 3}}, together=7)
        self.run_lines(self.suite(), "--backend", "openai-url", "--url", url, "--max-in-flight", "7",
                       "--model", "m")
        self.assertEqual(self.most, 7)

    def test_no_probe_asks_nothing(self):
        url = self.serve({"/props": {"total_slots": 3}})
        _, err = self.run_lines(self.suite(), "--backend", "openai-url", "--url", url, "--model",
                                "m", "--no-probe")
        self.assertEqual(self.gets, [])
        self.assertEqual(self.summary["max_in_flight"], 16)
        self.assertNotIn("the server is", err)

    def test_a_backend_that_was_named_is_not_asked(self):
        url = self.serve({"/props": {"total_slots": 3}})
        self.run_lines(self.suite(3), "--backend", "mlx-server", "--url", url)
        self.assertEqual(self.gets, [])

    def test_sglang_is_never_asked_for_its_health(self):
        for answers in ({"/v1/models": self.models("sglang")},
                        {"/get_model_info": {"model_path": "m"}}):
            url = self.serve(answers | {"/get_server_info": {"max_running_requests": 5}})
            self.run_lines(self.suite(3), "--backend", "openai-url", "--url", url, "--model", "m")
            self.assertEqual(self.summary["max_in_flight"], 5)
            self.assertNotIn("/health", self.gets)

    def test_a_server_that_does_not_answer_gets_is_used_all_the_same(self):
        url = self.serve({}, hang=["/v1/models"])
        _, err = self.run_lines(self.suite(3), "--backend", "openai-url", "--url", url, "--model",
                                "m")
        self.assertIn("the server is unknown (/v1/models was not answered in time)", err)
        self.assertEqual(self.gets, ["/v1/models"])

    def test_ollama_is_explained(self):
        url = self.serve({"/v1/models": self.models("library"), "/api/version": {"version": "0.13"}})
        _, err = self.run_lines(self.suite(3), "--backend", "openai-url", "--url", url)
        self.assertIn("OLLAMA_NUM_PARALLEL", err)
        self.assertIn("cuts a prompt that does not fit", err)
        self.assertEqual(self.most, 1)
        self.assertIn("prefix cached: n/a (Ollama does not report cached tokens)", err)

    def test_an_answer_of_another_model_is_said_once(self):
        url = self.serve({"model": "qwen"})
        _, err = self.run_lines(self.suite(5), "--backend", "openai-url", "--url", url, "--model",
                                "llama")
        self.assertEqual(err.count("requests ask for the model 'llama', but 'qwen' answers"), 1)

    def test_mlx_lm_behind_a_url_gets_its_own_row(self):
        url = self.serve({"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": []}})
        rows, err = self.run_lines(
            [line("a", "x", stream=False, seed=7, temperature=0), line("b", "y", stream=False, n=3),
             line("c", "z", stream=False, logprobs=5),
             line("d", "z", stream=False, presence_penalty=1)],
            "--backend", "openai-url", "--url", url, code=1)
        self.assertIn("the server is mlx-server", err)
        self.assertIn('dropped "seed"', err)
        self.assertNotIn("penalty or logit_bias", err)  # never at once
        self.assertEqual({body["model"] for body in self.bodies}, {"default_model"})
        self.assertIn("it is asked 3 times", err)
        self.assertEqual([c["index"] for c in rows["b"]["response"]["body"]["choices"]], [0, 1, 2])
        self.assertFalse(any("n" in body for body in self.bodies))
        self.assertIn("top_logprobs", rows["c"]["error"]["message"])

    def test_requests_with_a_penalty_are_kept_apart_from_those_without(self):
        url = self.serve({"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": []}})
        self.run_lines([line(f"{i}", f"x{i}", stream=False, max_tokens=9,
                             frequency_penalty=0.5 if i % 2 else 0) for i in range(40)],
                       "--backend", "openai-url", "--url", url)
        kinds = [body.get("frequency_penalty") == 0.5 for body in self.bodies if body["max_tokens"] == 9]
        self.assertEqual(len(kinds), 40)
        self.assertEqual(sum(a != b for a, b in zip(kinds, kinds[1:])), 1)

    def test_a_url_can_be_asked_about(self):
        url = self.serve({"/v1/models": self.models("vllm"), "/version": {"version": "0.11.0"}})
        code, out, err = self.run_program("backends", "--probe", url)
        self.assertEqual((code, err), (0, ""))
        self.assertIn('vllm 0.11.0 (its models are owned_by "vllm")', out)
        self.assertIn("--enable-prompt-tokens-details", out)
        code, out, _ = self.run_program("backends", "--probe", url, "--json")
        told = json.loads(out)
        self.assertEqual((told["server"], told["version"], told["row"]["in_flight"]),
                         ("vllm", "0.11.0", 64))

    def router(self, workers=2):
        """As sglang-router 0.3.2 answers; its servers have three slots each."""
        server = self.serve({"/v1/models": self.models("llamacpp"), "/props": {"total_slots": 3}})
        return self.serve({
            "/v1/models": self.models("local"),
            "/readiness": {"status": "ready", "healthy_workers": workers, "total_workers": workers},
            "/workers": {"workers": [{"url": "grpc://nowhere:1"}, {"url": server.removesuffix("/v1")}]}})

    def test_a_router_is_asked_about(self):
        code, out, err = self.run_program("backends", "--probe", self.router())
        self.assertEqual((code, err), (0, ""))
        self.assertIn('sglang-router (/readiness tells of 2 servers; llama-server, as its models are '
                      'owned_by "llamacpp")', out)
        self.assertIn("requests at once: 6, its total_slots, for 2 servers", out)
        code, out, _ = self.run_program("backends", "--probe", self.router(3), "--json")
        row = json.loads(out)["row"]
        self.assertEqual((row["name"], row["workers"], row["routing_key"], row["in_flight"]),
                         ("sglang-router", 3, True, 9))

    def test_a_router_is_told_what_belongs_together(self):
        url = self.router()
        lines = []
        for group in range(4):
            system = f"You know all about {group}. " * 20
            lines += [line(f"{group}-{i}", f"question {i} of {group}", system=system, temperature=0)
                      for i in range(5)]
        talk = [json.loads(line(f"talk-{n}-{turn}", f"turn {turn} of {n}", temperature=0))
                | {"evalrt": {"session": f"of Jane {n}", "turn": turn}} for n in (0, 1) for turn in (0, 1)]
        alone = line("alone", "something of its own", temperature=0)
        rows, err = self.run_lines([*lines, *map(json.dumps, talk), alone], "--backend", "openai-url",
                                   "--url", url, "--max-in-flight", "2")
        self.assertIn("the server is sglang-router (/readiness tells of 2 servers", err)
        self.assertEqual(len(rows), 25)
        keys = [{self.keys[f"question {i} of {group}"] for i in range(5)} for group in range(4)]
        for of in keys:  # one, or two where the group is in both parts of the run
            self.assertNotIn(None, of)
            self.assertLessEqual(len({key.rpartition("-")[0] for key in of}), 1)
        self.assertEqual(len({key.rpartition("-")[0] for of in keys for key in of}), 4)
        for n in (0, 1):
            self.assertEqual(len({self.keys[f"turn {turn} of {n}"] for turn in (0, 1)}), 1)
        self.assertNotEqual(self.keys["turn 0 of 0"], self.keys["turn 0 of 1"])
        self.assertNotIn("Jane", self.keys["turn 0 of 0"])
        self.assertIsNone(self.keys["something of its own"])
        # What is under way at one time is not of one group only.
        asked = [body["messages"][-1]["content"].split()[-1] for body in self.bodies
                 if "question" in body["messages"][-1]["content"]]
        self.assertNotEqual(asked[0], asked[1])
        # Nobody else is told.
        url = self.serve({"/v1/models": self.models("llamacpp"), "/props": {"total_slots": 4}})
        self.run_lines(lines, "--backend", "openai-url", "--url", url)
        self.assertEqual(set(self.keys.values()), {None})

    def test_what_cannot_be_asked_about_says_why(self):
        code, out, err = self.run_program("backends", "--probe", "http://127.0.0.1:1/v1")
        self.assertEqual((code, out), (3, ""))
        self.assertIn("cannot connect", err)
        code, out, err = self.run_program("backends", "--probe", "nonsense")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("http://", err)
        code, out, _ = self.run_program("backends", "--probe", self.serve({}))
        self.assertEqual(code, 0)
        self.assertIn("not recognised", out)


class Table(Case):
    def test_every_backend_has_a_line(self):
        code, out, _ = self.run_program("backends")
        self.assertEqual(code, 0)
        starts = [row.split(" ")[0] for row in out.splitlines()]
        for name in ("tinygpt", "omlx", "mlx-server", "openai-url", "vllm", "llama-server"):
            self.assertEqual(starts.count(name), 2, name)  # its traits, and its remark
        code, out, _ = self.run_program("backends", "--json")
        table = json.loads(out)
        self.assertEqual(table["backends"][0]["name"], "tinygpt")
        self.assertEqual(table["backends"][0]["default_max_tokens"], 128)
        self.assertIn("vllm", [row["name"] for row in table["profiles"]])


if __name__ == "__main__":
    unittest.main(verbosity=1)
