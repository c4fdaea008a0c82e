#!/usr/bin/env python3
"""What planning a large suite costs: evalrt run --dry-run on a generated file.

    dry_run.py --bin DIR [--requests N] [--shards N]

JSON lines on stdout, a table on stderr; exit code 1 if a goal is missed.
"""
import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOALS = {"seconds": (60, "reading and planning, s"), "megabytes": (2000, "memory at most, MB")}
BODY = 1500


def write_suite(path, count):
    """Bodies of 1.5 kB: questions about 20,000 documents, 50 of each, in no order."""
    documents = max(count // 50, 1)
    with open(path, "w", encoding="utf-8", buffering=1 << 20) as file:
        for i in range(count):
            document = i * 7919 % documents
            head = f"You are an expert. Document {document}: "
            head += f"fact {document} follows from fact {document * 31 % 997}; " * 24
            text = f'{{"messages":[{{"role":"system","content":"{head}"}},{{"role":"user","content":"Question {i}: '
            tail = '"}],"max_tokens":128,"temperature":0}'
            text += "x" * max(BODY - len(text) - len(tail), 0) + tail
            file.write(f'{{"custom_id":"item-{i}","method":"POST","url":"/v1/chat/completions","body":{text}}}\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        suite, plan = Path(folder) / "suite.jsonl", Path(folder) / "plan.json"
        write_suite(suite, args.requests)
        start = time.monotonic()
        done = subprocess.run([args.bin / "evalrt", "run", suite, "--dry-run", "--backend", "openai-url",
                               "--url", "http://127.0.0.1:9/v1", "--shard", f"0/{args.shards}",
                               "--json", plan], stdout=subprocess.PIPE, text=True)
        seconds = time.monotonic() - start
        if done.returncode:
            sys.exit("error: evalrt run --dry-run failed")
        print(done.stdout, end="", file=sys.stderr)
        figures = json.loads(plan.read_text())
    print(json.dumps(figures))
    measured = {"seconds": seconds,
                "megabytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
                / (1e6 if sys.platform == "darwin" else 1e3)}
    missed = False
    for name, (goal, words) in GOALS.items():
        ok = measured[name] <= goal
        missed |= not ok
        print(json.dumps({"benchmark": "dry-run", "figure": name, "value": round(measured[name], 2),
                          "goal": goal, "met": ok}))
        print(f"{words:<44}{measured[name]:>10.1f}  (at most {goal}){'' if ok else '  MISSED'}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
