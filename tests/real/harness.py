"""What the tests of harnesses have in common: a harness's own command, run one at a time directly
against the real mlx_lm.server, and with more at once through `evalrt gateway`, each time on a server
of its own; and what came of the two.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from patience import free_port  # noqa: E402

# A proxy or a key of the user's own would lead elsewhere.
CLEAN = {k: v for k, v in os.environ.items()
         if not k.startswith(("OPENAI_", "ANTHROPIC_")) and not k.lower().endswith("_proxy")}
CLEAN |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}


def read_arguments(packages=()):
    """Of a test; `--packages` prints what it needs, a line each."""
    if sys.argv[1:] == ["--packages"]:
        print("\n".join(packages))
        sys.exit()
    parser = argparse.ArgumentParser()
    for name in ("--evalrt", "--server", "--model"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows", type=int, help="how many")
    for name in ("--vllm", "--vllm-model"):
        parser.add_argument(name)
    args, rest = parser.parse_known_args()
    return args, [sys.argv[0], *rest]


def server(args, model, options=(), cwd=None):
    """A fresh one, ready. Its address, without /v1."""
    return started([args.server, "--model", model, *options], cwd)


@contextlib.contextmanager
def started(command, cwd=None, patience=120, **env):
    port = free_port()
    process = subprocess.Popen([*command, "--port", str(port)], env=os.environ | env,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True, cwd=cwd)
    try:
        url = f"http://127.0.0.1:{port}"
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
        for tries in range(patience * 5):
            try:
                urllib.request.urlopen(urllib.request.Request(
                    url + "/v1/chat/completions", body.encode(),
                    {"Content-Type": "application/json"}), timeout=120).read()
                break
            except OSError:
                if process.poll() is not None or tries == patience * 5 - 1:
                    raise
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Run:
    """What a run has left: its folder, its output, how long it took."""

    def __init__(self, folder, code, out, err, wall, summary=None):
        self.folder, self.code, self.out, self.err = Path(folder), code, out, err
        self.wall, self.summary = wall, summary


def run(command, folder, env, timeout=1500):
    folder.mkdir(exist_ok=True)
    begun = time.monotonic()
    done = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True,
                          timeout=timeout)
    return Run(folder, done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


def directly(args, command, folder, model=None, options=(), cwd=None, **env):
    """`command` finds the server by its environment, as it finds the gateway."""
    with server(args, model or args.model, options, cwd) as url:
        return run(command, folder, CLEAN | {
            "OPENAI_BASE_URL": url + "/v1", "OPENAI_API_BASE": url + "/v1", "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": url, "REMOTE_OPENAI_BASE_URL": url + "/v1"} | env)


def through_gateway(args, command, folder, model=None, options=(), gateway=(), **env):
    summary = folder.with_suffix(".json")
    done = run([args.evalrt, "gateway", "--quiet", "--backend", "mlx-server", "--executable",
                args.server, "--model", model or args.model, "--json", summary,
                *(f"--server-arg={it}" for it in options), *gateway, "--", *command],
               folder, CLEAN | env)
    if summary.exists():
        done.summary = json.loads(summary.read_text())
        done.wall = done.summary["wall_seconds"]  # without loading the model
    return done


def compare(name, before, after, direct, gateway):
    """Says how the two went; how many answers are the same."""
    same = sum(a == b for a, b in zip(before, after))
    print(f"{name}: directly {direct.wall:.1f} s, through the gateway {gateway.wall:.1f} s "
          f"({direct.wall / gateway.wall:.2f}x); the same {same} of {len(before)}", file=sys.stderr)
    return same


def scratch(case):
    folder = tempfile.TemporaryDirectory(prefix="evalrt-harness-")
    case.addCleanup(folder.cleanup)
    return Path(folder.name)
