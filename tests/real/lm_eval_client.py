#!/usr/bin/env python3
"""lm_eval through `evalrt gateway`, on a task of its own: answers and score are those that it gets
from the server directly; log-likelihoods, which the server does not have, end with a clear error.

    lm_eval_client.py --evalrt PROGRAM --server PROGRAM --model FOLDER
"""

PACKAGES = ["lm_eval[api]==0.4.13", "transformers"]  # for a tokenizer

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

    def read(self, done):
        self.assertEqual(done.code, 0, done.err)
        results, = done.folder.glob("out/**/results_*.json")
        samples, = done.folder.glob("out/**/samples_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda it: it["doc_id"])
        score = json.loads(results.read_text())["results"]["local_sums"]["exact_match,none"]
        return [row["resps"][0][0] for row in rows], score

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


if __name__ == "__main__":
    unittest.main(argv=rest)
