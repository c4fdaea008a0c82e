"""Two real llama.cpp servers: alone, as two --url of evalrt, and behind a real sglang-router, in one run.

    replicas.py --bin DIR --llama PYTHON_WITH_XLLAMACPP --router PROGRAM

Each way the same suite of questions with prefixes in common, and servers that have just been started. A
server has one thread, so that two of them have two processors. JSON lines on stdout, a table on stderr;
exit code 1 if a goal is missed.
"""
import argparse, json, subprocess, sys, tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "real")]
from real_processes import Llama, Router
from router import suite

GROUPS, EACH = 12, 6


class Way:
    def __init__(self, name, servers, policy=None, more=()):
        self.name, self.servers, self.policy, self.more = name, servers, policy, more


WAYS = [
    Way("one server", 1),
    Way("two --url", 2),
    Way("router, cache_aware", 2, "cache_aware"),
    Way("router, cache_aware, file order", 2, "cache_aware", ("--order", "fifo")),
    Way("router, round_robin", 2, "round_robin"),
]


def run(way, args, folder):
    servers, router = [], None
    try:
        servers = [Llama(args.llama) for _ in range(way.servers)]
        for it in servers:
            it.wait()
        urls = [it.url for it in servers]
        if way.policy:
            router = Router([it.port for it in servers], "--policy", way.policy, program=args.router)
            urls = [router.url]
        done = subprocess.run([args.bin / "evalrt", "run", folder / "suite", "-o", folder / "out", "--quiet",
                               "--backend", "openai-url", *(part for url in urls for part in ("--url", url)),
                               "--json", folder / "summary", *way.more], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {way.name}: {done.stderr}")
        summary = json.loads((folder / "summary").read_text())
    finally:
        for it in [*servers, *([router] if router else [])]:
            it.kill()
    cached = summary["cached_tokens"]["actual"]
    return {"benchmark": "replicas", "way": way.name, "requests_per_second": summary["requests_per_second"],
            "seconds": summary["wall_seconds"], "prefilled_tokens": summary["prompt_tokens"] - cached,
            "cached_tokens": cached, "in_flight_mean": summary["in_flight_mean"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--llama", required=True)
    parser.add_argument("--router", required=True)
    args = parser.parse_args()
    rows = {}
    print(f"{'':34}{'requests/s':>12}{'wall, s':>10}{'prefilled':>11}{'cached':>9}{'in flight':>11}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "suite").write_text("\n".join(suite(GROUPS, EACH)) + "\n")
        for way in WAYS:
            row = rows[way.name] = run(way, args, folder)
            print(json.dumps(row), flush=True)
            print(f"{way.name:34}{row['requests_per_second']:12.2f}{row['seconds']:10.1f}{row['prefilled_tokens']:11,}"
                  f"{row['cached_tokens']:9,}{row['in_flight_mean']:11.1f}", file=sys.stderr, flush=True)
    one, two, robin = rows["one server"], rows["two --url"], rows["router, round_robin"]
    behind = rows["router, cache_aware"]
    missed = False
    for figure, value, goal, at_least in (
            ("two --url / one server: requests/s", two["requests_per_second"] / one["requests_per_second"], 1.3, True),
            ("two --url / one server: prefilled tokens", two["prefilled_tokens"] / one["prefilled_tokens"], 1.2, False),
            ("router, cache_aware / two --url: requests/s",
             behind["requests_per_second"] / two["requests_per_second"], None, True),
            ("router, cache_aware / round_robin: prefilled tokens",
             behind["prefilled_tokens"] / robin["prefilled_tokens"], 1.0, False)):
        met = goal is None or (value >= goal if at_least else value <= goal)
        missed |= not met
        print(json.dumps({"benchmark": "replicas", "figure": figure, "value": round(value, 3), "goal": goal, "met": met}))
        words = "" if goal is None else f"  ({'at least' if at_least else 'at most'} {goal}){'' if met else '  MISSED'}"
        print(f"{figure:56}{value:8.2f}{words}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
