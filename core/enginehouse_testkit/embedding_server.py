"""OpenAI's embeddings address over a function, for an embedder that no backend opens."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["embedding_server"]

_Embed = Callable[[Sequence[str]], NDArray[np.float32]]


@contextlib.contextmanager
def embedding_server(embed: _Embed) -> Iterator[str]:
    """Serve a function of texts, which returns ``(num_texts, d)``, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"data": [{"id": "embedder", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            rows = np.asarray(embed(body["input"]), "<f4")
            items = [{"index": i, "embedding": base64.b64encode(row.tobytes()).decode()} for i, row in enumerate(rows)]
            self._answer({"data": items, "usage": {"prompt_tokens": len(rows)}})

        def _answer(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
