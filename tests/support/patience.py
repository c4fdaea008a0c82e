"""What keeps a test from failing because the machine is slow."""

import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

LONG = 600  # seconds, for what has to come


def until(condition, seconds=LONG):
    """Waits until condition() is true, and gives what it gave; an error after so long."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"this did not come true in {seconds} s")
        time.sleep(0.02)
    return result


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=60).close()
        return True
    except OSError:
        return False


def free_port():
    """Not one of those that the system gives to who wants any: nobody takes it before our server."""
    for port in random.choices(range(20000, 32000), k=100):
        with socket.socket() as it:
            try:
                it.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    raise OSError("no port is free")


def fake_openai(*arguments, program=Path(__file__).with_name("fake_openai.py"), **more):
    """A process of it that listens, and its address."""
    process = subprocess.Popen([sys.executable, program, *arguments, "--port", "0"], text=True,
                               stdout=subprocess.PIPE, **more)
    with process.stdout:
        return process, f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
