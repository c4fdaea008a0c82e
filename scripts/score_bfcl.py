#!/usr/bin/env python3
"""Scores a result file of a single-turn BFCL category with bfcl_eval's own checker, item by item.

    score_bfcl.py [--data DIR] [--mode auto|prompt|fc] [--report RUN.json] --category CATEGORY RESULT_FILE
    score_bfcl.py --packages

Prints {"correct": n, "total": n, "per_item": {id: true|false|null}, "coverage": {"items": n,
"answered": n, "failed": n, "failures": {class: n}, "no_verdict": n, "not_run": n, "complete":
true|false}}. The file may hold any part of the category; an item without a row is in neither. null is
an item without a verdict: the row tells of an error of the run and not of the model, or bfcl_eval's
checker gave up; "total" does not count it. The coverage is of the whole category. evalrt writes no row
of an item that failed: --report takes what `evalrt bfcl --json` wrote of the run (of this category
alone), and these count as failed, by class; without it they are among the "not_run", which have no
row. "error_row" is the class of rows that tell of an error, as bfcl_eval writes them.
Messages go to stderr. Exit codes: 0 scored, 1 cannot work here, 2 bad usage or input.

As bfcl_eval does it, arithmetic in a model's answer is worked out with Python's eval().
"""

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import tempfile
import types
import warnings
from pathlib import Path

from coverage_words import not_complete, outcome

# Python 3.10 or later. Pinned where bfcl_eval pins. bfcl_eval itself is installed with --no-deps: the
# rest of what it asks for (torch by way of others) belongs to other categories and models' handlers.
PACKAGES = ["tenacity>=8.5.0", "overrides", "filelock==3.20.0", "python-dotenv>=1.0.1", "tqdm"]
PACKAGES_NO_DEPS = ["bfcl_eval==2026.3.23"]
# For answers in Java and JavaScript. From Python 3.13 on pip would have to compile tree_sitter 0.21.3
# (later ones have another interface); without it these two categories cannot be scored.
if sys.version_info < (3, 13):
    PACKAGES += ["tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4"]

# The checker looks a model's traits up in a table that imports every vendor's SDK, and shares a file
# with the tables of the leaderboard (numpy, pandas). Nothing of these runs here: they are stubs.
UNUSED = """anthropic boto3 cohere datamodel_code_generator google httpx mistralai openai qwen_agent
    requests writerai numpy pandas""".split()

MODEL = "evalrt"
SECONDS_PER_ITEM = 5  # an answer like f(x=9**9**9) would keep eval() busy for ever


class Stub(type):
    """A class without use, and so is its every member: to be named, derived from and caught."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name, (Exception,), {})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these modules and all below them, full of stubs."""

    class Module(types.ModuleType):
        __getattr__ = Stub.__getattr__

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return self.Module(spec.name)

    def exec_module(self, module):
        pass


class TooLong(BaseException):
    """No Exception: bfcl_eval takes each for an answer that cannot be decoded."""


def too_long(signum, frame):
    raise TooLong(f"took longer than {SECONDS_PER_ITEM} s")


def say(message):
    print(f"score_bfcl: {message}", file=sys.stderr)


def refuse(message):
    say(message)
    sys.exit(2)


def read_rows(path):
    """The rows by id; of rows with one id the last counts. A line cut off at the end is no row."""
    rows = {}
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        refuse(f"{path}: {error.strerror}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[row["id"]] = row
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                refuse(f"{path}:{number}: no row of a result file: {error!r}")
            say(f"{path}:{number}: left out, it was cut off")
    return rows


def read_failures(path):
    """What failed in a run, by class: these items have no row."""
    try:
        failures = json.loads(Path(path).read_text(encoding="utf-8"))["failures"]
        if all(type(n) is int and n >= 0 for n in failures.values()):
            return failures
    except OSError as error:
        refuse(f"{path}: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    refuse(f"{path}: no report of a run, as `evalrt bfcl --json FILE` writes it")


def no_answer(row):
    """Whether the row tells of an error of the run, which the model is not to blame for."""
    return ("result" not in row or "traceback" in row
            or str(row["result"]).startswith("Error during inference:"))


def stub_parsers():
    """The parsers are imported along; for answers in Python they are not used."""
    class Anything:
        def __init__(self, *args): pass
        def set_language(self, language): pass

    for name in ("tree_sitter", "tree_sitter_java", "tree_sitter_javascript"):
        module = sys.modules[name] = types.ModuleType(name)
        module.Language = module.Parser = Anything
        module.language = lambda: 0


def load_bfcl(category, scratch):
    """bfcl_eval's modules of the checker and of the data."""
    os.environ["BFCL_PROJECT_ROOT"] = scratch  # where importing it makes folders
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of the answers it parses
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for name in ("NameConstant", "Ellipsis"):  # of ast.Constant; bfcl_eval asks for them with
        if not hasattr(ast, name):             # isinstance(), and Python 3.14 has them no more
            setattr(ast, name, ())
    sys.meta_path.insert(0, Stubs(UNUSED))
    try:
        if "java" not in category:
            stub_parsers()
        import bfcl_eval.utils as utils
        import bfcl_eval.eval_checker.eval_runner as runner
    except ImportError as error:
        if "tree_sitter" in str(error) and not any("tree_sitter" in name for name in PACKAGES):
            sys.exit(f"score_bfcl: {category} needs tree_sitter 0.21.3; use a Python before 3.13")
        sys.exit(f"score_bfcl: {error}; install what --packages prints, best into an environment of "
                 "its own, and run it with that Python")
    return utils, runner


def score(args, scratch):
    utils, runner = load_bfcl(args.category, scratch)
    from bfcl_eval.constants.category_mapping import SINGLE_TURN_CATEGORY
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    if args.category not in SINGLE_TURN_CATEGORY:
        refuse(f"no single-turn category: {args.category}; there are {' '.join(SINGLE_TURN_CATEGORY)}")
    if args.data:
        utils.PROMPT_PATH = Path(args.data)
        utils.POSSIBLE_ANSWER_PATH = Path(args.data) / "possible_answer"
    try:
        prompts = utils.load_dataset_entry(
            args.category, include_prereq=False, include_language_specific_hint=False)
        relevance = utils.is_relevance_or_irrelevance(args.category)
        answers = [None] * len(prompts) if relevance else utils.load_ground_truth_entry(args.category)
    except (OSError, ValueError) as error:
        refuse(f"cannot read the data of {args.category}: {error}")
    if len(prompts) != len(answers):
        refuse(f"{len(prompts)} questions and {len(answers)} answers of {args.category}")
    items = {prompt["id"]: (prompt, answer) for prompt, answer in zip(prompts, answers)}

    rows = read_rows(args.result_file)
    for id in rows:
        if id not in items:
            refuse(f"{args.result_file}: {id!r} is no item of {args.category}")
    answered = [row["result"] for row in rows.values() if not no_answer(row)]
    fc = args.mode == "fc" or args.mode == "auto" and any(type(one) is list for one in answered)

    class Handler(OpenAICompletionsHandler):
        """Decodes as the handler does whose requests evalrt sends, and has no client."""

        def __init__(self):
            self.is_fc_model = fc

    # Where functions are sent as tools their names have "_" for ".".
    runner.MODEL_CONFIG_MAPPING[MODEL] = types.SimpleNamespace(underscore_to_dot=fc)
    # A runner takes a whole file; given one row, its count is that row's verdict.
    runner.save_eval_results = lambda failing, correct, *rest: correct == 1
    handler = Handler()

    def verdict(row):
        prompt, answer = items[row["id"]]
        if relevance:
            return runner.relevance_file_runner(
                handler, [row], [prompt], MODEL, args.category, None)
        return runner.ast_file_runner(
            handler, [row], [prompt], [answer], args.category, MODEL, None)

    signal.signal(signal.SIGALRM, too_long)
    per_item = {}
    for id, row in rows.items():
        per_item[id] = None
        if no_answer(row):
            continue
        try:
            signal.alarm(SECONDS_PER_ITEM)
            per_item[id] = verdict(row)
        except (Exception, TooLong) as error:
            say(f"{id}: bfcl_eval's checker has no verdict: {type(error).__name__}: {error}")
        finally:
            signal.alarm(0)
    verdicts = [one for one in per_item.values() if one is not None]
    errors = sum(no_answer(row) for row in rows.values())
    failures = read_failures(args.report) if args.report else {}
    not_run = len(items) - len(rows) - sum(failures.values())
    if not_run < 0:
        refuse(f"{args.report} tells of {sum(failures.values())} failed, and {args.category} has "
               f"{len(items) - len(rows)} items without a row: it is of another run")
    if errors:
        failures = failures | {"error_row": errors}
    failed = sum(failures.values())
    coverage = {"items": len(items), "answered": len(rows) - errors, "failed": failed, "failures": failures,
                "no_verdict": len(rows) - errors - len(verdicts), "not_run": not_run,
                "complete": len(verdicts) == len(items)}
    line = f"{sum(verdicts)} of {len(verdicts)} correct"
    if not coverage["complete"]:
        line += ", " + not_complete(outcome(len(items), coverage))
    say(line)
    return {"correct": sum(verdicts), "total": len(verdicts), "per_item": per_item,
            "coverage": coverage}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--category", help="simple_python, ...")
    parser.add_argument("--data", metavar="DIR", help="bfcl_eval's data; default: the package's own")
    parser.add_argument("--mode", choices=["auto", "prompt", "fc"], default="auto",
                        help="how the answers were asked for; auto: fc if one has tool calls")
    parser.add_argument("--report", metavar="RUN.json",
                        help="what `evalrt bfcl --json` wrote of the run: which items failed, by class")
    parser.add_argument("--packages", action="store_true",
                        help="print what this Python's pip has to install, one requirement a line")
    parser.add_argument("result_file", metavar="RESULT_FILE", nargs="?")
    args = parser.parse_args()
    if args.packages:
        print("\n".join(PACKAGES + ["--no-deps " + name for name in PACKAGES_NO_DEPS]))
        return
    if not args.category or not args.result_file:
        parser.error("--category and RESULT_FILE are needed")

    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.redirect_stdout(sys.stderr):  # what is printed along is no result
            scores = score(args, scratch)
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
