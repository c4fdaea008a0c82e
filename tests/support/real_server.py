"""What the tests of the evalrt program against a real server behind a URL have in common."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

from patience import LONG, free_port


def line(custom_id, question, system=None, **body):
    messages = [{"role": "system", "content": system}] if system else []
    body = {"messages": messages + [{"role": "user", "content": question}], "temperature": 0,
            "max_tokens": 16, **body}
    return json.dumps({"custom_id": custom_id, "url": "/v1/chat/completions", "body": body})


class RealServer(unittest.TestCase):
    """One server for a class of tests. Heirs say how it is started, and `evalrt`, the program."""

    evalrt = None
    patience = LONG  # seconds until it is healthy

    @classmethod
    def command(cls, port):
        """Its argv, and what is added to its environment."""
        raise NotImplementedError

    @classmethod
    def setUpClass(cls):
        port = free_port()
        cls.root = f"http://127.0.0.1:{port}"
        cls.url = cls.root + "/v1"
        cls.log = tempfile.TemporaryFile("w+")
        cls.addClassCleanup(cls.log.close)
        argv, env = cls.command(port)
        cls.server = subprocess.Popen(argv, stdout=cls.log, stderr=cls.log, start_new_session=True,
                                      env=dict(os.environ, **env))
        cls.addClassCleanup(cls.stop)
        deadline = time.monotonic() + cls.patience
        while True:
            try:
                urllib.request.urlopen(cls.root + "/health", timeout=60).close()
                return
            except (OSError, urllib.error.HTTPError):
                if cls.server.poll() is not None or time.monotonic() > deadline:
                    cls.log.seek(0)
                    print(cls.log.read()[-3000:], file=sys.stderr)
                    raise
                time.sleep(0.2)

    @classmethod
    def stop(cls):
        os.killpg(cls.server.pid, signal.SIGKILL)
        cls.server.wait()

    def run_lines(self, lines, *arguments, code=0):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "suite").write_text("\n".join(lines) + "\n")
            done = subprocess.run(
                [self.evalrt, "run", "suite", "--backend", "openai-url", "--url", self.url, "--json",
                 "summary", *arguments], cwd=folder, capture_output=True, text=True, timeout=600)
            self.assertEqual(done.returncode, code, done.stderr)
            self.summary = json.loads((Path(folder) / "summary").read_text())
        return {row["custom_id"]: row for row in map(json.loads, done.stdout.splitlines())}, done.stderr
