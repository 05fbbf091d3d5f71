#!/usr/bin/env bash
# Expected: litellm sends the stop texts that it is given to a server of one's own, or says that there are too many.
# Behavior (litellm 1.110.0): OpenAI allows four, so the fifth and later ones are dropped without a warning, also for vLLM
# and other servers that allow more.
# Seen:
#   openai       ['a', 'b', 'c', 'd']
#   hosted_vllm  ['a', 'b', 'c', 'd']
# Why it matters: a text does not end where it should, which depends on the order of the stop texts and looks like a fault
# of the server.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "litellm==1.110.0" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up of prices

import litellm

MESSAGE = {"role": "assistant", "content": "x"}
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


requests = []
server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for provider in ("openai", "hosted_vllm"):
    litellm.completion(
        model=f"{provider}/m",
        api_base=f"http://127.0.0.1:{server.server_port}/v1",
        api_key="x",
        messages=[{"role": "user", "content": "hello"}],
        stop=["a", "b", "c", "d", "e", "f"],
    )
    print(f"{provider:<12} {requests[-1]['stop']}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
