#!/usr/bin/env python3
"""evalrt gateway --rehearse from outside: what a command asks twice and writes once.

    rehearsal.py EVALRT_PROGRAM
"""
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import unittest
from pathlib import Path

from gateway import Upstream, WithGateway
from patience import LONG, until


class Rehearsal(WithGateway):
    SCRIPT = """
import json, os, socket, sys, urllib.request
def ask(question, *before, **more):
    messages = [{"role": "user", "content": it} for it in (*before, question)]
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                                     json.dumps({"messages": messages, **more}).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
def keep(text, file="out.txt"):
    print(text, flush=True)
    print(text, file=sys.stderr)
    with open(file, "a") as out:
        out.write(text + "\\n")
def kept_elsewhere(text=""):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as daemon:
        daemon.sendall(text.encode() + b"\\n")
        return daemon.makefile().readline().strip()
rehearsed = "EVALRT_REHEARSAL" in os.environ
"""

    def daemon(self):
        """The port of one that keeps what it is told: no system confines that."""
        class Keep(socketserver.StreamRequestHandler):
            def handle(self):
                text = self.rfile.readline().strip()
                self.server.kept = text or self.server.kept
                self.wfile.write(self.server.kept + b"\n")
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Keep)
        server.kept, server.daemon_threads = b"", True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server.server_address[1]

    def rehearse(self, script, *arguments, option="--rehearse", code=0, clean=True, under=(), variables=None, **more):
        """What the command and evalrt have written: if `clean`, nothing of it, and no file, has a placeholder."""
        temporary = self.dir / "temporary"
        temporary.mkdir(exist_ok=True)
        work = self.dir / "work"
        work.mkdir(exist_ok=True)
        (self.dir / "script.py").write_text(self.SCRIPT + script)
        process = self.popen([*self.openai, option, "--max-in-flight", 8, "--json",
                              self.dir / "summary.json", "--", sys.executable,
                              self.dir / "script.py", *arguments],
                             env={"TMPDIR": str(temporary), "PWD": str(work), **(variables or {})}, cwd=work, under=under,
                             **more)
        out, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, code, err)
        if clean:
            for text in (out or "", err, *(it.read_text() for it in self.dir.rglob("*") if it.is_file())):
                self.assertNotIn("evalrt-placeholder", text)
        self.assertEqual(list(temporary.iterdir()), [])
        return out, err

    def questions(self):
        asked = [it["body"]["messages"][-1]["content"] for it in Upstream.asked if "messages" in it["body"]]
        return sorted(it for it in asked if it.startswith("slow"))

    def test_a_sequential_command_is_rehearsed_and_its_questions_asked_together(self):
        Upstream.together = 8
        out, err = self.rehearse("""
for i in range(16):
    keep(ask(f"slow {i}", temperature=0, stream=False))
""")
        lines = out.splitlines()
        self.assertEqual((self.dir / "work" / "out.txt").read_text(), out)
        self.assertEqual([line.split(" to ")[1] for line in lines], [f"slow {i}" for i in range(16)])
        self.assertEqual(self.questions(), sorted(f"slow {i}" for i in range(16)))  # once each
        self.assertIn("16 requests, 16 of them to be asked", err)
        self.assertIn("16 of its 16 requests were answered from the rehearsal", err)
        self.assertIn("16 answered, 0 failed", err)
        summary = json.loads((self.dir / "summary.json").read_text())
        self.assertEqual((summary["answered"], summary["failed"]), (16, 0))
        self.assertEqual(Upstream.most, 8)
        self.assertGreater(summary["in_flight_mean"], 1)

    def test_samples_of_one_question_are_different_answers(self):
        out, _ = self.rehearse("""
for i in range(4):
    keep(ask("slow", temperature=1))
""")
        self.assertEqual(len(set(out.splitlines())), 4)
        self.assertEqual(len(self.questions()), 4)

    TURNS = """
for i in range(4):
    first = ask(f"slow {i}")
    keep(ask("slow then", f"slow {i}", first))
"""

    def test_a_second_turn_is_asked_for_real_or_learned_in_a_second_round(self):
        _, err = self.rehearse(self.TURNS)
        self.assertIn("4 of its 8 requests were answered from the rehearsal", err)
        self.assertEqual(len(self.questions()), 8)
        Upstream.asked.clear()
        _, err = self.rehearse(self.TURNS, option="--rehearse=3")
        self.assertIn("8 of its 8 requests were answered from the rehearsal", err)
        self.assertIn("8 answered, 0 failed", err)
        self.assertEqual(len(self.questions()), 8)
        self.assertEqual(err.count("rehearsed in"), 3)  # the third finds that all is known

    def test_a_folder_by_its_whole_name_is_led_to_the_copy(self):
        out, _ = self.rehearse("""
keep(ask("slow"), sys.argv[1])
keep(ask("slow"), os.path.join(os.environ["PWD"], "by-pwd"))
open(os.path.join(os.environ.get("TMPDIR"), "left"), "w") if rehearsed else None
""", self.dir / "work" / "by-name")
        (self.dir / "link").symlink_to("work")
        _, err = self.rehearse("""
keep(ask("slow"), sys.argv[1])
keep(ask("slow, when that is written"))
""", self.dir / "link" / "by-link", variables={"PWD": str(self.dir / "link"), "TMPDIR": ""})
        self.assertIn("2 of its 2 requests were answered from the rehearsal", err)
        work = self.dir / "work"
        self.assertEqual((work / "by-name").read_text() + (work / "by-pwd").read_text(), out)

    @unittest.skipUnless(sys.platform == "linux", "only Linux keeps a rehearsal from writing elsewhere")
    def test_what_a_rehearsal_would_write_elsewhere_is_not_written(self):
        (self.dir / "elsewhere").mkdir()
        out, err = self.rehearse("""
try:
    keep(ask("slow"), sys.argv[1] + "/file")
except PermissionError:
    os.remove(sys.argv[1] + "/file")
""", self.dir / "elsewhere")
        self.assertEqual((self.dir / "elsewhere" / "file").read_text(), out)
        self.assertEqual(out.count("\n"), 1)

    @unittest.skipUnless(sys.platform == "linux", "only Linux keeps a rehearsal from writing elsewhere")
    def test_a_command_that_cannot_be_rehearsed_runs_as_without(self):
        out, err = self.rehearse("""
open(sys.argv[1], "w").close()
keep(ask("slow"))
""", self.dir / "log")
        self.assertIn("the rehearsal asked nothing (exit code 1: PermissionError", err)
        self.assertIn("this may be because", err)
        self.assertEqual(self.questions(), ["slow"])
        self.assertIn(" to slow", out)

    SHARED = """
import ctypes, multiprocessing
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def segment():  # of System V
    number = libc.shmget(int(sys.argv[1]), 100, 0o1600)
    return ctypes.cast(libc.shmat(number, None, 0), ctypes.c_void_p).value
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:  # has semaphores
        answers = pool.map(ask, ["slow 1", "slow 2"])
    file = "/dev/shm/evalrt-" + sys.argv[1]
    if rehearsed:
        open(file, "w").write(answers[0])
        ctypes.memmove(segment(), answers[0].encode(), 19)
        ask("slow 3, if nothing has stopped it")
    keep(" ".join([*answers, str(os.path.exists(file)), repr(ctypes.string_at(segment(), 3)),
                   open("/dev/shm/shown-" + sys.argv[1]).read()]))
    libc.shmctl(libc.shmget(int(sys.argv[1]), 100, 0o1600), 0, None)
"""

    def shared(self, **more):
        key = os.getpid()
        shown = Path(f"/dev/shm/shown-{key}")
        shown.write_text("shown")
        for it in (shown, Path(f"/dev/shm/evalrt-{key}")):
            self.addCleanup(it.unlink, missing_ok=True)
        return self.rehearse(self.SHARED, key, **more)

    # Root needs no namespace of users for it, everybody else does.
    NO_ROOT = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]

    @unittest.skipUnless(sys.platform == "linux", "only Linux has a /dev/shm")
    def test_shared_memory_of_a_rehearsal_is_its_own(self):
        for under in ([], self.NO_ROOT if os.getuid() == 0 else []):
            with self.subTest(under):
                Upstream.asked.clear()
                out, err = self.shared(under=under)
                self.assertIn("rehearsed in", err)
                if "gets no /dev/shm of its own" in err:
                    self.skipTest("not permitted here")
                self.assertEqual(self.questions(), ["slow 1", "slow 2", "slow 3, if nothing has stopped it"])
                self.assertTrue(out.endswith("False b'\\x00\\x00\\x00' shown\n"), out)

    def test_where_it_cannot_have_its_own_a_rehearsal_has_none(self):
        none = ["unshare", "--user", "--map-root-user", "sh", "-c",
                'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh", *self.NO_ROOT]
        try:
            subprocess.run([*none, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self.skipTest("there is no such place to be made here")
        out, err = self.rehearse("""
keep(ask("slow"))
try:
    open("/dev/shm/evalrt-" + sys.argv[1], "w").write(ask("slow too"))
except PermissionError:
    ask("slow, denied")
os.remove("/dev/shm/evalrt-" + sys.argv[1])
""", os.getpid(), under=none)
        self.assertIn("gets no /dev/shm of its own here", err)
        self.assertIn("slow, denied", self.questions())

    @unittest.skipUnless(sys.platform == "linux", "only Linux tells a child of its parent's death")
    def test_nothing_that_a_rehearsal_has_started_outlives_it(self):
        out, _ = self.rehearse("""
import subprocess
sleeps = "sleeps " + sys.argv[1]
ask("slow")
if rehearsed:
    for how in ("0", "os.setsid()", "os.fork() or os.setsid()", "os.fork() or os.setsid() or os.fork()"):
        started = subprocess.Popen([sys.executable, "-c", f"import os, sys, time; {how}; print(flush=True); "
                                    "os.close(1); time.sleep(100000)", sleeps], stdout=subprocess.PIPE)
        started.stdout.read()
    ask("slow, with all of them")
else:
    keep(str(subprocess.run(["ps", "-axo", "command="], capture_output=True, text=True).stdout.count(sleeps)))
""", self.dir.name)
        self.assertEqual(out, "0\n")
        self.assertIn("slow, with all of them", self.questions())

    def test_a_rehearsal_has_no_file_that_its_caller_has_opened(self):
        given = self.dir / "given"
        given.write_text("line 1\nline 2\n")
        with given.open("r+") as file:
            out, _ = self.rehearse("""
answer = ask("slow")
try:
    with open(int(sys.argv[1]), "r+", closefd=False, buffering=1) as file:
        keep(file.readline() + answer)
        file.seek(0, 2)
        file.write(answer)
except OSError:
    ask("slow, closed")
""", file.fileno(), pass_fds=[file.fileno()])
        self.assertTrue(out.startswith("line 1"), out)
        self.assertIn("slow, closed", self.questions())

    def test_a_placeholder_that_got_out_is_seen_and_asked_nobody(self):
        for form in ("kept", "kept.upper()[:25]"):
            with self.subTest(form):
                Upstream.asked.clear()
                _, err = self.rehearse("""
import signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # says that all is well
if rehearsed:
    kept_elsewhere(ask("slow"))
else:
    kept = kept_elsewhere()
    try:
        keep(ask("slow it is " + %s))
    except urllib.error.HTTPError:
        signal.pause()
""" % form, self.daemon(), code=1)
                self.assertIn("it keeps something outside its folder", err)
                self.assertIn("1 requests with a placeholder in them were refused", err)
                self.assertIn("1 answered, 1 failed (1 rejected)", err)
                self.assertEqual(self.questions(), ["slow"])
        # Nor what is no question to a model.
        for script in ("urllib.request.urlopen(urllib.request.Request(url + '/tokenize', json.dumps({'prompt': kept})"
                       ".encode(), {'Content-Type': 'application/json'}))",
                       "urllib.request.urlopen(url + '/other/200?a=' + kept)"):
            Upstream.asked.clear()
            _, err = self.rehearse("""
url = os.environ["OPENAI_BASE_URL"]
if rehearsed:
    kept_elsewhere(ask("slow"))
else:
    kept = kept_elsewhere()
    %s
""" % script, self.daemon(), code=128 + signal.SIGTERM)
            self.assertIn("it keeps something outside its folder", err)
            self.assertEqual({it["path"] for it in Upstream.asked}, {"/v1/chat/completions"})

    def test_a_rehearsal_gives_the_server_no_placeholder_to_keep(self):
        out, _ = self.rehearse("""
answer = ask("slow")
for path, body in (("/tokenize", {"prompt": answer}), ("/keep/200", {"of": "somebody"}),
                   ("/keep/200", {"of": answer}), ("/keep/200?a=" + urllib.parse.quote(answer), {})):
    try:
        urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
                                                      {"Content-Type": "application/json"}))
    except urllib.error.HTTPError as error:
        ask(f"slow {error.code} {error.read().decode()}")
        if not rehearsed:
            raise
""")
        asked = [it for it in self.questions() if "which the server might keep" in it]
        self.assertEqual(len(asked), 2, asked)
        others = [it for it in Upstream.asked if it["path"] not in ("/v1/chat/completions", "/tokenize")]
        self.assertEqual(len(others), 4)
        self.assertNotIn("evalrt-placeholder", str(others))

    def test_who_is_interrupted_is_not_accused(self):
        (self.dir / "script.py").write_text(self.SCRIPT + """
if not rehearsed:
    print("there", flush=True)
    time.sleep(100000)
ask("slow")
""")
        process = self.popen([*self.openai, "--rehearse", "--", sys.executable, "script.py"], start_new_session=True)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "there\n")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
        self.assertEqual(process.returncode, 128 + signal.SIGINT, err)
        self.assertNotIn("the command asked", err)

    def test_who_asks_nothing_for_real_has_no_results(self):
        out, err = self.rehearse("""
keep(kept_elsewhere() or kept_elsewhere(ask("slow")))
""", self.daemon(), code=1, clean=False)
        self.assertIn("placeholder", out)
        self.assertIn("the command asked 1 in its rehearsal and nothing now: if it has not failed, it has answers from elsewhere", err)
        self.assertIn("out.txt: these are no results", err)

    def test_who_asks_less_for_real_may_have_his_reasons(self):
        _, err = self.rehearse("""
for i in range(9):
    if "answer" in ask(f"slow {i}"):
        sys.exit()
""")
        self.assertIn("the command asked 9 in its rehearsal and 1 now: if it keeps answers outside its folder", err)
        _, err = self.rehearse("""
import random, time
for i in range(3):
    keep(ask(f"slow {random.random()} {time.time()}"))
""")
        self.assertNotIn("the command asked", err)

    def test_placeholders_in_results_are_found_wherever_the_command_writes(self):
        leak = """
kept = kept_elsewhere() if not rehearsed else kept_elsewhere(ask("slow"))
ask("slow")
if not rehearsed:
    %s
"""
        elsewhere = self.dir / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "old").write_text("evalrt-placeholder-0")
        (self.dir / "home").mkdir()
        for link, target in (("link", self.dir / "linked"), ("file", self.dir / "new-file")):
            (self.dir / "work").mkdir(exist_ok=True)
            (self.dir / "work" / link).symlink_to(target)
        (self.dir / "linked").mkdir()
        for script, argument, found in (
                ("os.mkdir('a'); open('a/b.bin', 'wb').write(b'x' * 100000 + kept.encode() + b'y')", "", "work/a/b.bin"),
                ("open(sys.argv[2][6:] + '/new', 'w').write(kept[:30])", f"--out={elsewhere}", "elsewhere/new"),
                ("open('link/sub', 'w').write(kept)", "", "work/link/sub"),
                ("open('file', 'w').write(kept)", "", "work/file"),
                ("open(os.environ['OUT'] + '/by-variable', 'w').write(kept)", "", "elsewhere/by-variable"),
                ("open(os.path.expanduser(sys.argv[2][6:]), 'w').write(kept)", "--out=~/by-tilde", "by-tilde"),
                ("print(kept)", "", "stdout")):
            with self.subTest(found), (self.dir / "stdout").open("w") as stdout:
                _, err = self.rehearse(leak % script, self.daemon(), argument, code=1, clean=False, stdout=stdout,
                                       variables={"OUT": str(elsewhere), "HOME": str(self.dir / "home")})
                self.assertRegex(err, f"placeholders of the rehearsal stand in [^ ]*{found}: these are no results")

    def test_a_command_that_waits_for_an_answer_it_likes_is_not_rehearsed_for_ever(self):
        out, err = self.rehearse("""
while "answer" not in (text := ask("slow")):
    pass
keep(text)
""")
        self.assertIn("until it asked nothing new", err)
        self.assertEqual(self.questions(), ["slow"])

    def test_an_interrupted_rehearsal_runs_nothing_and_leaves_nothing(self):
        waits = f"ask('slow'); print('there', file=sys.stderr); time.sleep({LONG})"
        for script, number in ((waits, signal.SIGINT), (waits, signal.SIGHUP), (waits, signal.SIGQUIT),
                               ("ask('hold')", signal.SIGTERM), ("ask('hold')", signal.SIGHUP)):
            # In the rehearsal, and while its questions are asked.
            with self.subTest(script, signal=number):
                Upstream.asked.clear()
                (self.dir / "script.py").write_text(self.SCRIPT + "import time\n" + script)
                temporary = self.dir / "temporary"
                temporary.mkdir(exist_ok=True)
                process = self.popen([*self.openai, "--rehearse", "--", sys.executable, "script.py"],
                                     env={"TMPDIR": str(temporary)}, start_new_session=True)

                def there():
                    try:
                        if any("there" in it.read_text() for it in temporary.rglob("stderr")):
                            return True
                    except FileNotFoundError:
                        pass  # a rehearsal has just ended
                    return any(it["body"]["messages"][-1]["content"] == "hold" for it in Upstream.asked)
                until(there)
                process.send_signal(number)
                out, err = process.communicate(timeout=LONG)
                self.assertEqual((process.returncode, out), (130, ""), err)
                self.assertIn("interrupted in the rehearsal", err)
                self.assertEqual(list(temporary.iterdir()), [])
        rows = subprocess.run(["ps", "-axo", "command="], capture_output=True, text=True).stdout
        self.assertNotIn(str(self.dir), rows)

    def test_a_failure_in_a_rehearsal_is_the_command_s_own(self):
        out, err = self.rehearse("""
try:
    ask("too long")
except urllib.error.HTTPError as error:
    keep(str(error.code))
""")
        self.assertEqual(out, "400\n")
        self.assertIn("1 of 1 failed: the command will ask for them itself", err)


if __name__ == "__main__":
    unittest.main(verbosity=1)
