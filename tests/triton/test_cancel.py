"""Cancellations at any moment on a real Triton server: neighbours notice nothing, and nothing is left."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from tests.tiny_llm import prompt
from tests.triton.conftest import exactly, idle
from tests.triton_grpc import RequestFailed
from tests.triton_requests import Ask, ask
from tests.triton_server import TritonServer, wait_for
from trtllm_shadowkv import LLM

CANCELLED = "the request was cancelled"


def victim(seed: int) -> dict[str, Any]:
    """A request that would run for a long time; most prompts are long enough to be sealed."""
    length = random.Random(seed).choice([20, 400, 1500, 3000])
    return {"input_ids": prompt(length, seed), "stream": True, **exactly(3000)}


def by_grpc(server: TritonServer, seed: int, pieces: int) -> None:
    """The client cancels its stream; without pieces the request may not have come yet."""
    with server.grpc_stream("tiny", **victim(seed)) as stream:
        for _ in range(pieces):
            assert not stream.next()["final"]


def by_http(server: TritonServer, seed: int, pieces: int) -> None:
    """The client closes its connection."""
    if pieces == 0:
        server.request("POST", "/v2/models/tiny/generate_stream", victim(seed)).close()
        return
    with closing(server.generate_stream("tiny", **victim(seed))) as responses:  # type: ignore[type-var]
        for _ in range(pieces):
            assert "finish_reason" not in next(responses)


def by_stop(server: TritonServer, seed: int, pieces: int) -> None:
    """Another client names the request's id; then there is one final response, and it is the last one."""
    name = f"victim {seed}"
    with server.grpc_stream("tiny", request_id=name, **victim(seed)) as stream:
        for _ in range(pieces + 1):
            assert not stream.next()["final"]
        assert server.generate("tiny", stop=True, id=name)["finish_reason"] == "cancelled"
        with pytest.raises(RequestFailed, match=CANCELLED):
            list(stream)
        stream.send(request_id="after", **Ask([5, 6, 7], exactly(2)).inputs)
        after = stream.next()
        assert (after["id"], after["final"], after["sequence_length"]) == ("after", True, 2)


def test_fifty_cancellations_under_load(server: TritonServer, tiny_llm: LLM) -> None:
    neighbours = [
        Ask(prompt(5), exactly(60, temperature=1.0, top_k=40, seed=1)),
        Ask(prompt(700), exactly(40, temperature=1.0, seed=2)),
        Ask(prompt(300), exactly(30)),
    ]
    alone = [one.alone(tiny_llm).token_ids for one in neighbours]
    before = server.metrics("tiny")
    over = threading.Event()
    rng = random.Random(0)
    kinds = [by_grpc, by_http, by_stop]
    cases = [(kinds[i % 3], i, rng.choice([0, 1, 2, 5, 20, 60])) for i in range(50)]

    def neighbour(i: int) -> int:
        rounds = 0
        while not over.is_set() or rounds == 0:
            way = ("generate", "generate_stream", "gRPC stream")[rounds % 3]
            assert ask(server, "tiny", neighbours[i], way).ids == alone[i], f"round {rounds} of neighbour {i}"
            rounds += 1
        return rounds

    with ThreadPoolExecutor(5) as clients:
        running = [clients.submit(neighbour, i) for i in range(3)]
        try:
            victims = [clients.submit(cancel, server, seed, pieces) for cancel, seed, pieces in cases]
            for one in victims:
                one.result(180)
        finally:
            over.set()
        assert all(one.result(180) > 1 for one in running)

    wait_for(lambda: idle(server, "tiny"), "all is given back")
    wait_for(lambda: server.metrics("tiny")["nv_inference_pending_request_count"] == 0, "the server knows it")
    values = server.metrics("tiny")
    cancelled = values["shadowkv_requests_total:cancelled"] - before["shadowkv_requests_total:cancelled"]
    assert 40 <= cancelled <= 50  # one that was cancelled before it was sent was never there
    assert values["shadowkv_requests_total:error"] == before["shadowkv_requests_total:error"]


def test_a_stop_ends_every_request_of_that_id_and_no_other(server: TritonServer, tiny_llm: LLM) -> None:
    other = Ask(prompt(50), exactly(400))
    streams = [server.grpc_stream("tiny", request_id=name, **victim(0)) for name in ("a", "a", "b")]
    try:
        kept = server.grpc_stream("tiny", request_id="c", stream=True, **other.inputs)
        streams.append(kept)
        for stream in streams[:3]:
            stream.next()
        assert server.generate("tiny", stop=True, id="a")["text_output"] == ""
        for stream in streams[:2]:
            with pytest.raises(RequestFailed, match=CANCELLED):
                list(stream)
        assert not streams[2].next()["final"]
        ids = [token for response in kept for token in response.get("output_ids", [])]
        assert ids == other.alone(tiny_llm).token_ids
        with pytest.raises(RequestFailed, match="no request 'a' is running"):
            server.generate("tiny", stop=True, id="a")
    finally:
        for stream in streams:
            stream.close()


def test_a_waiting_request_can_be_stopped(server: TritonServer) -> None:
    with server.grpc_stream("tiny", **victim(1)) as running:
        for _ in range(3):
            running.send(**victim(1))
        wait_for(lambda: server.metrics("tiny")["shadowkv_requests_running"] == 4, "four rows run")
        with server.grpc_stream("tiny", request_id="late", **victim(2)) as waiting:
            wait_for(lambda: server.metrics("tiny")["shadowkv_requests_waiting"] == 1, "one waits")
            server.generate("tiny", stop=True, id="late")
            with pytest.raises(RequestFailed, match=CANCELLED):
                list(waiting)
