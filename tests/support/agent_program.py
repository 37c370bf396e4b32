"""A harness as a program: two turns over HTTP, with the variables that the official clients read."""

import json
import os
import sys
import urllib.request


def chat(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 12}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    call = urllib.request.Request(url, body, headers)  # noqa: S310  (http, as the gateway says)
    with urllib.request.urlopen(call) as reply:  # noqa: S310
        return json.load(reply)["choices"][0]["message"]["content"]


given = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": given["prompt"]}]
messages += [{"role": "assistant", "content": chat(messages)}, {"role": "user", "content": "="}]
print(chat(messages))
