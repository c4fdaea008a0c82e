"""Real servers as processes, for tests and benchmarks that need several of them, or a fresh one for each run."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from patience import free_port

SUPPORT = Path(__file__).resolve().parent


def get(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.loads(answer.read())


class Process:
    def __init__(self, argv, **env):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(list(map(str, argv)), stdout=self.log, stderr=self.log,
                                        start_new_session=True, env=dict(os.environ, **env))

    def until(self, what, seconds=120):
        """Waits for what() to be true; an error if the process ends before."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if what():
                    return self
            except (OSError, ValueError):
                pass
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(self.words())
            time.sleep(0.1)

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.log.close()

    def words(self):
        self.log.seek(0)
        return self.log.read()[-3000:]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Llama(Process):
    """llama.cpp's; `python` has xllamacpp. `cache`: MB of its cache in the host's memory; `threads`: 1 leaves
    two of them two processors, 0 is its own choice."""

    def __init__(self, python, slots=2, context=1024, cache=None, threads=1):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        super().__init__([python, SUPPORT / "llama_server.py", self.port, slots, context,
                          *([] if cache is None else [cache])], LLAMA_THREADS=str(threads))

    def wait(self):
        return self.until(lambda: get(f"http://127.0.0.1:{self.port}/health"))


class NativeLlama(Process):
    """llama.cpp's own program, built for this machine; `folder`: its programs and libraries."""

    def __init__(self, folder, model, slots, context, cache):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        super().__init__([Path(folder) / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", self.port,
                          "-np", slots, "-c", slots * context, "--cache-ram", cache], LD_LIBRARY_PATH=str(folder))

    wait = Llama.wait


class Vllm(Process):
    """On the CPU; tells the tokens it had in its cache."""

    def __init__(self, program, model):
        self.root = f"http://127.0.0.1:{free_port()}"
        self.url = self.root + "/v1"
        cores = ",".join(map(str, range(os.cpu_count())))  # by itself it leaves one of them idle
        super().__init__([program, "serve", model, "--served-model-name", "smol", "--host", "127.0.0.1", "--port",
                          self.root.rpartition(":")[2], "--max-model-len", 8192, "--enable-prompt-tokens-details"],
                         VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=cores, HF_HUB_OFFLINE="1",
                         VLLM_SERVER_DEV_MODE="1")

    def wait(self):
        return self.until(lambda: get(self.url + "/models"), 900)  # it compiles at its first start

    def forget(self):
        """Its prefix cache."""
        urllib.request.urlopen(urllib.request.Request(self.root + "/reset_prefix_cache", method="POST"),
                               timeout=60).close()


class Router(Process):
    """As its defaults have it, but on loopback only; `more`: of its options."""

    def __init__(self, ports, *more, program=Path(sys.executable).parent / "sglang-router"):
        root = f"http://127.0.0.1:{free_port()}"
        super().__init__([program, "launch", "--host", "127.0.0.1", "--port", root.rpartition(":")[2],
                          "--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports),
                          "--prometheus-host", "127.0.0.1", "--prometheus-port", free_port(), *more])
        self.url = root + "/v1"
        self.until(lambda: get(root + "/readiness")["healthy_workers"] == len(ports), 60)
