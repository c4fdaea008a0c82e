#!/usr/bin/env python3
"""The examples do what they say, and the README shows them as they are.

    examples.py ASK_PROGRAM
"""

import os
import subprocess
import sys
import unittest
from pathlib import Path

ASK = os.path.abspath(sys.argv.pop(1))
TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "support"))

from patience import LONG, fake_openai  # noqa: E402

OTHERS = ("--build", "--install", "--preset",  # of cmake
          "--num-threads", "--array", "--requeue", "--wrap")  # of harnesses and of Slurm


class Examples(unittest.TestCase):
    def test_ask_prints_the_answer(self):
        server, url = fake_openai("--model", "small")
        try:
            for program in (ASK, ASK + "_c"):
                with self.subTest(program=program):
                    done = subprocess.run([program, url, "a question"], timeout=LONG,
                                          capture_output=True, text=True)
                    self.assertEqual((done.returncode, done.stdout.strip()),
                                     (0, "answer to a question"), done.stderr)
        finally:
            server.kill()
            server.wait()

    def test_ask_says_when_nobody_answers(self):
        for program in (ASK, ASK + "_c"):
            with self.subTest(program=program):
                done = subprocess.run([program, "http://127.0.0.1:1/v1", "a question"], timeout=LONG,
                                      capture_output=True, text=True)
                self.assertEqual(done.returncode, 1)
                self.assertIn("cannot connect to 127.0.0.1:1", done.stdout + done.stderr)

    def test_the_readme_shows_ask_as_it_is(self):
        source = (ROOT / "examples" / "ask.cpp").read_text()
        self.assertIn("```cpp\n" + source + "```", (ROOT / "README.md").read_text())

    def test_the_readme_shows_the_swift_example_as_it_is(self):
        source = (ROOT / "examples" / "swift" / "Sources" / "ask" / "Ask.swift").read_text()
        self.assertIn("```swift\n" + source + "```", (ROOT / "README.md").read_text())

    def test_the_readme_names_no_command_or_option_that_is_not_there(self):
        readme = (ROOT / "README.md").read_text()
        smoke = (ROOT / "scripts" / "eval-throughput-smoke.sh").read_text()
        main = (ROOT / "examples" / "evalrt" / "main.cpp").read_text()
        servers = (ROOT / "lib" / "backend_row.cpp").read_text()  # with options of their own
        for word in readme.replace("`", " ").split():
            option = word.strip(".,;:()").split("=")[0]
            if option.startswith("--") and option.strip("-") and option not in OTHERS:
                self.assertTrue(f"{option} " in smoke or f"{option})" in smoke or
                                f'{option}"' in main or f'"{option}{{' in main or
                                f'{option}"' in servers, option)


if __name__ == "__main__":
    unittest.main(verbosity=1)
