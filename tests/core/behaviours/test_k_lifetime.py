"""Group K at the HTTP level: clients that leave."""

import time

from .client import Server


def leave_after(server: Server, num_chunks: int, **fields) -> None:
    body = server.chat_body(stream=True, max_tokens=1_000_000, ignore_eos=True, **fields)
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        for number, _ in enumerate(response.iter_raw()):
            if number + 1 >= num_chunks:
                return


def check_slot_is_free(server: Server) -> None:
    began = time.perf_counter()
    server.chat(max_tokens=4)
    assert time.perf_counter() - began < 2


def test_h33_leaving_a_stream_frees_the_slot(server: Server) -> None:
    leave_after(server, 3)
    check_slot_is_free(server)


def test_h33_fifty_aborted_streams(server: Server) -> None:
    for _ in range(50):
        leave_after(server, 1)
    check_slot_is_free(server)


def test_h33_one_slot(scripted) -> None:
    server = scripted("endless")
    for _ in range(10):
        leave_after(server, 3)
        check_slot_is_free(server)
