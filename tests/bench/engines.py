"""How near the planner, the scheduler and the limiter come to the bound, on models of the engines.

The models (tests/support/engine_model.cpp) run in virtual time, so nothing here depends on the
machine. """
import argparse, json, os, random, subprocess, sys, tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from figures import Figures

SINGLE = ["simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance"]
LIVE = ["live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance"]
CLASSES = {"GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
           "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
           "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control"}
WIDTHS = {"vllm": (16, 32, 64, 96, 128, 192, 256), "sglang": (16, 32, 64, 96, 128, 192, 256),
          "mlx": (4, 8, 12, 16, 24, 32), "omlx": (2, 4, 8, 12), "llama": (2, 4, 8)}
BFCL_SYSTEM = "You are a helpful assistant."


class Words:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.list = ["".join(self.random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.random.randint(2, 9)))
                     for _ in range(4000)]

    def text(self, n):
        return " ".join(self.random.choice(self.list) for _ in range(max(1, n)))

    def spread(self, mean, sigma, least=1, most=4096):
        import math
        return int(min(most, max(least, self.random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def rows(data, name):
    return [json.loads(line) for line in (data / name).read_text().splitlines() if line.strip()]


def call(words, n):
    return '[{"name": "' + words.text(1) + '", "arguments": {"a": "' + words.text(max(1, n - 12)) + '"}}]'


def tools(functions):
    return [{"type": "function", "function": function} for function in functions]


def bfcl(data, categories, seed):
    """Single-turn rows, as function calling sends them; answers of about 55 tokens."""
    words = Words(seed)
    for category in categories:
        for row in rows(data, f"BFCL_v4_{category}.json"):
            messages = row["question"][0]
            if not messages or messages[0]["role"] != "system":
                messages = [{"role": "system", "content": BFCL_SYSTEM}] + messages
            yield {"body": {"messages": messages, "tools": tools(row["function"]), "max_tokens": 512},
                   "answer": call(words, words.spread(55, 0.5, most=400))}


def bfcl_turns(data, seed, limit=200):
    """Multi-turn rows: several calls a turn, results of the tools made up (about 70 tokens)."""
    words = Words(seed)
    docs = {name: rows(data / "multi_turn_func_doc", f"{file}.json") for name, file in CLASSES.items()}
    conversations = [row for name in ("multi_turn_base", "multi_turn_miss_param")
                     for row in rows(data, f"BFCL_v4_{name}.json")[:limit // 2]]
    out = []
    for row in conversations:
        functions = [{k: v for k, v in doc.items() if k != "response"} for name in row["involved_classes"]
                     for doc in docs[name] if doc["name"] not in row.get("excluded_function", [])]
        messages, turns = [{"role": "system", "content": BFCL_SYSTEM}], []
        calls = max(1, round(len(row.get("path") or [0] * 2 * len(row["question"])) / len(row["question"])))
        for question in row["question"]:
            messages = messages + (question or [{"role": "user", "content": "go on"}])
            for _ in range(calls + 1):
                answer = call(words, words.spread(40, 0.4, 16, 200))
                turns.append((messages, answer))
                messages = messages + [{"role": "assistant", "content": answer},
                                       {"role": "tool", "content": words.text(words.spread(70, 0.8) // 2)}]
        out.append((functions, turns))
    for i, (functions, turns) in enumerate(out):
        for n, (messages, answer) in enumerate(turns):
            yield {"body": {"messages": messages, "tools": tools(functions), "max_tokens": 512},
                   "answer": answer, "session": f"c{i}", "turn": n}


def few_shot(seed, subjects=48, questions=20):
    """A subject's examples (about 1,800 tokens) before each of its questions; the file goes round the
    subjects, so that together they exceed any cache here."""
    words = Words(seed)
    heads = [words.text(900) for _ in range(subjects)]
    length = [words.spread(40, 0.8, 8, 200) for _ in range(subjects)]
    for _ in range(questions):
        for head, n in zip(heads, length):
            yield {"body": {"messages": [{"role": "system", "content": head},
                                         {"role": "user", "content": words.text(words.spread(60, 0.5, 8) // 2)}], "max_tokens": 256},
                   "answer": words.text(words.spread(n, 0.4, 4, 256) // 2)}


def tau(seed, tasks=120):
    """Two domains with a policy and tools (about 4,000 tokens), some ten turns of a customer or a tool."""
    words = Words(seed)
    domains = [(words.text(1200), [{"name": words.text(1), "description": words.text(25),
                                    "parameters": {"type": "object", "properties": {words.text(1): {"type": "string"}}}}
                                   for _ in range(16)]) for _ in range(2)]
    for i in range(tasks):
        policy, functions = domains[i % 3 == 0]
        messages = [{"role": "system", "content": policy}, {"role": "user", "content": words.text(20)}]
        for n in range(max(3, int(words.random.gauss(11, 3)))):
            answer = words.text(words.spread(45, 0.6, 8, 300) // 2)
            yield {"body": {"messages": messages, "tools": tools(functions), "max_tokens": 512},
                   "answer": answer, "session": f"t{i}", "turn": n}
            messages = messages + [{"role": "assistant", "content": answer},
                                   {"role": words.random.choice(["tool", "user"]), "content": words.text(words.spread(60, 0.9, 4, 600) // 2)}]


class Bench:
    def __init__(self, args, folder):
        self.args, self.dir, self.figures = args, folder, Figures("engines")
        self.figure = self.figures.add

    def suites(self):
        data = self.args.data
        made = {"few-shot": few_shot(1), "tau-like": tau(2)}
        if data:
            made = {"bfcl single": bfcl(data, SINGLE, 3), "bfcl live": bfcl(data, LIVE, 4),
                    "bfcl multi-turn": bfcl_turns(data, 5)} | made
        for name, lines in made.items():
            path = self.dir / (name.replace(" ", "-") + ".jsonl")
            with open(path, "w") as out:
                for line in lines:
                    out.write(json.dumps(line, separators=(",", ":")) + "\n")
            yield name, path

    def run(self, suite, engine, *policies):
        done = subprocess.run([self.args.bin / "bench_engines", suite, engine, *policies], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"error: bench_engines {suite} {engine} failed")
        return {row["policy"]: row for row in map(json.loads, done.stdout.splitlines())}

    def compare(self, suite, path, engine):
        turns = suite in ("bfcl multi-turn", "tau-like")
        widths = WIDTHS[engine]
        got = self.run(path, engine, "planned", *[f"{p}:{n}" for n in widths for p in ("planned", "file")])
        auto = got["planned"]
        ratio = auto["prefilled"] / auto["bound_prefilled"]
        most = {"vllm": 1.05, "sglang": 1.05, "mlx": 1.05, "omlx": 1.4, "llama": None if turns else 1.25}[engine]
        limit = {}
        if engine == "mlx" and ratio > most:  # the same plan, and only the cache is another
            other = self.run(path, "mlx:32:64", "planned")["planned"]
            limit = {"limit": f"its 10 entries: with 64 {other['prefilled'] / other['bound_prefilled']:.3f}"}
        self.figure(suite, engine, "prefilled / trie bound", ratio, most, False, prefilled=auto["prefilled"], **limit)
        paged = engine in ("vllm", "sglang")
        most = (1.30 if turns else 1.10) if paged else 1.5 if engine == "mlx" and not turns else None
        self.figure(suite, engine, "makespan / lower bound", auto["seconds"] / auto["bound_seconds"], most, False,
                    seconds=round(auto["seconds"], 2), in_flight=round(auto["in_flight_mean"], 1))
        # At the same number in flight; where file order computes much twice, its prefixes exceed the cache.
        gains = {n: got[f"file:{n}"]["seconds"] / got[f"planned:{n}"]["seconds"] for n in widths}
        n = {"vllm": 64, "sglang": 64, "mlx": 16, "omlx": 8, "llama": 4}[engine]
        wasted = got[f"file:{n}"]["prefilled"] / auto["bound_prefilled"]
        exceeds = wasted > 3
        self.figure(suite, engine, f"file order / planned, {n} in flight", gains[n], 1.3 if exceeds else 0.98,
                    file_prefilled=round(wasted, 3))
        least = min(gains, key=gains.get)
        limit = {}
        if engine == "llama" and gains[least] < 0.98:
            other = self.run(path, "llama:4:0", f"file:{least}", f"planned:{least}")
            gain = other[f"file:{least}"]["seconds"] / other[f"planned:{least}"]["seconds"]
            limit = {"limit": f"{least} in flight for 4 slots; file order has all prefixes from the host's memory for "
                              f"nothing: without it {gain:.3f}"}
        self.figure(suite, engine, "the least of these, at any number", gains[least], 0.98, in_flight=least, **limit)
        best = min(widths, key=lambda n: got[f"planned:{n}"]["seconds"])
        self.figure(suite, engine, "in flight found by itself / best fixed", auto["seconds"] / got[f"planned:{best}"]["seconds"],
                    1.10, False, best=best, found=auto["limit"], after_fifth=auto["limit_after_fifth"],
                    wanders=[auto["limit_least"], auto["limit_most"]], real_seconds=round(auto["real_seconds"], 3))

    def limiter(self):
        """200 requests: the number in flight must be found in the first fifth."""
        for name, path in self.suites():
            if "multi" in name or "tau" in name:
                continue
            lines = path.read_text().splitlines()
            random.Random(1).shuffle(lines)
            short = self.dir / "short.jsonl"
            short.write_text("\n".join(lines[:200]) + "\n")
            for engine, widths in WIDTHS.items():
                got = self.run(short, engine, "planned", *[f"planned:{n}" for n in widths])
                best = min(row["seconds"] for key, row in got.items() if ":" in key)
                auto = got["planned"]
                self.figure(name, engine, "200 requests: found by itself / best fixed", auto["seconds"] / best, 1.10, False,
                            found=auto["limit"], after_fifth=auto["limit_after_fifth"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="bfcl_eval's data; without it only the generated suites")
    parser.add_argument("--engine", action="append", choices=list(WIDTHS))
    parser.add_argument("--suite", action="append")
    args = parser.parse_args()
    if not args.data:  # where scripts/test.sh real has put it
        found = sorted(Path(os.environ.get("EVALRT_CACHE", "/nowhere")).glob("engine/lib/*/site-packages/bfcl_eval/data"))
        args.data = found[0] if found else None
        if not found:
            print("without BFCL's rows: scripts/test.sh real installs them", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for name, path in bench.suites():
            if args.suite and name not in args.suite:
                continue
            for engine in args.engine or WIDTHS:
                bench.compare(name, path, engine)
        if not args.suite:
            bench.limiter()
        return bench.figures.table()


if __name__ == "__main__":
    sys.exit(main())
