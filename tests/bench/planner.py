#!/usr/bin/env python3
"""What planning costs, beside one pass over the same bytes, in interleaved rounds.

    planner.py --bin DIR [--rounds N] [--bfcl FOLDER]

JSON lines on stdout, a table on stderr; exit code 1 if a goal is missed. Figures are medians.
"""
import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# suite: (arguments, goals)
SUITES = {
    "shared": (["groups", "20000", "6600", "6000"], {"ns_per_byte": 0.25, "memory_ratio": 1.1}),
    "many": (["groups", "100000", "3000", "2400"], {"seconds": 1.0}),
    "bfcl": (None, {"ns_per_byte": 0.5, "memory_ratio": 1.1}),
}
CATEGORIES = ["simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance",
              "live_simple", "live_multiple", "live_parallel", "live_irrelevance"]


def bfcl_rows(folder, path):
    """Prompts of real single-turn rows: functions as JSON, then the question."""
    with open(path, "w", encoding="utf-8") as out:
        for name in CATEGORIES:
            for file in sorted(folder.glob(f"BFCL_v*_{name}.json")):
                for line in file.read_text(encoding="utf-8").splitlines():
                    row = json.loads(line)
                    out.write(json.dumps(row.get("function", [])) + json.dumps(row["question"]) + "\n")
    return path.stat().st_size > 0


def bfcl_folder(given):
    if given:
        return given
    spec = importlib.util.find_spec("bfcl_eval")
    if spec and spec.origin:
        return Path(spec.origin).parent / "data"
    cache = Path(os.environ.get("EVALRT_CACHE", Path.home() / ".cache/evalrt"))  # the smoke run's
    return next(iter(cache.glob("engine/lib/python*/site-packages/bfcl_eval/data")), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bfcl", type=Path, help="bfcl_eval's data folder (default: of this python)")
    args = parser.parse_args()
    bench, missed = str(args.bin / "bench_planner"), False
    with tempfile.TemporaryDirectory() as scratch:
        folder, rows = bfcl_folder(args.bfcl), Path(scratch) / "bfcl.txt"
        if folder and folder.is_dir() and bfcl_rows(folder, rows):
            SUITES["bfcl"] = (["file", str(rows)], SUITES["bfcl"][1])
        else:
            print("bfcl: skipped, bfcl_eval is not installed (--bfcl FOLDER)", file=sys.stderr)
        results = {name: [] for name, (argv, _) in SUITES.items() if argv}
        for _ in range(args.rounds):
            for name in results:
                done = subprocess.run([bench, *SUITES[name][0]], stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    sys.exit(f"error: {bench} {name} failed")
                print(done.stdout, end="", flush=True)
                results[name].append(json.loads(done.stdout))
    for name, runs in results.items():
        median = lambda key: statistics.median(run[key] for run in runs)
        print(f"{name}: {runs[0]['requests']} requests, {runs[0]['bytes'] / 1e6:.0f} MB, "
              f"{median('ns_per_request'):.0f} ns a request, {median('by_read'):.1f} times as long as "
              f"reading the bytes once, {median('by_bound'):.1f} times as long as that and having the "
              f"memory it takes", file=sys.stderr)
        for key, goal in SUITES[name][1].items():
            value, ok = median(key), median(key) <= goal
            missed |= not ok
            print(json.dumps({"benchmark": "planner", "suite": name, "figure": key,
                              "value": round(value, 4), "goal": goal, "met": ok}))
            print(f"  {key:<30}{value:>10.3f}  (at most {goal}){'' if ok else '  MISSED'}",
                  file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
