"""What the gateway costs: against nginx as the proxy in front of the same server, in interleaved rounds.

The server and wrk share one processor, the gateway or nginx has the other. The ratio is taken within
a round; the figure is the median of the rounds in which nothing else used the machine.

What is compared: nginx as a plain proxy, with one worker process, as the gateway has one thread; no
access log; connections to the server kept by both; bodies in memory; the same requests and answers.
nginx passes bytes on. The gateway also reads them: it queues, plans, counts tokens, and would try again.
All parts are measured whatever the goals say of those before; at the end a missed one makes exit code 1.
"""
import json, re, selectors, socket, subprocess, sys, threading, time
from pathlib import Path

from client import ANSWER, LINUX, PROMPT_BYTES, Bench, free_port, on_cpu, process_seconds, run

PROXY = """
daemon off; master_process off; worker_processes 1; pid %(dir)s/nginx.pid; error_log stderr crit;
events { worker_connections 4096; }
http {
  access_log off; keepalive_requests 100000000; client_body_buffer_size 64k;
  client_body_temp_path %(dir)s/a; proxy_temp_path %(dir)s/b; fastcgi_temp_path %(dir)s/c;
  uwsgi_temp_path %(dir)s/d; scgi_temp_path %(dir)s/e;
  upstream u { server %(upstream)s; keepalive 512; }
  server { listen 127.0.0.1:%(port)d; location / {
    proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ""; } }
}
"""
POST = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = io.open(%r):read("*a")
"""
MICROS = {"us": 1, "ms": 1e3, "s": 1e6}


class GatewayBench(Bench):
    name = "gateway"

    def __init__(self, args, folder):
        super().__init__(args, folder)
        self.pids = {}
        for stream in (False, True):
            body = folder / f"body-{stream}.json"
            body.write_text(json.dumps({"model": "m", "stream": stream, "messages": [
                {"role": "user", "content": "w" * (PROMPT_BYTES - 90)}]}))
            (folder / f"post-{stream}.lua").write_text(POST % str(body))

    def proxy(self, upstream):
        port, folder = free_port(), self.dir / f"proxy-{len(self.servers)}"
        folder.mkdir()
        host = upstream.split("//")[1].split("/")[0]
        (folder / "nginx.conf").write_text(PROXY % {"dir": folder, "port": port, "upstream": host})
        process = subprocess.Popen(on_cpu(1, ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]))
        self.servers.append(process)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        return f"http://127.0.0.1:{port}/v1", process.pid

    def gateway(self, upstream, in_flight=64):
        process = subprocess.Popen(
            on_cpu(1, [str(self.bin / "evalrt"), "gateway", "--quiet", "--backend", "openai-url", "--no-probe",
                       "--url", upstream, "--max-in-flight", str(in_flight)]), stdout=subprocess.PIPE, text=True)
        self.servers.append(process)
        return json.loads(process.stdout.readline())["url"], process.pid

    def load(self, place, connections, stream=False):
        url, pid = place
        before = process_seconds(pid) if pid and LINUX else 0
        out = self.run(["wrk", "-t1", f"-c{connections}", "-d1s", "--latency", "-s",
                        str(self.dir / f"post-{stream}.lua"), url + "/chat/completions"], cpu=0)
        if "Non-2xx" in out:
            sys.exit("error: wrk was refused: " + out)
        requests = int(re.search(r"(\d+) requests in", out)[1])
        used = process_seconds(pid) - before if pid and LINUX else 0
        result = {"rate": float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1]), "cpu_us": used / requests * 1e6}
        for part in ("50", "99"):
            number, unit = re.search(part + r"%\s+([\d.]+)(us|ms|s)", out).groups()
            result["p" + part] = float(number) * MICROS[unit]
        return result

    def wrk_rounds(self, places, connections, stream=False):
        return self.rounds({name: (lambda place=place: self.load(place, connections, stream))
                            for name, place in places.items()})

    def places(self, upstream):
        return {"direct": (upstream, None), "nginx": self.proxy(upstream), "gateway": self.gateway(upstream)}

    # The parts.

    def answers(self):
        places = self.places(self.nginx())
        rounds, dropped = self.wrk_rounds(places, 64)
        for name in places:
            self.median(f"{name}: requests/s, 64 connections", rounds, lambda r: r[name]["rate"], dropped=dropped)
        self.median("gateway / nginx: requests/s, 64 connections", rounds,
                    lambda r: r["gateway"]["rate"] / r["nginx"]["rate"], 0.7)
        for name in ("nginx", "gateway"):
            self.median(f"{name}: CPU a request", rounds, lambda r: r[name]["cpu_us"], unit="us",
                        goal=50 if name == "gateway" else None, at_least=False)
        rounds, dropped = self.wrk_rounds(places, 1)
        added = {name: (lambda r, name=name: r[name]["p50"] - r["direct"]["p50"]) for name in ("nginx", "gateway")}
        for name in added:
            self.median(f"{name}: added p50, one connection", rounds, added[name], unit="us", dropped=dropped)
        self.median("gateway / nginx: added p50, one connection", rounds,
                    lambda r: added["gateway"](r) / max(added["nginx"](r), 1), 1.5, False)
        rounds, dropped = self.wrk_rounds(places, 16)
        for name in places:
            self.median(f"{name}: p99, 16 connections", rounds, lambda r: r[name]["p99"], unit="us", dropped=dropped)
        self.median("gateway / nginx: p99, 16 connections", rounds,
                    lambda r: r["gateway"]["p99"] / r["nginx"]["p99"], 1.5, False)

    def bursts(self):
        places = self.places(self.server("burst", 64))
        rounds, dropped = self.wrk_rounds(places, 16, stream=True)
        for name in places:
            self.median(f"{name}: streams/s (64 events at once), 16 connections", rounds,
                        lambda r: r[name]["rate"], dropped=dropped)
        self.median("gateway / nginx: streams/s", rounds, lambda r: r["gateway"]["rate"] / r["nginx"]["rate"], 0.9)

    def memory(self):
        if not LINUX:
            return self.figure("memory: /proc is not here", None)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        held = []
        event = b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

        def serve():
            while True:
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                asked = b""
                while b"\r\n\r\n" not in asked or (asked[:3] != b"GET" and b"}" not in asked[-3:]):
                    asked += one.recv(65536)
                if b"www" not in asked:  # whether it is there
                    one.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
                                b"Content-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER.encode()))
                    one.close()
                    continue
                one.sendall(head + b"%x\r\n%s\r\n" % (len(event), event))
                held.append(one)
        threading.Thread(target=serve, daemon=True).start()
        url, pid = self.gateway(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", 256)
        port = int(url.split(":")[2].split("/")[0])
        body = (self.dir / "body-True.json").read_bytes()
        clients, ready = [], selectors.DefaultSelector()
        for _ in range(256):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                        b"Content-Length: %d\r\n\r\n%s" % (port, len(body), body))
            ready.register(one, selectors.EVENT_READ)
            clients.append(one)
        deadline = time.monotonic() + 60
        while ready.get_map() and time.monotonic() < deadline:
            for key, _ in ready.select(1):
                ready.unregister(key.fileobj)
        if ready.get_map():
            sys.exit("error: streams did not begin")
        status = Path(f"/proc/{pid}/status").read_text()
        self.figure("gateway: memory with 256 idle streams", round(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1e3, 1),
                    40, False, "MB")
        for one in clients + held:
            one.close()
        listener.close()


if __name__ == "__main__":
    sys.exit(run(GatewayBench, ("answers", "bursts", "memory")))
