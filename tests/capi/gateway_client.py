"""Asks an OpenAI server as a harness does, all at once:  gateway_client.py URL TOKEN QUESTION...

Prints an answer a line, in the order of the questions.
"""

import http.client
import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

url, token, *questions = sys.argv[1:]


def ask(question):
    body = {"model": "of the client's own", "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {
        "Content-Type": "application/json", "Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, http.client.HTTPException):
        return "no answer"


with ThreadPoolExecutor(len(questions)) as pool:
    print("\n".join(pool.map(ask, questions)))
