"""What a benchmark tells: a JSON line for each figure as it comes, and at the end a table on stderr."""

import json
import sys


class Figures:
    def __init__(self, benchmark):
        self.benchmark, self.rows = benchmark, []

    def add(self, suite, engine, name, value, goal=None, at_least=True, **more):
        """`more` stands in the line; of it `limit` in the table, too: what is known to keep it from its goal."""
        good = None if goal is None else (value >= goal if at_least else value <= goal)
        row = {"benchmark": self.benchmark, "suite": suite, "engine": engine, "figure": name, "value": round(value, 3),
               "goal": goal, "at_least": at_least if goal is not None else None, "good": good} | more
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def table(self):
        """Whether a goal is missed."""
        for row in self.rows:
            goal = "" if row["goal"] is None else f"{'>=' if row['at_least'] else '<='} {row['goal']:g}"
            verdict = {True: "ok", False: "MISSED", None: ""}[row["good"]]
            limit = f" ({row['limit']})" if "limit" in row else ""
            print(f"{row['suite']:<16} {row['engine']:<14} {row['figure']:<46} {row['value']:>8g}  {goal:<8} {verdict}{limit}",
                  file=sys.stderr)
        return any(row["good"] is False for row in self.rows)
