"""Program of a rendering process: read a request, render a chat or decode an image, reply, until its link ends.

Started by ``renderer``. It has no threads and no state besides caches, may be killed at any moment, and ends with
the server. Its limits are a second line of defence after the sandbox: memory, no writing to files, no core dumps.
"""

from __future__ import annotations

import os
import resource
import sys

import msgspec

from enginehouse.contract.errors import RenderError
from enginehouse.pipeline.prompt.pixels import decode_image
from enginehouse.pipeline.prompt.render_messages import (
    Checked,
    CheckTemplate,
    Decode,
    Decoded,
    Failed,
    Ready,
    Remember,
    Render,
    Rendered,
    Reply,
    decode_request,
    encode,
)
from enginehouse.pipeline.prompt.sandbox import TemplateExhausted
from enginehouse.pipeline.prompt.templates import check, render
from enginehouse.workers.ipc import FrameTooLarge, Link, become_child


def main(max_chars: int, memory_bytes: int) -> None:
    """Serve requests until the server closes the link.

    Args:
        max_chars: maximum length of a rendered prompt in characters.
        memory_bytes: maximum memory that rendering may allocate.
    """
    link = become_child()
    _limit(memory_bytes)
    link.send(encode(Ready()))
    _serve(link, max_chars)
    os._exit(0)


def _serve(link: Link, max_chars: int) -> None:
    remembered: dict[int, Remember] = {}
    while (payload := link.receive()) is not None:
        request = decode_request(payload)
        if isinstance(request, Remember):
            if request.forget:
                remembered.clear()
            remembered[request.key] = request
            continue
        reply = _answer(request, remembered, max_chars)
        try:
            link.send(encode(reply))
        except FrameTooLarge as error:
            link.send(encode(Failed(f"The rendered prompt is too long: {error}.", "messages")))
        except UnicodeEncodeError:  # templates can write any character, also into their refusals
            link.send(encode(_without_surrogates(reply)))
        if isinstance(reply, Failed) and reply.exhausted:
            return


def _answer(request: Render | CheckTemplate | Decode, remembered: dict[int, Remember], max_chars: int) -> Reply:
    try:
        if isinstance(request, CheckTemplate):
            check(request.template)
            return Checked()
        if isinstance(request, Decode):
            return Decoded(*decode_image(request.data, request.target_pixels))
        known = remembered[request.key]
        prompt = msgspec.structs.replace(request.prompt, template=known.template, special_tokens=known.special_tokens)
        return Rendered(render(prompt, max_chars))
    except RenderError as error:
        return Failed(error.message, error.param, isinstance(error, TemplateExhausted))
    except MemoryError:
        if isinstance(request, Decode):
            return Failed("its decoding needs too much memory; send a smaller image", "messages", exhausted=True)
        return Failed("The chat template needs too much memory.", "messages", exhausted=True)


def _without_surrogates(reply: Reply) -> Failed:
    """Return the failure to send instead of a reply that cannot be encoded."""
    if not isinstance(reply, Failed):
        return Failed("The chat template wrote a lone surrogate, which is not text.", "messages")
    message, param = (text.encode("utf-8", "replace").decode() for text in (reply.message, reply.param or "messages"))
    return Failed(message, param, reply.exhausted)


def _limit(memory_bytes: int) -> None:
    """Limit allocations from now on; libraries may already have reserved any amount of address space."""
    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":  # macOS accepts a limit of the address space and ignores it
        with open("/proc/self/statm", encoding="ascii") as statm:
            reserved_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = reserved_bytes + memory_bytes
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
