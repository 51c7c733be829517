"""Program of a rendering process: read a request, render, reply, until the pipe closes.

Started by ``renderer`` as ``python -m enginehouse.pipeline.prompt.render_process``. It has no threads and no state
besides caches, may be killed at any moment, and ends with its parent. Its limits are a second line of defence after the
sandbox: memory, no writing to files, no core dumps.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from enginehouse.contract.errors import RenderError
from enginehouse.pipeline.prompt.render_frames import (
    HEADER_BYTES,
    Checked,
    CheckTemplate,
    Failed,
    Ready,
    Remember,
    Render,
    Rendered,
    Reply,
    Request,
    pack,
)
from enginehouse.pipeline.prompt.sandbox import TemplateExhausted
from enginehouse.pipeline.prompt.templates import check, render

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main(parent_pid: int, max_chars: int, memory_bytes: int) -> None:
    """Serve requests from standard input until it closes.

    Args:
        parent_pid: this process ends when the process with this id ends.
        max_chars: maximum length of a rendered prompt in characters.
        memory_bytes: maximum memory that rendering may allocate.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the parent decides
    _die_with_parent(parent_pid)
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed output must not get into the replies
    _limit(memory_bytes)
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        _send(replies, Ready())
        _serve(requests, replies, max_chars)
    os._exit(0)  # nothing to clean up; avoids a second BrokenPipeError from closing files


def _serve(requests: BinaryIO, replies: BinaryIO, max_chars: int) -> None:
    decode = msgspec.msgpack.Decoder(Request).decode
    remembered: dict[int, Remember] = {}
    while len(header := requests.read(HEADER_BYTES)) == HEADER_BYTES:
        request = decode(requests.read(int.from_bytes(header, "big")))
        if isinstance(request, Remember):
            if request.forget:
                remembered.clear()
            remembered[request.key] = request
            continue
        reply = _answer(request, remembered, max_chars)
        _send(replies, reply)
        if isinstance(reply, Failed) and reply.exhausted:
            return


def _answer(request: Render | CheckTemplate, remembered: dict[int, Remember], max_chars: int) -> Reply:
    try:
        if isinstance(request, CheckTemplate):
            check(request.template)
            return Checked()
        known = remembered[request.key]
        prompt = msgspec.structs.replace(request.prompt, template=known.template, special_tokens=known.special_tokens)
        return Rendered(render(prompt, max_chars))
    except RenderError as error:
        return Failed(error.message, error.param, isinstance(error, TemplateExhausted))
    except MemoryError:
        return Failed("The chat template needs too much memory.", "messages", exhausted=True)


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(pack(reply))
    replies.flush()


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform != "win32" and os.getppid() != parent_pid:  # it ended before the request took effect
        sys.exit(1)


def _limit(memory_bytes: int) -> None:
    """Limit allocations from now on; libraries may already have reserved any amount of address space."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - only on Unix

    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":  # macOS accepts a limit of the address space and ignores it
        with open("/proc/self/statm", encoding="ascii") as statm:
            reserved_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = reserved_bytes + memory_bytes
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
