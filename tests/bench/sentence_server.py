"""sentence-transformers behind OpenAI's address, in as few lines as it takes: ``uvicorn bench.sentence_server:app``."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any

from litestar import Litestar, get, post
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"], device="cpu")


@get("/health")
async def health() -> str:
    return "ready"


@post("/v1/embeddings", status_code=200)
async def embeddings(data: dict[str, Any]) -> dict[str, Any]:
    rows = await asyncio.to_thread(model.encode, data["input"])
    num_tokens = sum(map(len, model.tokenizer(data["input"])["input_ids"]))
    encoded = [base64.b64encode(row).decode() for row in rows]
    vectors = [{"object": "embedding", "index": index, "embedding": text} for index, text in enumerate(encoded)]
    return {"object": "list", "data": vectors, "model": data["model"], "usage": {"prompt_tokens": num_tokens}}


app = Litestar([embeddings, health], openapi_config=None)
