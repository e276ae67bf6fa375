# SPDX-License-Identifier: Apache-2.0
"""A model endpoint on this machine that answers as a test says."""

import contextlib
import http.server
import json
import threading

__all__ = ["answer", "completion", "serving"]


@contextlib.contextmanager
def serving(*replies):
    """Serve one reply after another, the last for ever; yield (address, requests).

    A reply is (status, body), or a function that writes to the handler itself.
    """
    requests = []
    left = list(replies)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, dict(self.headers), json.loads(body)))
            reply = left.pop(0) if len(left) > 1 else left[0]
            if callable(reply):
                with contextlib.suppress(OSError):
                    reply(self)
                return
            status, data = reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(content):
    """Return the reply that holds an answer."""
    text = content if isinstance(content, str) else json.dumps(content)
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def answer(action, code, domain, *citations, summary="It is so."):
    """Return an answer as it is asked for."""
    return {
        "action": action,
        "reason_code": code,
        "domain": domain,
        "summary": summary,
        "citations": list(citations),
    }
