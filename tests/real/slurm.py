#!/usr/bin/env python3
"""A real Slurm on this machine runs a suite as an array of four over two servers.

    slurm.py --evalrt PROGRAM --server FAKE_OPENAI

One task is killed with SIGKILL and requeued: nothing is lost, nothing answered is asked again.
Needs slurmctld, slurmd and munged (Debian: slurm-wlm, munge), and root. Exit code 77: not here.
"""
import argparse
import ctypes
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

COUNT = 120


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def until(what, seconds, words):
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            sys.exit(f"error: {words}")
        time.sleep(0.1)


class Slurm:
    """Daemons of our own in a folder of their own, on loopback."""

    def __init__(self, folder):
        self.folder, self.daemons, self.munged = folder, [], None
        self.host = host = socket.gethostname().split(".")[0]
        for name in ("state", "spool", "log"):
            (folder / name).mkdir()
        self.conf = folder / "slurm.conf"
        self.socket = "/run/munge/munge.socket.2"
        self.conf.write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.socket}
CryptoType=crypto/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_setup_env_fail
JobRequeue=1
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
""")
        self.env = dict(os.environ, SLURM_CONF=str(self.conf))
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what daemons leave is ours

    def start(self):
        if not Path(self.socket).exists():
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            subprocess.run(["munged", "--force"], check=True, user="munge", group="munge",
                           extra_groups=[], stderr=subprocess.DEVNULL)
            until(lambda: Path(self.socket).exists(), 20, "munged does not start")
            pid = Path("/run/munge/munged.pid")
            self.munged = int(pid.read_text()) if pid.exists() else None
        for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", self.host]):
            self.daemons.append(subprocess.Popen([*command, "-f", self.conf], env=self.env,
                                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T", check=False), 60,
              "Slurm's node does not come up: " + self.log())

    def log(self):
        return " ".join(path.read_text()[-600:] for path in (self.folder / "log").iterdir())

    def run(self, *argv, check=True):
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, cwd=self.folder)
        if check and done.returncode:
            sys.exit(f"error: {argv[0]}: {done.stderr}")
        return done.stdout

    def steps(self):
        """The ids of our slurmd's slurmstepds: those with something open in our folder."""
        found = []
        for process in Path("/proc").iterdir():
            try:
                if (process / "comm").read_text().strip() != "slurmstepd":
                    continue
                open_files = [os.readlink(it) for it in (process / "fd").iterdir()]
            except OSError:
                continue  # no process, or one that has ended
            if any(it.startswith(f"{self.folder}/") for it in open_files):
                found.append(int(process.name))
        return found

    def stop(self):
        """No process of it is left, whatever became of its jobs."""
        self.run("scancel", "-u", "root", check=False)
        deadline = time.monotonic() + 20
        while (self.steps() or self.run("squeue", "-h", check=False)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for it in reversed(self.daemons):
            it.terminate()
        for it in self.daemons:
            try:
                it.wait(20)
            except subprocess.TimeoutExpired:
                it.kill()
                it.wait()
        for it in self.steps():
            os.kill(it, signal.SIGKILL)
        if self.munged:
            os.kill(self.munged, signal.SIGTERM)
        until(lambda: not self.steps() and not self.reap(), 20, "a slurmstepd or munged is left behind")

    def reap(self):
        """Which of its processes, once their parents had ended, are still there."""
        left = []
        for process in Path("/proc").iterdir():
            try:
                name, rest = (process / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            except (OSError, IndexError):
                continue
            state, parent = rest.split()[:2]
            if int(parent) != os.getpid() or name not in ("slurmstepd", "munged", "slurm_script", "evalrt"):
                continue
            if state != "Z":
                left.append(name)
            else:
                os.waitpid(int(process.name), 0)
        return left


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--evalrt", type=Path, required=True)
    parser.add_argument("--server", type=Path, required=True)
    args = parser.parse_args()
    missing = [it for it in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(it)]
    if missing or os.geteuid() != 0:
        print(f"not here: {' '.join(missing) or 'it needs root'}", file=sys.stderr)
        sys.exit(77)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        servers, urls = [], []
        for i in range(2):
            program = folder / f"server{i}"
            program.symlink_to(args.server.resolve())
            port = free_port()
            servers.append(subprocess.Popen([sys.executable, program, "--model", "m", "--port", str(port)],
                                            cwd=folder, stderr=subprocess.DEVNULL))
            urls.append(f"http://127.0.0.1:{port}/v1")
        slurm = Slurm(folder)
        try:
            slurm.start()
            check(args, folder, urls, slurm)
        finally:
            slurm.stop()
            for it in servers:
                it.kill()
                it.wait()
    print("slurm: an array of 4 over 2 servers, one task killed and requeued: whole")


def asked(folder):
    questions = []
    for i in range(2):
        path = folder / f"server{i}.log"
        if path.exists():
            rows = [json.loads(row) for row in path.read_text().splitlines() if row.endswith("}")]
            questions += [row["body"]["messages"][-1]["content"] for row in rows
                          if row["body"].get("max_tokens") != 1]
    return questions


def check(args, folder, urls, slurm):
    suite = folder / "suite.jsonl"
    with open(suite, "w", encoding="utf-8") as file:
        for i in range(COUNT):
            question = f"sleep 0.2 group {i % 4} " + f"shared words {i % 4} " * 60 + str(i)
            file.write(json.dumps({"custom_id": f"item-{i}", "method": "POST", "url": "/v1/chat/completions",
                                   "body": {"messages": [{"role": "user", "content": question}],
                                            "temperature": 0}}) + "\n")
    job = folder / "job.sh"
    job.write_text(f"""#!/bin/bash
urls=({urls[0]} {urls[1]})
echo $$ >{folder}/started.$SLURM_ARRAY_TASK_ID.${{SLURM_RESTART_COUNT:-0}}
exec {args.evalrt.resolve()} run {suite} --shard auto -o {folder}/out.{{shard}} \\
    --journal {folder}/journal.{{shard}} --backend openai-url --no-probe --model m --max-in-flight 1 \\
    --url ${{urls[$((SLURM_ARRAY_TASK_ID % 2))]}} 2>>{folder}/err.$SLURM_ARRAY_TASK_ID
""")
    number = slurm.run("sbatch", "--parsable", "--array=1-4", "--requeue", "--mem=100",
                       "--output=/dev/null", str(job)).strip()
    # The second one, which is shard 1, once it has something.
    pid = folder / "started.2.0"
    part = folder / "out.1.part"
    until(lambda: pid.exists() and part.exists() and part.read_text().count("\n") >= 5, 120,
          "the second task does not run: " + slurm.log())
    os.kill(int(pid.read_text()), signal.SIGKILL)
    kept = part.read_text().count("\n")
    state = lambda: slurm.run("squeue", "-h", "-j", number, "-o", "%T %F_%a", check=False)  # noqa: E731
    until(lambda: not slurm.run("squeue", "-h", "-j", f"{number}_2", "-o", "%T", check=False).startswith("R"), 60,
          "the killed task is not noticed: " + state())
    slurm.run("scontrol", "requeue", f"{number}_2", check=False)  # or Slurm does
    slurm.run("scontrol", "update", f"JobId={number}_2", "StartTime=now", check=False)  # not in two minutes
    slurm.run("scontrol", "requeue", f"{number}_2", check=False)  # or Slurm does
    slurm.run("scontrol", "update", f"JobId={number}_2", "StartTime=now", check=False)  # not in two minutes
    until(lambda: all((folder / f"out.{i}").exists() for i in range(4)), 400,
          "the array does not end: " + state() + slurm.log())
    merged = folder / "merged"
    done = subprocess.run([args.evalrt, "merge", merged, *(folder / f"out.{i}" for i in range(4)),
                           "--suite", suite], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in merged.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"item-{i}" for i in range(COUNT)], len(rows)
    assert all(row["error"] is None for row in rows)
    # Two journals for each of the two addresses.
    done = subprocess.run([args.evalrt, "merge", folder / "whole", *(folder / f"journal.{i}" for i in range(4))],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Which is the whole run's, at either of them.
    before = len(asked(folder))
    for url in urls:
        done = subprocess.run([args.evalrt, "run", suite, "-o", folder / "again", "--journal", folder / "whole",
                               "--backend", "openai-url", "--no-probe", "--model", "m", "--url", url],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(asked(folder)) == before, "what the merged journal has was asked again"
    again = len(asked(folder)) - COUNT
    assert again <= 1, f"{again} were asked twice"  # the one that was under way
    assert kept >= 5
    assert (folder / "started.2.1").exists(), "it was not requeued"


if __name__ == "__main__":
    main()
