#!/usr/bin/env python3
"""check_report.py REPORT.json CASES: does the smoke run's report hold together?"""

import json
import sys

report = json.load(open(sys.argv[1], encoding="utf-8"))
cases = int(sys.argv[2])
checks = failures = 0


def check(what, good):
    global checks, failures
    checks += 1
    if not good:
        failures += 1
        print(f"FAILED: {what}")


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


for name in ("sequential", "batched"):
    run = report[name]
    cached = run["cached_tokens"]
    check(f"{name}: every case is answered", (run["requests"], run["answered"]) == (cases, cases))
    check(f"{name}: nothing failed", run["failed"] == run["not_run"] == 0 and run["failures"] == {})
    check(f"{name}: the server's token counts are there",
          run["prompt_tokens"] > 100 * cases and run["completion_tokens"] > 0)
    check(f"{name}: the shared prefix came from the cache", 0 < cached["actual"] < run["prompt_tokens"])
    check(f"{name}: times are measured",
          all(number(run[key][q]) and run[key][q] > 0 for key in ("ttft_ms", "inter_token_ms")
              for q in ("p50", "p90", "p99")))
    check(f"{name}: throughput is tokens by time", abs(
        run["output_tokens_per_second"] - run["completion_tokens"] / run["wall_seconds"]) < 0.1)
    check(f"{name}: the bound is computed and not beaten",
          run["bound_seconds"] > 0 and run["ratio_to_bound"] > 0.9)
    check(f"{name}: the backend is named", run["backend"] == "mlx-server" and run["server_version"])
check("sequential means one in flight", report["sequential"]["max_in_flight"] == 1
      and report["sequential"]["in_flight_mean"] <= 1.001)
check("batched means several in flight", report["batched"]["in_flight_mean"] > 2)
cached = report["batched"]["cached_tokens"]
check("no cache can hold more than the maximum", cached["actual"] <= cached["maximum"] + cases)
check("the plan expects no more than the maximum", cached["expected"] <= cached["maximum"])
check("the speed-up is the ratio of the times", abs(
    report["speedup"] - report["sequential"]["wall_seconds"] / report["batched"]["wall_seconds"]) < 0.01)
parity = report["batched"]["parity"]
check("parity adds up", parity["checked"] == cases
      and parity["identical"] + parity["different"] == cases and len(parity["ids"]) == parity["different"])
check("a warm prefix is faster than a cold one", report["ttft_warm_ms"] < report["ttft_cold_ms"])
check("without --score there is no score", report["score"] is None)
print(f"{checks - failures} passed, {failures} failed")
sys.exit(1 if failures else 0)
