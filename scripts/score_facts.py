#!/usr/bin/env python3
"""Score an evalrt output file of the `facts` suite.

    score_facts.py ANSWERS.jsonl OUTPUT.jsonl

Prints one JSON object: {"correct":n,"total":n,"per_item":{custom_id:true|false|null},"coverage":
{"items":n,"answered":n,"failed":n,"failures":{class:n},"not_run":n,"complete":true|false}}.
null means that the item was not answered (an error, or no output line): it is
never counted as a wrong answer. "total" are all items, so a score is correct / answered, and stands
beside its coverage. An item is correct if the text after its last
"Answer:" equals one of the accepted strings, apart from case, spaces, a leading
article and punctuation around it.
"""

import json
import re
import sys
import unicodedata

from coverage_words import not_complete, outcome

ANSWER = re.compile(r"answer\s*:\s*([^\n]*)", re.IGNORECASE)
ARTICLE = re.compile(r"^(?:the|a|an)\s+")


def read_jsonl(path):
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError:
                    raise SystemExit(f"score_facts: {path}:{number}: not JSON")
                if not isinstance(row, dict) or "custom_id" not in row:
                    raise SystemExit(f"score_facts: {path}:{number}: no custom_id")
                yield row
    except OSError as error:
        raise SystemExit(f"score_facts: cannot read {path}: {error.strerror}")


def normalise(text):
    text = unicodedata.normalize("NFKC", text).casefold()
    text = " ".join(text.split()).strip(" .,:;!?\"'*_`()[]")
    return ARTICLE.sub("", text)


def answer_text(row):
    """The text of an answered item, or None if it was not answered."""
    response = row.get("response")
    if row.get("error") or not isinstance(response, dict):
        return None
    if response.get("status_code") != 200:
        return None
    body = response.get("body")
    choices = body.get("choices") if isinstance(body, dict) else None
    if not choices:
        return None
    # A model that stops at once answers with no text: wrong, but answered.
    return (choices[0].get("message") or {}).get("content") or ""


def is_correct(text, accepted):
    found = ANSWER.findall(text)
    return bool(found) and normalise(found[-1]) in {normalise(a) for a in accepted}


def main():
    if len(sys.argv) != 3:
        raise SystemExit("usage: score_facts.py ANSWERS.jsonl OUTPUT.jsonl")
    accepted = {row["custom_id"]: row["answers"] for row in read_jsonl(sys.argv[1])}
    per_item = dict.fromkeys(accepted)
    failures = {}
    for row in read_jsonl(sys.argv[2]):
        item = row["custom_id"]
        if item not in accepted:
            raise SystemExit(f"score_facts: {item} in {sys.argv[2]} is not in {sys.argv[1]}")
        text = answer_text(row)
        per_item[item] = None if text is None else is_correct(text, accepted[item])
        if text is None:
            name = (row.get("error") or {}).get("code") or "malformed"
            failures[name] = failures.get(name, 0) + 1
    correct = sum(value is True for value in per_item.values())
    answered = sum(value is not None for value in per_item.values())
    failed = sum(failures.values())
    coverage = {"items": len(per_item), "answered": answered, "failed": failed, "failures": failures,
                "not_run": len(per_item) - answered - failed, "complete": answered == len(per_item)}
    line = f"score_facts: {correct} of {answered} correct"
    if not coverage["complete"]:
        line += ", " + not_complete(outcome(len(per_item), coverage))
    print(line, file=sys.stderr)
    print(json.dumps({"correct": correct, "total": len(per_item), "per_item": per_item,
                      "coverage": coverage}))


if __name__ == "__main__":
    main()
