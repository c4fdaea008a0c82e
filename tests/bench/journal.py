#!/usr/bin/env python3
"""What the journal costs, against the same requests without it, in interleaved rounds.

    journal.py --bin DIR [--rounds N]

JSON lines on stdout, a table on stderr; exit code 1 if a goal is missed. Times are medians.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from client import Bench

# What a sample may cost beside a request of some 25 us, and what must not be noticed.
GOALS = {"cpu_us": (12, "CPU of a sample, us"), "file_ratio": (1.3, "file size by the answers' bytes"),
         "ready_seconds": (1.0, "100,000 items: open and decide, s"),
         "lost_rate": (0.15, "share of the client's rate, 64 in flight")}

# Takes a share of one processor, in bursts as the journal's thread does for its groups.
BUSY = """
import hashlib, sys, time
share, bytes = float(sys.argv[1]), b"x" * 4096
while True:
    end = time.thread_time() + 0.002
    while time.thread_time() < end: hashlib.sha256(bytes)
    time.sleep(0.002 * (1 / share - 1))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    bench = str(args.bin / "bench_journal")
    memory, rates, beside = [], [], []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        def run(argv):
            done = subprocess.run(argv, cwd=folder, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"error: {' '.join(argv)} failed")
            print(done.stdout, end="", flush=True)
            return json.loads(done.stdout)

        bench_servers = Bench(args, Path(folder))
        try:
            url = bench_servers.nginx()
            for _ in range(args.rounds):
                memory.append(run([bench, "memory", "100000"]))
                # A process each: the memory of the first is no burden for the second. The journal's
                # thread goes where there is room.
                kept = run([bench, "journal", url, "30000", "64"])
                plain = run([bench, "plain", url, "30000", "64"])
                rates.append(kept["rate"] / plain["rate"])
                # Without a journal, beside a stranger that takes as much as the journal's thread.
                share = (kept["cpu_us"] - kept["of_the_client_us"]) * kept["rate"] / 1e6
                stranger = subprocess.Popen([sys.executable, "-c", BUSY, str(min(share, 1))])
                try:
                    beside.append(run([bench, "plain", url, "30000", "64"])["rate"] / plain["rate"])
                finally:
                    stranger.kill()
                    stranger.wait()
        finally:
            bench_servers.close()
    median = {"cpu_us": statistics.median(it["cpu_us"] for it in memory),
              "file_ratio": statistics.median(it["file_ratio"] for it in memory),
              "ready_seconds": statistics.median(it["open_seconds"] + it["decide_seconds"] for it in memory),
              "lost_rate": 1 - statistics.median(rates)}
    limit = f"{1 - statistics.median(beside):.3f} are lost beside any process as busy as the journal's thread"
    missed = False
    for name, (goal, words) in GOALS.items():
        ok = median[name] <= goal
        missed |= not ok
        print(json.dumps({"benchmark": "journal", "figure": name, "value": round(median[name], 4),
                          "goal": goal, "met": ok} | ({"limit": limit} if name == "lost_rate" else {})))
        print(f"{words:<44}{median[name]:>10.3f}  (at most {goal}){'' if ok else '  MISSED'}",
              file=sys.stderr)
        if name == "lost_rate":
            print(f"  {limit}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
