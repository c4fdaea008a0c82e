#!/usr/bin/env python3
"""Checks scripts/score_bfcl.py on result files made from the possible answers.

Of each single-turn category, in both modes: right answers, altered ones, ones that cannot be decoded,
and rows that tell of an error. Run by the Python that has what `score_bfcl.py --packages` prints.

    score_bfcl_test.py [--data DIR]
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "score_bfcl.py"
CATEGORIES = """simple_python simple_java simple_javascript multiple parallel parallel_multiple
    live_simple live_multiple live_parallel live_parallel_multiple""".split()
RELEVANCE = ["irrelevance", "live_irrelevance", "live_relevance"]

GARBAGE = {
    "prompt": ["", "I am glad to help you with that.", "[f(", "[" * 300, "null", "[1, 2]", None,
               '{"name": "f", "arguments": {}}', "```python\nprint(1)\n```\ndone", "f(a=1", "\0"],
    "fc": ["", "I am glad to help you with that.", None, [], [{}], [{"f": "{\"a\": "}], [{"f": ""}],
           [{"f": "[1]"}], [{"f": "null"}], "[f(a=1)]"],
}
ERRORS = [{"result": "Error during inference: Connection error.", "traceback": "Traceback ..."},
          {"result": "Error during inference: Error code: 429"},
          {"result": "", "traceback": "Traceback ..."}]

passed = failed = 0


def check(what, expected, got):
    global passed, failed
    if expected == got:
        passed += 1
        return
    failed += 1
    if failed <= 20:
        print(f"FAILED {what}: expected {expected!r}, got {got!r}")


def run(*args):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def pick(acceptable):
    return next(one for one in acceptable if one != "")


def picked(parameters):
    """Of each parameter a value that is accepted; "" says that it may be left out."""
    return {key: pick(acceptable) for key, acceptable in parameters.items()
            if any(one != "" for one in acceptable)}


def calls_of(truth, functions):
    """[(name, {parameter: value})] that is right, or nothing: a few items accept no answer at all."""
    calls = []
    for call in truth:
        (name, parameters), = call.items()
        described, = (one["parameters"] for one in functions if one["name"] == name)
        values = {key: value for key, value in picked(parameters).items()
                  if key in described["properties"]}
        for key, value in values.items():
            if isinstance(value, dict):  # the values in a dict are lists of acceptable ones again
                values[key] = picked(value)
            if isinstance(value, list):
                values[key] = [picked(one) if isinstance(one, dict) else one for one in value]
        needed = {key for key, acceptable in parameters.items() if "" not in acceptable}
        if not needed | set(described["required"]) <= set(values):
            return None
        calls.append((name, values))
    return calls


def source(value, language):
    """A value of a Java or JavaScript call, as it stands in the call and as a string of its own."""
    if isinstance(value, bool):
        return (str(value).lower(),) * 2
    if isinstance(value, str):
        return f'"{value}"', value
    return (repr(value),) * 2


def writable(calls, functions):
    """Whether source() can write these: no collections, nothing to escape, numbers without suffix."""
    described = functions[0]["parameters"]["properties"]

    def fits(value, type):
        if isinstance(value, str):
            return (type in ("String", "any") and value.isascii() and value.isprintable()
                    and not set(value) & set("\"'\\"))
        return type in ("boolean", "Boolean", "integer", "double", "float") and \
            isinstance(value, (bool, int, float))

    return all(fits(value, described[parameter]["type"])
               for _, parameters in calls for parameter, value in parameters.items())


def answer(calls, mode, language):
    """The calls as the model would have answered."""
    if mode == "fc":
        return [{name.replace(".", "_"): json.dumps(
            {key: value if language == "python" else source(value, language)[1]
             for key, value in parameters.items()})} for name, parameters in calls]
    return "[" + ", ".join(
        name + "(" + ", ".join(
            f"{key}={value!r}" if language == "python" else f"{key}={source(value, language)[0]}"
            for key, value in parameters.items()) + ")" for name, parameters in calls) + "]"


def altered(calls, how):
    """Calls that cannot be right any more; nothing if that is not to be had from these."""
    calls = [(name, dict(parameters)) for name, parameters in calls]
    name, parameters = calls[-1]
    if how == "name":
        calls[-1] = (name + "_", parameters)
    elif how == "count":
        calls.append(calls[-1])
    elif how == "unexpected":
        parameters["no_such_parameter"] = 1
    elif how == "missing":
        calls.pop()
    elif how == "value":
        for key, value in parameters.items():
            if isinstance(value, str):
                parameters[key] = "no such value"
                return calls
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                parameters[key] = value + 987654
                return calls
        return None
    return calls


class File:
    """A result file in the making, and the verdicts it should get."""

    def __init__(self, scratch, category, mode, data):
        self.path = Path(scratch) / f"BFCL_v4_{category}_result.json"
        self.category, self.mode, self.data = category, mode, data
        self.rows, self.expected = [], {}

    def add(self, id, row, expected):
        self.rows.append({"id": id, **row})
        self.expected[id] = expected

    def check(self):
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        done = run("--category", self.category, "--mode", self.mode, "--data", self.data, self.path)
        if done.returncode:
            check(f"{self.category} {self.mode}", 0, (done.returncode, done.stderr))
            return
        scores = json.loads(done.stdout)
        before = failed
        for row in self.rows:
            id = row["id"]
            check(f"{self.mode} {row}", self.expected[id], scores["per_item"].get(id, "no verdict"))
        verdicts = [one for one in self.expected.values() if one is not None]
        check(f"{self.category} {self.mode}: correct and total", [sum(verdicts), len(verdicts)],
              [scores["correct"], scores["total"]])
        check(f"{self.category} {self.mode}: ids", set(), set(self.expected) ^ set(scores["per_item"]))
        print(f"{self.category} {self.mode}: {len(self.rows)} rows, {failed - before} wrong",
              flush=True)


def made_files(scratch, data, category, mode):
    """Two files that hold, of every item, the right answer and something else."""
    language = "java" if category.endswith("java") else \
        "javascript" if category.endswith("javascript") else "python"
    right, wrong = File(scratch, category, mode, data), File(scratch, category, mode, data)
    prompts = read(data / f"BFCL_v4_{category}.json")
    answers = read(data / "possible_answer" / f"BFCL_v4_{category}.json")
    for index, (prompt, truth) in enumerate(zip(prompts, answers)):
        id, calls = prompt["id"], calls_of(truth["ground_truth"], prompt["function"])
        if not calls or language != "python" and not writable(calls, prompt["function"]):
            continue
        right.add(id, {"result": answer(calls, mode, language)}, True)
        kind = index // 3
        if index % 3 == 0:
            how = ["name", "count", "unexpected", "missing", "value"][kind % 5]
            other = altered(calls, how) or altered(calls, "name")
            wrong.add(id, {"result": answer(other, mode, language)}, False)
        elif index % 3 == 1:
            wrong.add(id, {"result": GARBAGE[mode][kind % len(GARBAGE[mode])]}, False)
        else:
            wrong.add(id, ERRORS[kind % len(ERRORS)], None)
    return right, wrong


def made_relevance(scratch, data, category, mode):
    file = File(scratch, category, mode, data)
    for index, prompt in enumerate(read(data / f"BFCL_v4_{category}.json")):
        kind = index // 3
        if index % 3 == 0:
            called = [("f", {"a": 1}), ("a.b", {"c": "d"})][:1 + kind % 2]
            file.add(prompt["id"], {"result": answer(called, mode, "python")},
                     category == "live_relevance")
        elif index % 3 == 1:
            file.add(prompt["id"], {"result": GARBAGE[mode][kind % len(GARBAGE[mode])]},
                     category != "live_relevance")
        else:
            file.add(prompt["id"], ERRORS[kind % len(ERRORS)], None)
    return file


def check_files(scratch, data):
    """Partial, repeated, cut off, of something else; and the mode found out."""
    path = Path(scratch) / "result.json"
    right = '{"id": "simple_python_0", "result": "[calculate_triangle_area(base=10, height=5)]"}\n'
    wrong = '{"id": "simple_python_0", "result": "[calculate_triangle_area(base=1, height=5)]"}\n'
    tool = json.dumps({"id": "simple_python_0", "result":
                       [{"calculate_triangle_area": '{"base": 10, "height": 5}'}]}) + "\n"
    dotted = json.dumps({"id": "simple_python_2", "result": [{"math_hypot": '{"x": 4, "y": 5}'}]})
    # bfcl_eval evaluates arithmetic: here without an end, and with something printed.
    endless = '{"id": "simple_python_1", "result": "[math.factorial(number=9**9**9)]"}\n'
    prints = '{"id": "simple_python_1", "result": "[math.factorial(number=4 + int(print() is None))]"}'
    for what, text, expected in [
            ("no row", "", {}),
            ("one row", right, {"simple_python_0": True}),
            ("no end of line", right.strip(), {"simple_python_0": True}),
            ("the last row counts", right + wrong, {"simple_python_0": False}),
            ("the last row counts", wrong + right, {"simple_python_0": True}),
            ("cut off", right + '{"id": "simple_python_1", "resu', {"simple_python_0": True}),
            ("cut off in a letter", right.encode() + b'{"id": "simple_python_1", "result": "\xc3',
             {"simple_python_0": True}),
            ("tool calls", tool + dotted, {"simple_python_0": True, "simple_python_2": True}),
            ("no result", '{"id": "simple_python_0"}\n', {"simple_python_0": None}),
            ("prints", prints, {"simple_python_1": True}),
            ("endless", endless + right, {"simple_python_1": None, "simple_python_0": True}),
    ]:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        done = run("--category", "simple_python", "--data", data, path)
        verdicts = [one for one in expected.values() if one is not None]
        scores = json.loads(done.stdout) if done.returncode == 0 else {"stderr": done.stderr}
        coverage = scores.pop("coverage", None)
        check(what, {"correct": sum(verdicts), "total": len(verdicts), "per_item": expected}, scores)
        # Of the whole category, and said beside the score.
        if coverage:
            check(what + ": coverage", [400, 400 - len(expected), len(expected), False],
                  [coverage["items"], coverage["not_run"], coverage["answered"] + coverage["failed"],
                   coverage["complete"]])
            check(what + ": said", True, "NOT COMPLETE: " in done.stderr)
    # What failed has no row: the run's report tells of it.
    report = Path(scratch) / "run.json"
    path.write_text(right)
    for what, text, expected in [
            ("report", '{"failures": {"timed_out": 2, "poison": 1}}',
             [3, {"timed_out": 2, "poison": 1}, 396, "3 failed (1 poison, 2 timed_out), "]),
            ("report, nothing failed", '{"failures": {}}', [0, {}, 399, " 0 failed, "])]:
        report.write_text(text)
        done = run("--category", "simple_python", "--data", data, "--report", report, path)
        coverage = json.loads(done.stdout or "{}").get("coverage", {})
        check(what, expected[:3], [coverage.get(key) for key in ("failed", "failures", "not_run")])
        check(what + ": said", True, expected[3] in done.stderr)
    for what, text in [("report of more", '{"failures": {"timed_out": 400}}'), ("report, not JSON", "{"),
                       ("no report", '{"rows": 1}'), ("report, no counts", '{"failures": {"poison": "x"}}')]:
        report.write_text(text)
        done = run("--category", "simple_python", "--data", data, "--report", report, path)
        check(what, [2, "", 1], [done.returncode, done.stdout, done.stderr.count("\n")])
    for what, category, text in [("other category", "multiple", right),
                                 ("no such category", "multi_turn_base", right),
                                 ("not JSON", "simple_python", "{\n" + right),
                                 ("no row", "simple_python", "[]\n" + right)]:
        path.write_text(text)
        done = run("--category", category, "--data", data, path)
        check(what, [2, "", 1], [done.returncode, done.stdout, done.stderr.count("\n")])
    check("no file", 2, run("--category", "multiple", "--data", data, scratch + "/none").returncode)
    check("no data", 2, run("--category", "multiple", "--data", scratch, path).returncode)
    listed = subprocess.run([sys.executable, "-S", str(SCRIPT), "--packages"], text=True,
                            stdout=subprocess.PIPE).stdout.splitlines()
    check("packages", [True, ["--no-deps bfcl_eval==2026.3.23"]],
          ["filelock==3.20.0" in listed, [line for line in listed if line.startswith("-")]])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="bfcl_eval's data; default: the package's own")
    args = parser.parse_args()
    if args.data:
        data = Path(args.data).resolve()
    else:
        package = importlib.util.find_spec("bfcl_eval")
        if not package:
            sys.exit("bfcl_eval is not installed here; see scripts/score_bfcl.py --packages")
        data = Path(package.origin).parent / "data"

    categories = CATEGORIES
    if not importlib.util.find_spec("tree_sitter"):
        categories = [category for category in categories if "java" not in category]
        print("skipped simple_java simple_javascript: tree_sitter 0.21.3 is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        for mode in ("prompt", "fc"):
            for category in categories:
                for file in made_files(scratch, data, category, mode):
                    file.check()
            for category in RELEVANCE:
                made_relevance(scratch, data, category, mode).check()
        check_files(scratch, data)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
