"""What the HTTP client costs: against wrk, libcurl and the packets alone, in interleaved rounds.

Servers run on one processor and clients on another. The ratio is taken within a round; the figure
is the median of the rounds in which nothing else used the machine.
"""
import argparse, json, os, re, shutil, statistics, subprocess, sys, tempfile, time
from pathlib import Path

IN_FLIGHT = 64
PROMPT_BYTES = 3900
FOREIGN_LIMIT = 0.2  # of one processor
TICK = os.sysconf("SC_CLK_TCK")
LINUX = sys.platform == "linux"

ANSWER = json.dumps({
    "id": "chatcmpl-0123456789", "object": "chat.completion", "created": 1700000000, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 170},
                 "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 900, "completion_tokens": 170, "total_tokens": 1070}})

NGINX = """
daemon off; master_process off; worker_processes 1; pid %(dir)s/nginx.pid; error_log stderr crit;
events { worker_connections 1024; }
http {
  access_log off; keepalive_requests 100000000; client_body_buffer_size 64k;
  client_body_temp_path %(dir)s/a; proxy_temp_path %(dir)s/b; fastcgi_temp_path %(dir)s/c;
  uwsgi_temp_path %(dir)s/d; scgi_temp_path %(dir)s/e;
  server { listen 127.0.0.1:%(port)d; location / { default_type application/json; return 200 '%(answer)s'; } }
}
"""

POST_LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer sk-bench"
wrk.body = io.open(%r):read("*a")
"""


def on_cpu(n, argv):
    if LINUX and os.cpu_count() > 1:
        return ["taskset", "-c", str(n)] + argv
    return argv


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def busy_seconds():
    """Of all processors; what interrupts take is nobody's."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (fields[0] + fields[1] + fields[2]) / TICK


def process_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def children_seconds():
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


class Quiet:
    """How much of a processor others used meanwhile."""

    def __init__(self, servers):
        self.pids = [server.pid for server in servers]

    def own(self):
        return children_seconds() + sum(process_seconds(pid) for pid in self.pids)

    def __enter__(self):
        self.foreign = 0.0
        if LINUX:
            self.start = time.monotonic(), busy_seconds(), self.own()
        return self

    def __exit__(self, *_):
        if LINUX:
            wall, busy, own = self.start
            self.foreign = max(0.0, (busy_seconds() - busy - (self.own() - own)) / (time.monotonic() - wall))


class Bench:
    name = "client"

    def __init__(self, args, folder):
        self.args, self.dir, self.rows, self.servers = args, folder, [], []
        self.bin = args.bin
        self.client = str(self.bin / "bench_client")

    def start(self, argv, **kwargs):
        server = subprocess.Popen(on_cpu(0, argv), **kwargs)
        self.servers.append(server)
        return server

    def server(self, *argv):
        server = self.start([str(self.bin / "bench_server"), *map(str, argv)], stdout=subprocess.PIPE, text=True)
        return f"http://127.0.0.1:{int(server.stdout.readline())}/v1"

    def nginx(self):
        port, folder = free_port(), self.dir / f"nginx-{len(self.servers)}"
        folder.mkdir()
        conf = folder / "nginx.conf"
        conf.write_text(NGINX % {"dir": folder, "port": port, "answer": ANSWER})
        self.start(["nginx", "-c", str(conf), "-p", str(folder)])
        import socket
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return f"http://127.0.0.1:{port}/v1"
            except OSError:
                time.sleep(0.05)
        sys.exit("error: nginx does not listen")

    def close(self):
        for server in self.servers:
            server.terminate()
            server.wait()

    def run(self, argv, cpu=1):
        done = subprocess.run(on_cpu(cpu, argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"error: {' '.join(argv)} failed: {done.stderr.strip()}")
        return done.stdout

    def ours(self, what, url, count, in_flight=IN_FLIGHT, prompt=PROMPT_BYTES):
        got = json.loads(self.run([self.client, what, url, str(count), str(in_flight), str(prompt)]))
        return {"rate": got["done"] / got["seconds"], "cpu_us": got["cpu_seconds"] / got["done"] * 1e6} | got

    def curl(self, url, count):
        got = json.loads(self.run([str(self.bin / "bench_curl"), url, str(count), str(IN_FLIGHT), str(PROMPT_BYTES)]))
        return {"rate": got["done"] / got["seconds"], "cpu_us": got["cpu_seconds"] / got["done"] * 1e6}

    def wrk(self, url):
        body = self.dir / "body.json"
        body.write_text(json.dumps({"model": "m", "messages": [{"role": "user", "content": "w" * (PROMPT_BYTES - 70)}]}))
        lua = self.dir / "post.lua"
        lua.write_text(POST_LUA % str(body))
        before = children_seconds()
        out = self.run(["wrk", "-t1", f"-c{IN_FLIGHT}", "-d1s", "-s", str(lua), url + "/chat/completions"])
        if "Non-2xx" in out:
            sys.exit("error: wrk was refused: " + out)
        requests = int(re.search(r"(\d+) requests in", out)[1])
        return {"rate": float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1]),
                "cpu_us": (children_seconds() - before) / requests * 1e6}

    def rounds(self, contenders):
        """The rounds without foreign load, each a dict of what the contenders did."""
        kept, dropped, noisy = [], 0, []
        while len(kept) < self.args.rounds and dropped < 4 * self.args.rounds:
            result = {}
            with Quiet(self.servers) as quiet:
                for name, run in contenders.items():
                    result[name] = run()
            if quiet.foreign > FOREIGN_LIMIT:
                dropped += 1
                noisy.append((quiet.foreign, result))
            else:
                kept.append(result)
        if len(kept) < self.args.rounds:  # say so, and take the least disturbed
            noisy.sort(key=lambda it: it[0])
            kept += [result for _, result in noisy[:self.args.rounds - len(kept)]]
            self.note = f"the machine was busy: {dropped} rounds had foreign load"
            print(self.note, file=sys.stderr)
        return kept, dropped

    def figure(self, name, value, goal=None, at_least=True, unit="", **more):
        good = None if goal is None or value is None else (value >= goal if at_least else value <= goal)
        row = {"benchmark": self.name, "figure": name, "value": value, "unit": unit, "goal": goal,
               "at_least": at_least if goal is not None else None, "good": good} | more
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def median(self, name, rounds, value, goal=None, at_least=True, unit="", dropped=0):
        values = [value(it) for it in rounds]
        self.figure(name, round(statistics.median(values), 3), goal, at_least, unit,
                    least=round(min(values), 3), most=round(max(values), 3), rounds=len(values), dropped=dropped)

    def table(self):
        for row in self.rows:
            goal = ("" if row["goal"] is None else f"{'>=' if row['at_least'] else '<='} {row['goal']:g}")
            spread = f"[{row['least']:g} .. {row['most']:g}]" if "least" in row else ""
            value = "n/a" if row["value"] is None else f"{row['value']:g}"
            verdict = {True: "ok", False: "MISSED", None: ""}[row["good"]]
            print(f"{row['figure']:<58} {value:>10} {row['unit']:<12} {goal:<10} {verdict:<7} {spread}", file=sys.stderr)

    # The parts.

    def throughput(self):
        url, count = self.nginx(), self.args.requests
        contenders = {"wrk": lambda: self.wrk(url),
                      "scheduler": lambda: self.ours("scheduler", url, count),
                      "http": lambda: self.ours("http", url, count)}
        has_curl = (self.bin / "bench_curl").exists()
        if has_curl:
            contenders["curl"] = lambda: self.curl(url, count // 2)
        rounds, dropped = self.rounds(contenders)
        for name in contenders:
            self.median(f"{name}: requests/s", rounds, lambda r: r[name]["rate"], dropped=dropped)
            self.median(f"{name}: CPU a request", rounds, lambda r: r[name]["cpu_us"], unit="us",
                        goal=26 if name in ("scheduler", "http") else None, at_least=False)
        for name in ("scheduler", "http"):
            self.median(f"{name} / wrk: requests/s", rounds, lambda r: r[name]["rate"] / r["wrk"]["rate"], 0.60)
            if has_curl:
                self.median(f"{name} / libcurl: requests/s", rounds, lambda r: r[name]["rate"] / r["curl"]["rate"], 1.4)

    def instructions(self):
        if not shutil.which("valgrind"):
            return self.figure("instructions a request: valgrind is not here", None)
        url = self.nginx()
        for what in ("scheduler", "http"):
            counts = []
            for n in (1000, 3000):
                argv = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", self.client, what, url,
                        str(n), str(IN_FLIGHT), str(PROMPT_BYTES)]
                done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                counts.append(int(re.search(r"Collected : (\d+)", done.stderr)[1]))
            self.figure(f"{what}: instructions a request", (counts[1] - counts[0]) // 2000, 75_000, False)

    def calls(self):
        if not shutil.which("strace"):
            return self.figure("system calls a request: strace is not here", None)
        url, out = self.nginx(), self.dir / "strace"
        names = ("sendmsg", "recvmsg", "recvfrom", "epoll_wait")
        for what in ("scheduler", "http"):
            counts = []
            for n in (1000, 3000):
                self.run(["strace", "-f", "-c", "-e", "trace=" + ",".join(names), "-o", str(out), self.client, what, url,
                          str(n), str(IN_FLIGHT), str(PROMPT_BYTES)])
                found = {words[-1]: int(words[3]) for words in map(str.split, out.read_text().splitlines())
                         if words and words[-1] in names}
                counts.append(found)
            each = {name: (counts[1].get(name, 0) - counts[0].get(name, 0)) / 2000 for name in names}
            self.figure(f"{what}: sendmsg a request", each["sendmsg"], 1, False)
            # One of them looks whether a kept connection still stands, and has nothing to say.
            self.figure(f"{what}: recv a request", each["recvmsg"] + each["recvfrom"])
            self.figure(f"{what}: epoll_wait a request", each["epoll_wait"])

    def streams(self):
        url, count = self.server("stream", 64), self.args.requests // 12
        rounds, dropped = self.rounds({what: (lambda what=what: self.ours(what, url, count))
                                       for what in ("bytes", "scheduler", "http")})
        for what in ("bytes", "scheduler", "http"):
            self.median(f"{what}: streams/s (64 events, one by one)", rounds, lambda r: r[what]["rate"], dropped=dropped)
            self.median(f"{what}: CPU an event", rounds, lambda r: r[what]["cpu_us"] / 64, unit="us",
                        goal=None if what == "bytes" else 8, at_least=False)
        for what in ("scheduler", "http"):
            self.median(f"{what} / bytes: streams/s", rounds, lambda r: r[what]["rate"] / r["bytes"]["rate"], 0.9)

    def memory(self):
        if not LINUX:
            return self.figure("memory: /proc is not here", None)
        url = self.server("body", 20_000)
        got = self.ours("scheduler", url, 50_000, prompt=200)
        self.figure("scheduler: 50,000 requests, 20 kB answers: growth", round(got["most_megabytes"] - got["first_megabytes"], 1),
                    100, False, "MB", text_bytes=got["text_bytes"])


def run(kind, parts, **numbers):
    """The benchmark's parts that are asked for; the program's exit code. `numbers`: its own options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", action="append", choices=parts)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = kind(args, Path(folder))
        try:
            for part in args.part or parts:
                getattr(bench, part)()
        finally:
            bench.close()
        bench.table()
        return any(row["good"] is False for row in bench.rows)


if __name__ == "__main__":
    sys.exit(run(Bench, ("throughput", "instructions", "calls", "streams", "memory"), requests=30_000))
