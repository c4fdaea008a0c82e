#!/usr/bin/env python3
"""lm_eval through `evalrt gateway`, on a task of its own: answers and score are those that it gets
from the server directly; log-likelihoods, which the server does not have, end with a clear error, and
are scored in front of vLLM, which has them.

    lm_eval_client.py --evalrt PROGRAM --server PROGRAM --model FOLDER [--vllm PROGRAM --vllm-model FOLDER]
"""

PACKAGES = ["lm_eval[api]==0.4.13", "transformers==5.24.0"]  # for a tokenizer

import harness

args, rest = harness.read_arguments(PACKAGES)

import json
import sys
import unittest

ROWS = [{"question": f"What is {a} plus {b}? Answer with the number alone.", "answer": str(a + b),
         "choices": [str(a + b), str(a * b + 1)]} for a in range(1, 5) for b in range(1, 5)]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
GENERATE = """
task: local_sums
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false, temperature: 0}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: [".*= ", "[.]"]}
"""
LIKELIHOOD = """
task: local_choices
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: 0
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


class LmEval(unittest.TestCase):
    def setUp(self):
        self.folder = harness.scratch(self)
        rows = self.folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        tasks = self.folder / "tasks"
        tasks.mkdir()
        for name, text in (("sums", GENERATE), ("choices", LIKELIHOOD)):
            (tasks / f"{name}.yaml").write_text(text + COMMON.format(rows=rows))

    def command(self, task, model, path, at_once, *more):
        settings = (f"model=default_model,base_url=$OPENAI_BASE_URL{path},num_concurrent={at_once},"
                    f"tokenized_requests=False,max_retries=1")
        return ["sh", "-c", f'"$@" --model_args "{settings}"', "sh", sys.executable, "-m", "lm_eval",
                "--model", model, "--tasks", task, "--include_path", self.folder / "tasks",
                "--output_path", "out", "--log_samples", *more]

    def read(self, done, task="local_sums", metric="exact_match"):
        self.assertEqual(done.code, 0, done.err)
        results, = done.folder.glob("out/**/results_*.json")
        samples, = done.folder.glob("out/**/samples_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda it: it["doc_id"])
        score = json.loads(results.read_text())["results"][task][f"{metric},none"]
        return [row["resps"] if metric == "acc" else row["resps"][0][0] for row in rows], score

    def test_generation(self):
        def command(at_once):
            return self.command("local_sums", "local-chat-completions", "/chat/completions", at_once,
                                "--apply_chat_template")

        cache = {"HF_HOME": str(self.folder / "cache")}
        direct = harness.directly(args, command(1), self.folder / "direct", **cache)
        gateway = harness.through_gateway(args, command(16), self.folder / "gateway", **cache)
        (before, score), (after, batched) = map(self.read, (direct, gateway))
        same = harness.compare("lm_eval", before, after, direct, gateway)
        print(f"scores {score:.3f} and {batched:.3f}", file=sys.stderr)
        self.assertEqual(len(after), len(ROWS))
        self.assertGreaterEqual(same, 12)  # not promised
        self.assertAlmostEqual(score, batched, delta=(len(ROWS) - same) / len(ROWS) + 1e-9)
        self.assertEqual((gateway.summary["answered"], gateway.summary["failed"]), (len(ROWS), 0))

    def test_log_likelihoods_end_at_once_and_say_why(self):
        command = self.command("local_choices", "local-completions", "/completions", 4)
        command[2] = command[2].replace("tokenized_requests=False",
                                        f"tokenized_requests=False,tokenizer={args.model}")
        done = harness.through_gateway(args, command, self.folder / "gateway",
                                       HF_HOME=str(self.folder / "cache"))
        self.assertNotEqual(done.code, 0)
        self.assertRegex(done.out + done.err, "(?i)logprobs|echo")
        self.assertEqual(done.summary["answered"], 0)
        self.assertLess(done.wall, 120)

    @unittest.skipUnless(args.vllm, "it is in front of vLLM")
    def test_log_likelihoods_are_those_of_vllm(self):
        command = self.command("local_choices", "local-completions", "/completions", 16)
        command[2] = command[2].replace("tokenized_requests=False",
                                        f"tokenized_requests=False,tokenizer={args.vllm_model}")
        command[2] = command[2].replace("default_model", "smol")
        env = harness.CLEAN | {"HF_HOME": str(self.folder / "cache")}
        vllm = [args.vllm, "serve", args.vllm_model, "--served-model-name", "smol", "--host", "127.0.0.1",
                "--max-model-len", "2048", "--max-num-seqs", "32"]
        with harness.started(vllm, patience=900, VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1") as url:
            direct = harness.run(command, self.folder / "direct",
                                 env | {"OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": "none"})
            gateway = harness.run([args.evalrt, "gateway", "--backend", "openai-url", "--url", url + "/v1", "--",
                                   *command], self.folder / "gateway", env)
        (before, score), (after, batched) = (self.read(it, "local_choices", "acc") for it in (direct, gateway))
        harness.compare("lm_eval, log-likelihoods", before, after, direct, gateway)
        print(f"scores {score:.3f} and {batched:.3f}", file=sys.stderr)
        self.assertEqual(len(after), len(ROWS))
        for pair in zip(before, after):
            for one, other in zip(*pair):  # [[log-likelihood, greedy]], as text
                self.assertAlmostEqual(float(one[0][0]), float(other[0][0]), delta=0.2)  # bfloat16, batched
        self.assertAlmostEqual(score, batched, delta=0.07)  # one near tie
        self.assertIn(f"{2 * len(ROWS)} answered, 0 failed", gateway.err)


if __name__ == "__main__":
    unittest.main(argv=rest)
