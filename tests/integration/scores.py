#!/usr/bin/env python3
"""A score says how much of the suite it covers: score_facts.py and smoke_report.py.

    scores.py SCRIPTS_FOLDER
"""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(sys.argv.pop(1)).resolve()


def row(custom_id, text=None, code=None):
    out = {"custom_id": custom_id, "response": None, "error": None, "evalrt": {
        "queued_ms": 1, "first_text_ms": 1, "total_ms": 2, "prompt_tokens": 1, "cached_tokens": 0,
        "completion_tokens": 1}}
    if text is not None:
        out["response"] = {"status_code": 200, "body": {"choices": [{"message": {"content": text}}]}}
    if code:
        out["error"] = {"code": code, "message": "no"}
    return out


def run(*args):
    done = subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


class Scores(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)

    def write(self, name, rows):
        path = self.dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(it) + "\n" for it in rows))
        return path

    def facts(self, rows):
        answers = self.write("answers", [{"custom_id": f"q{i}", "answers": [str(i)]} for i in range(5)])
        code, out, err = run(SCRIPTS / "score_facts.py", answers, self.write("out", rows))
        self.assertEqual(code, 0, err)
        return json.loads(out), err

    def test_a_whole_score(self):
        score, err = self.facts([row(f"q{i}", f"Answer: {i % 4}") for i in range(5)])
        self.assertEqual(score["correct"], 4)
        self.assertEqual(score["coverage"], {"items": 5, "answered": 5, "failed": 0, "failures": {},
                                             "not_run": 0, "complete": True})
        self.assertNotIn("COMPLETE", err)

    def test_an_error_is_no_wrong_answer_and_is_counted_by_its_class(self):
        score, err = self.facts([row("q0", "Answer: 0"), row("q1", code="timed_out"),
                                 row("q2", "looks like text", code="truncated"),
                                 row("q3", code="timed_out")])
        self.assertEqual(score["per_item"], {"q0": True, "q1": None, "q2": None, "q3": None, "q4": None})
        self.assertEqual(score["coverage"], {
            "items": 5, "answered": 1, "failed": 3, "failures": {"timed_out": 2, "truncated": 1},
            "not_run": 1, "complete": False})
        self.assertIn("1 of 1 correct, NOT COMPLETE: 1 of 5 answered, 3 failed (2 timed_out, "
                      "1 truncated), 1 not run", err)

    def smoke(self, failed):
        for name, lost in (("sequential", 0), ("batched", failed)):
            (self.dir / f"{name}.json").write_text(json.dumps({
                "requests": 4, "answered": 4 - lost, "failed": lost, "not_run": 0,
                "failures": {"timed_out": lost} if lost else {}, "wall_seconds": 1.0,
                "output_tokens_per_second": 1, "in_flight_mean": 1, "ttft_ms": {"p50": 1},
                "prompt_tokens": 1, "completion_tokens": 1, "max_in_flight": 1,
                "cached_tokens": {"actual": 0, "expected": 0, "maximum": 0}}))
            self.write(f"{name}/out.jsonl", [row(f"q{i}", "x") for i in range(4 - lost)])
            (self.dir / f"{name}-score.json").write_text(json.dumps(
                {"per_item": {f"q{i}": True if i < 4 - lost else None for i in range(4)}}))
        code, out, err = run(SCRIPTS / "smoke_report.py", "report", self.dir, "--min-speedup", "0",
                             "--scores", self.dir / "sequential-score.json",
                             self.dir / "batched-score.json")
        line = [it for it in out.splitlines() if it.startswith("score:")]
        self.assertEqual(len(line), 1, out + err)
        return code, line[0], json.loads((self.dir / "report.json").read_text())["score"]

    def test_the_smoke_run_says_in_the_line_of_its_score_what_is_missing(self):
        code, line, score = self.smoke(0)
        self.assertEqual(code, 0)
        self.assertIn("on 4 of 4 items", line)
        self.assertNotIn("COMPLETE", line)
        self.assertTrue(score["coverage"]["complete"])
        code, line, score = self.smoke(1)
        self.assertEqual(code, 1)
        self.assertIn("on 3 of 4 items", line)
        self.assertIn("NOT COMPLETE: one at a time 4 of 4 answered, 0 failed, 0 not run; evalrt 3 of 4 "
                      "answered, 1 failed (1 timed_out), 0 not run", line)
        self.assertEqual(score["coverage"]["batched"]["failures"], {"timed_out": 1})
        self.assertFalse(score["coverage"]["complete"])


if __name__ == "__main__":
    unittest.main(verbosity=1)
