"""Real engines: file order against planned, how near to the engine's own limit, and whether the
models of the engines (engines.py) prefill what the real ones do.

Every run has a fresh server, or one that forgot its prefixes. Some ten minutes on two cores; --long adds
fifty rows of BFCL on mlx_lm.server, one at a time as well: ten more.
"""
import argparse, json, os, random, subprocess, sys, tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from figures import Figures
from real_processes import Llama, NativeLlama, Vllm

SLOTS, CONTEXT = 8, 2048
# Tokens as a server's chat template makes them, and where its system prompt ends: what
# mlx_lm.server's own _tokenize() looks for.
TOKENS = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
def tokens(messages, **options):
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"])
for line in sys.stdin:
    messages = json.loads(line)["messages"]
    prompt = tokens(messages, add_generation_prompt=True)
    system = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
    end = 0
    if system:
        bare = tokens(messages[:system] + [{"role": "user", "content": ""}])
        end = next((i for i, (a, b) in enumerate(zip(bare, prompt)) if a != b), 0)
    print(json.dumps([prompt, end]))
"""


def groups():
    """12 groups of 4 questions, 900 shared tokens a group; the file goes round the groups."""
    words = random.Random(7)
    text = lambda n: " ".join(words.choice(("red", "blue", "tall", "river", "house", "seven", "walks", "under",
                                            "with", "bright", "stone", "evening")) for _ in range(n))
    heads = [f"You are assistant number {i}. Remember: {text(880)}." for i in range(12)]
    return [{"messages": [{"role": "system", "content": head},
                          {"role": "user", "content": f"Question {n}: tell a story about {text(8)}."}],
             "max_tokens": 64, "temperature": 0} for n in range(4) for head in heads]


class Bench:
    def __init__(self, args, folder):
        self.args, self.dir, self.figures, self.runs = args, folder, Figures("engines-real"), 0

    def figure(self, engine, suite, *figure, **more):
        self.figures.add(suite, engine, *figure, **more)

    def bfcl(self, category, limit):
        made = subprocess.run([self.args.bin / "bench_bodies", self.args.data, category, "prompt", "default_model"],
                              stdout=subprocess.PIPE, text=True, check=True).stdout
        bodies = [json.loads(line) for line in made.splitlines()[:limit]]
        for body in bodies:
            body.update(max_tokens=self.args.max_tokens, temperature=0)
            body.pop("store", None)
        return bodies

    def tokens(self, bodies):
        done = subprocess.run([self.args.python, "-c", TOKENS, self.args.model], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL, check=True, input="".join(json.dumps(b) + "\n" for b in bodies))
        return [json.loads(line) for line in done.stdout.splitlines()]

    def ask(self, bodies, where, *options):
        self.runs += 1
        path, out, told = (self.dir / f"{self.runs}.{end}" for end in ("jsonl", "out", "json"))
        path.write_text("".join(json.dumps({"custom_id": f"{i}", "url": "/v1/chat/completions", "body": body}) + "\n"
                                for i, body in enumerate(bodies)))
        done = subprocess.run([self.args.bin / "evalrt", "run", path, "-o", out, "--json", told, *where, *options],
                              stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"error: {done.stderr[-2000:]}")
        rows = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: int(row["custom_id"]))
        usage = [row["response"]["body"]["usage"] for row in rows]
        summary = json.loads(told.read_text())
        summary["outputs"] = [u["completion_tokens"] for u in usage]
        summary["prefilled"] = sum(u["prompt_tokens"] - (row["evalrt"]["cached_tokens"] or 0)
                                   for u, row in zip(usage, rows))
        sent = lambda it: it["queued_ms"] / 1000
        summary["times"] = [(sent(it), sent(it) + (it["first_text_ms"] or 0) / 1000, it["total_ms"] / 1000,
                             it["completion_tokens"]) for it in (row["evalrt"] for row in rows)]
        return summary

    def model(self, engine, suite, bodies, runs, name, again={}):
        """Prefilled tokens as the model of the engine has them, beside the real ones. Returns the least that a
        cache without limits needs, and what all prompts share. `again`: second runs of some policies, which tell
        how far the server itself repeats."""
        path, prompts = self.dir / "model.jsonl", self.tokens(bodies)
        for policy, real in runs.items():
            path.write_text("".join(
                json.dumps({"body": body, "tokens": tokens, "system_tokens": system, "output_tokens": n}) + "\n"
                for body, (tokens, system), n in zip(bodies, prompts, real["outputs"])))
            done = subprocess.run([self.args.bin / "bench_engines", path, name, policy], stdout=subprocess.PIPE,
                                  text=True, check=True)
            predicted = json.loads(done.stdout)
            ratio = predicted["prefilled"] / real["prefilled"]
            self.figure(engine, suite, f"{policy}: prefilled, model's / real", ratio, model=predicted["prefilled"],
                        real=real["prefilled"], least=predicted["bound_prefilled"], real_seconds=real["wall_seconds"],
                        model_seconds=round(predicted["seconds"], 1))
            own = abs(again[policy]["prefilled"] / real["prefilled"] - 1) if policy in again else None
            self.figure(engine, suite, f"{policy}: off by", abs(ratio - 1), 0.05, False,
                        **({} if own is None else {"limit": f"the server's own second run is off by {own:.3f}"}))
        shared = next((i for i, of in enumerate(zip(*(tokens for tokens, _ in prompts))) if len(set(of)) > 1), 0)
        return predicted["bound_prefilled"], shared

    def limit(self, engine, suite, run):
        """Achieved over what the rates that the run has seen would allow."""
        if not run["bound_seconds"]:
            return
        # After the last one was sent places stay empty: what was decoded then, at the rate of all places.
        sent = max(it[0] for it in run["times"])
        tail = run["wall_seconds"] - sent
        decoded = sum(tokens * max(end - max(first, sent), 0) / max(end - first, 1e-3)
                      for _, first, end, tokens in run["times"])
        busy = sum(max(end - sent, 0) for _, _, end, _ in run["times"]) / tail
        lost = max(tail - decoded / run["calibration"]["decode_tokens_per_second"], 0)
        self.figure(engine, suite, "at least needed / taken", run["bound_seconds"] / run["wall_seconds"], 0.75,
                    calibration=run["calibration"], in_flight=round(run["in_flight_mean"], 1),
                    limit=f"{tail:.1f} of {run['wall_seconds']:.1f} s after the last was sent, {busy:.1f} of "
                          f"{run['max_in_flight']} in flight: {run['bound_seconds'] / (run['wall_seconds'] - lost):.3f} "
                          "without what that cost")

    def mlx(self):
        engine = "mlx_lm.server"
        where = ["--backend", "mlx-server", "--executable", self.args.server, "--model", self.args.model]
        file_order = ["--order", "fifo", "--max-in-flight", "16"]
        bodies = groups()
        file, planned = self.ask(bodies, where, *file_order), self.ask(bodies, where)
        self.figure(engine, "groups", "16 in file order / planned", file["wall_seconds"] / planned["wall_seconds"], 1.5,
                    file=file["wall_seconds"], planned=planned["wall_seconds"])
        self.limit(engine, "groups", planned)
        # Which of the ten entries of its cache live in file order depends on the moment at which each request comes.
        again = {"file:16": self.ask(bodies, where, *file_order)} if self.args.long else {}
        self.model(engine, "groups", bodies, {"file:16": file, "planned": planned}, "mlx-cpu", again)
        if self.args.data and self.args.long:
            bodies = self.bfcl("simple_python", 50)
            one = self.ask(bodies, where, "--order", "fifo", "--max-in-flight", "1")
            file, planned = self.ask(bodies, where, *file_order), self.ask(bodies, where)
            self.figure(engine, "bfcl", "one at a time / planned", one["wall_seconds"] / planned["wall_seconds"], 3.3,
                        one=one["wall_seconds"], planned=planned["wall_seconds"])
            self.figure(engine, "bfcl", "16 in file order / planned", file["wall_seconds"] / planned["wall_seconds"],
                        1.05, file=file["wall_seconds"])
            self.limit(engine, "bfcl", planned)
            self.model(engine, "bfcl", bodies, {"file:1": one, "file:16": file, "planned": planned}, "mlx-cpu")

    def llama(self):
        self.llama_server("llama.cpp", lambda: Llama(self.args.llama, SLOTS, CONTEXT, cache=0, threads=0))

    def native_llama(self):
        folder, model = self.args.native_llama
        self.llama_server("llama.cpp native", lambda: NativeLlama(folder, model, SLOTS, CONTEXT, cache=0))

    def llama_server(self, engine, server):
        suites = {"groups": (groups(), 1.5)}
        if self.args.data:
            mixed = [self.bfcl(category, 12) for category in ("simple_python", "multiple", "parallel", "irrelevance")]
            suites["bfcl mixed"] = ([body | {"max_tokens": 64} for row in zip(*mixed) for body in row], 1.05)
        for suite, (bodies, goal) in suites.items():
            runs = {}
            for policy, options in ((f"file:{SLOTS}", ["--order", "fifo", "--max-in-flight", str(SLOTS)]), ("planned", [])):
                with server() as it:
                    runs[policy] = self.ask(bodies, ["--backend", "openai-url", "--url", it.wait().url], *options)
            file, planned = runs.values()
            least, shared = self.model(engine, suite, bodies, runs, f"llama:{SLOTS}:0")
            needed = least + (SLOTS - 1) * shared  # each slot has to compute it for itself
            self.figure(engine, suite, f"{SLOTS} in file order / planned", file["wall_seconds"] / planned["wall_seconds"],
                        goal, file=file["wall_seconds"], planned=planned["wall_seconds"],
                        limit=f"file order prefills {file['prefilled'] / needed:.3f} of what {SLOTS} slots need at least")
            self.limit(engine, suite, planned)

    def vllm(self):
        engine = "vllm"
        bodies = [body | {"max_tokens": 128, "model": "smol"} for body in self.bfcl("simple_python", 64)]
        with Vllm(*self.args.vllm) as server:
            where = ["--backend", "openai-url", "--url", server.wait().url]
            self.ask(bodies[:4], where)  # what its first requests cost is not theirs
            runs = {}
            for name, options in (("one", ["--order", "fifo", "--max-in-flight", "1"]), ("planned", []),
                                  ("64 in file order", ["--order", "fifo", "--max-in-flight", "64"])):
                server.forget()
                runs[name] = self.ask(bodies, where, *options)
        seconds = {name: run["wall_seconds"] for name, run in runs.items()}
        if needed := runs["planned"]["bound_seconds"]:
            seconds["limit"] = f"the engine's own rates allow {seconds['one'] / needed:.2f}"
        self.figure(engine, "bfcl", "one at a time / planned", seconds["one"] / seconds["planned"], 9, **seconds)
        self.figure(engine, "bfcl", "64 in file order / planned", seconds["64 in file order"] / seconds["planned"])
        self.limit(engine, "bfcl", runs["planned"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--server", required=True, help="mlx_lm.server")
    parser.add_argument("--python", required=True, help="one that has mlx_lm's packages")
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", required=True, help="a Python with xllamacpp")
    parser.add_argument("--data", type=Path, help="bfcl_eval's data")
    parser.add_argument("--native-llama", nargs=2, metavar=("FOLDER", "MODEL"), help="of llama-server's own build")
    parser.add_argument("--vllm", nargs=2, metavar=("PROGRAM", "MODEL"))
    parser.add_argument("--engine", action="append", choices=("mlx", "llama", "native_llama", "vllm"))
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer of BFCL")
    parser.add_argument("--long", action="store_true")
    args = parser.parse_args()
    os.environ["EVALRT_ENGINE_TOUCH_GB"] = "7"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        given = [name for name in ("mlx", "llama", "native_llama", "vllm") if getattr(args, name, True)]
        for engine in args.engine or given:
            getattr(bench, engine)()
        return bench.figures.table()


if __name__ == "__main__":
    sys.exit(main())
