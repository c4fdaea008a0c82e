#!/usr/bin/env python3
"""The smoke run's bookkeeping: what it asks for time to first token, and its report.

    smoke_report.py ttft-requests SUITE.jsonl OUT.jsonl
    smoke_report.py limit-requests DIR
    smoke_report.py report DIR --min-speedup X [--scores SEQUENTIAL.json BATCHED.json]

`report` reads what the two runs left in DIR, prints the comparison, writes DIR/report.json and
exits with 1 if something failed or the speed-up is too low. Standard library only.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

from coverage_words import not_complete, outcome


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def write_lines(path, rows):
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def ttft_requests(suite, out, pairs=6):
    """A request that fills the cache, then pairs: the suite's prefix as it is (warm), and the same
    prompt with its first words changed, which no cache can hold (cold)."""
    bodies = [row["body"] for row in lines(suite)[: pairs + 1]]
    rows = []

    def add(name, body, first_words=""):
        messages = json.loads(json.dumps(body["messages"]))
        messages[0]["content"] = first_words + messages[0]["content"]
        rows.append({"custom_id": name, "method": "POST", "url": "/v1/chat/completions",
                     "body": {"messages": messages, "temperature": 0, "max_tokens": 2}})

    add("prime", bodies[0])
    for i, body in enumerate(bodies[1:]):
        add(f"cold-{i}", body, f"Run {i}{i * 7919}. ")
        add(f"warm-{i}", body)
    write_lines(out, rows)


WORDS = ("river", "stone", "garden", "winter", "letter", "engine", "market", "silver", "window",
         "forest", "island", "summer", "bridge", "candle", "mirror", "harbor")


def limit_requests(folder):
    """As many requests as the server decodes at once, with prompts as long as the suite's that
    share nothing and go on for a while: what the engine can do when nothing keeps it from it."""
    run = json.loads((Path(folder) / "batched.json").read_text())
    width = min(32, run["max_in_flight"], run["requests"])
    length = max(40, (run["prompt_tokens"] or 0) // max(1, run["requests"]) - 40)
    rows = []
    for i in range(width):
        story = " ".join(WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(length))
        rows.append({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": {
            "messages": [{"role": "user", "content": f"Story {i}: {story}. Write a long story about it."}],
            "temperature": 0, "max_tokens": 64}})
    write_lines(Path(folder) / "limit-requests.jsonl", rows)


def engine_limit(folder, before, after):
    """The time in which the engine could at best have answered the suite: every token that no cache
    could hold prefilled once, every output token decoded at the full width."""
    wave = measured(folder / "limit.jsonl")
    pace = [row for name, row in measured(folder / "ttft.jsonl").items() if name.startswith("cold")]
    if not wave or not pace or not before["wall_seconds"]:
        return None
    if None in (after["prompt_tokens"], after["completion_tokens"], after["cached_tokens"]["maximum"]):
        return None
    # The last to begin is not held up by anybody's prefill.
    last = max(wave.values(), key=lambda row: row["queued_ms"] + row["first_text_ms"])
    if last["completion_tokens"] < 2:
        return None
    step = (last["total_ms"] - last["queued_ms"] - last["first_text_ms"]) / (last["completion_tokens"] - 1)
    decode = len(wave) * 1000 / step
    prefill = median([1000 * row["prompt_tokens"] / row["first_text_ms"] for row in pace])
    cold = after["prompt_tokens"] - after["cached_tokens"]["maximum"]
    seconds = cold / prefill + after["completion_tokens"] / decode
    return {"seconds": round(seconds, 2), "speedup": round(before["wall_seconds"] / seconds, 3),
            "width": len(wave), "decode_tokens_per_second": round(decode, 1),
            "prefill_tokens_per_second": round(prefill, 1)}


def measured(path):
    """The figures of the requests that were answered with a token count and a first token."""
    if not path.exists():
        return {}
    return {row["custom_id"]: row["evalrt"] for row in lines(path) if row["error"] is None
            and row["evalrt"]["first_text_ms"] and row["evalrt"]["prompt_tokens"]
            and row["evalrt"]["completion_tokens"]}


def answers(folder):
    """What was answered in one run: {id: answer}. Items that failed are missing."""
    found = {}
    for path in sorted(Path(folder).rglob("*_result.json")):
        for row in lines(path):
            found[row["id"]] = row["result"]
    out = Path(folder) / "out.jsonl"
    if out.exists():
        for row in lines(out):
            if row["error"] is None:
                message = row["response"]["body"]["choices"][0]["message"]
                found[row["custom_id"]] = [message.get("content"), message.get("tool_calls")]
    return found


def without_ids(answer):
    """Tool calls carry random ids: they are no difference."""
    if isinstance(answer, dict):
        return {key: without_ids(value) for key, value in answer.items() if key != "id"}
    return [without_ids(value) for value in answer] if isinstance(answer, list) else answer


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def ttft(folder):
    rows = measured(folder / "ttft.jsonl")
    return tuple(median(row["first_text_ms"] for name, row in rows.items() if name.startswith(kind))
                 for kind in ("cold", "warm"))


def paired(before, after):
    """Exact McNemar test of two runs over the same items."""
    shared = [i for i in before["per_item"] if before["per_item"][i] is not None
              and after["per_item"].get(i) is not None]
    lost = [i for i in shared if before["per_item"][i] and not after["per_item"][i]]
    won = [i for i in shared if after["per_item"][i] and not before["per_item"][i]]
    n = len(lost) + len(won)
    tail = sum(math.comb(n, k) for k in range(min(len(lost), len(won)) + 1)) / 2**n if n else 1.0
    p_value = min(1.0, 2 * tail)
    share = [sum(bool(run["per_item"][i]) for i in shared) / len(shared) if shared else 0.0
             for run in (before, after)]
    if max(share) < 0.05:
        verdict = "not decidable"  # a model that fails everything cannot show a difference
    else:
        verdict = "within noise" if p_value >= 0.05 else "different"
    return {"sequential": share[0], "batched": share[1], "items": len(shared),
            "only_sequential_right": lost, "only_batched_right": won,
            "p_value": round(p_value, 4), "verdict": verdict}


def coverage(run):
    """What became of a run's items, as its summary says."""
    return {key: run[key] for key in ("requests", "answered", "failed", "failures", "not_run")}


def number(value, digits=0, unit=""):
    return "n/a" if value is None else f"{value:,.{digits}f}{unit}"


def report(folder, min_speedup, scores):
    folder = Path(folder)
    for name in ("sequential.json", "batched.json"):
        if not (folder / name).exists():
            sys.exit(f"error: {folder / name} is missing: scripts/eval-throughput-smoke.sh makes it")
    runs = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("sequential", "batched")}
    before, after = runs["sequential"], runs["batched"]
    first, second = answers(folder / "sequential"), answers(folder / "batched")
    shared = [i for i in first if i in second]
    different = [i for i in shared if without_ids(first[i]) != without_ids(second[i])]
    per_item = {name: json.loads(Path(path).read_text())["per_item"]
                for name, path in zip(("sequential", "batched"), scores or [])}
    equal = None
    if per_item:
        equal = sum(per_item["sequential"].get(i) == per_item["batched"].get(i) for i in shared)
    after["parity"] = {"checked": len(shared), "identical": len(shared) - len(different),
                       "equal_score": equal, "different": len(different), "ids": different}
    speedup = before["wall_seconds"] / after["wall_seconds"] if after["wall_seconds"] else None
    cold, warm = ttft(folder)
    out = {"sequential": before, "batched": after, "speedup": speedup and round(speedup, 3),
           "ttft_cold_ms": cold, "ttft_warm_ms": warm, "score": None,
           "engine_limit": engine_limit(folder, before, after)}
    if scores:
        score = out["score"] = paired(*(json.loads(Path(path).read_text()) for path in scores))
        score["of"] = max(before["requests"], after["requests"])
        score["coverage"] = {"sequential": coverage(before), "batched": coverage(after),
                             "complete": score["items"] == score["of"]}
    (folder / "report.json").write_text(json.dumps(out, indent=1) + "\n")

    rows = [("", "one at a time", "evalrt"),
            ("answered", *(f"{r['answered']} of {r['requests']}" for r in (before, after))),
            ("wall time", *(number(r["wall_seconds"], 1, " s") for r in (before, after))),
            ("output tokens/s", *(number(r["output_tokens_per_second"], 1) for r in (before, after))),
            ("in flight, mean", *(number(r["in_flight_mean"], 1) for r in (before, after))),
            ("time to first token, p50", *(number(r["ttft_ms"]["p50"], 0, " ms") for r in (before, after))),
            ("prompt tokens", *(number(r["prompt_tokens"]) for r in (before, after))),
            ("from the prefix cache", *(number(r["cached_tokens"]["actual"]) for r in (before, after)))]
    print()
    for row in rows:
        print(f"{row[0]:<26}{row[1]:>16}{row[2]:>16}")
    print()
    print(f"speed-up: {number(speedup, 2)}x", end="")
    if out["engine_limit"] and speedup:
        best = out["engine_limit"]
        print(f" (the engine's own limit is about {number(best['speedup'], 1)}x: "
              f"{best['decode_tokens_per_second']:.0f} tokens/s decoded {best['width']} at once, "
              f"{best['prefill_tokens_per_second']:.0f} prefilled)", end="")
    print()
    if cold and warm:
        print(f"time to first token at one in flight: {cold:,.0f} ms with a cold prefix, "
              f"{warm:,.0f} ms with a warm one ({cold / warm:.1f}x)")
    print(f"the same answer: {len(shared) - len(different)} of {len(shared)}"
          + (f" (different: {', '.join(different[:8])}{', ...' if len(different) > 8 else ''})"
             if different else ""))
    if out["score"]:
        score = out["score"]
        print(f"score: {score['sequential']:.1%} one at a time, {score['batched']:.1%} by evalrt, "
              f"on {score['items']} of {score['of']} items; p = {score['p_value']}: {score['verdict']}"
              + ("" if score["coverage"]["complete"] else
                 "; " + not_complete("one at a time " + outcome(before["requests"], before),
                                     "evalrt " + outcome(after["requests"], after))))
        for name, ids in (("only one at a time", score["only_sequential_right"]),
                          ("only by evalrt", score["only_batched_right"])):
            if ids:
                print(f"  right {name}: {', '.join(ids)}")
    print(f"report: {folder / 'report.json'}")

    failed = before["failed"] + after["failed"] + before["not_run"] + after["not_run"]
    if failed:
        print(f"error: {failed} requests were not answered: {before['failures']} {after['failures']}")
        return 1
    if speedup is None or speedup < min_speedup:
        print(f"error: the speed-up is below {min_speedup}")
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("ttft-requests")
    command.add_argument("suite")
    command.add_argument("out")
    command = commands.add_parser("limit-requests")
    command.add_argument("folder")
    command = commands.add_parser("report")
    command.add_argument("folder")
    command.add_argument("--min-speedup", type=float, default=3.0)
    command.add_argument("--scores", nargs=2, default=None)
    args = parser.parse_args()
    if args.command == "ttft-requests":
        return ttft_requests(args.suite, args.out)
    if args.command == "limit-requests":
        return limit_requests(args.folder)
    return report(args.folder, args.min_speedup, args.scores)


if __name__ == "__main__":
    sys.exit(main())
