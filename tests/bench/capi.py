#!/usr/bin/env python3
"""What a submit through the C interface costs the caller's thread, and whether memory stays flat.

    capi.py --bin DIR

10,000 requests of 1,000 bytes at once, in ten rounds, against nginx. JSON lines on stdout, a table
on stderr; exit code 1 if a goal is missed.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from client import Bench

GOALS = {"submit_us": (2, "CPU of the caller's thread a submit, us"),
         "grown_mb": (5, "memory after ten rounds, beside after one, MB")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        servers = Bench(args, Path(folder))
        try:
            done = subprocess.run([args.bin / "bench_capi", servers.nginx(), "10000", "10", "1000"],
                                  stdout=subprocess.PIPE, text=True)
        finally:
            servers.close()
    if done.returncode:
        sys.exit("error: bench_capi failed")
    got = json.loads(done.stdout)
    got["submit_us"] -= got["clock_us"]  # of looking at the clock
    missed = False
    for name, (goal, words) in GOALS.items():
        ok = got[name] <= goal
        missed |= not ok
        print(json.dumps({"benchmark": "capi", "figure": name, "value": round(got[name], 3),
                          "goal": goal, "met": ok}))
        print(f"{words:<50}{got[name]:>8.2f}  (at most {goal}){'' if ok else '  MISSED'}",
              file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
