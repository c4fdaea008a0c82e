"""A proxy in front of a server that remembers what passes: who of a router's servers got what."""

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Tee:
    """`asked`: of each POST its question (the last message), body and headers."""

    def __init__(self, port):
        tee = self
        self.asked, self.lock = [], threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.command == "POST":
                    with tee.lock:
                        data = json.loads(body)
                        messages = data.get("messages") or [{"content": data.get("prompt")}]
                        tee.asked.append((messages[-1]["content"], data, dict(self.headers)))
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while piece := answer.read1(65536):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
                connection.close()

            do_GET = do_POST = pass_on

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_):
                pass  # a client that has gone

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def questions(self):
        with self.lock:
            return [question for question, data, _ in self.asked if data.get("max_tokens") != 1
                    and data.get("max_completion_tokens") != 1]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
