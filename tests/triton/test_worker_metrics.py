"""What the process that holds the engine measures."""

from __future__ import annotations

import time

from tests.triton.worker_client import NAN, Client, alone, inputs, prompt
from trtllm_shadowkv import LLM
from trtllm_shadowkv.triton import worker


def test_the_first_message_has_all_metrics(client: Client, llm: LLM) -> None:
    client.wait(lambda: bool(client.messages), "the first message came")
    ready = client.messages[0]
    assert (ready["op"], ready["metrics"]) == ("ready", [list(row) for row in worker.METRICS])
    assert {name for name, _, _ in ready["values"]} == {name for name, _, _ in worker.METRICS} - {"shadowkv_hit_rate"}
    values = {f"{name}{''.join(labels.values())}": value for name, labels, value in ready["values"]}
    assert values.pop("shadowkv_device_memory_bytes") == llm.usage().device_memory
    assert values.pop("shadowkv_host_memory_bytes") == llm.usage().host_memory
    assert set(values.values()) == {0}
    assert {name for name in values if "requests_total" in name} == {
        f"shadowkv_requests_total{reason}" for reason in ("stop", "length", "cancelled", "error")
    }


def test_a_request_is_counted_before_its_last_message(client: Client) -> None:
    for given, reason in ((inputs("a"), "length"), (inputs("a", stream=[True]), "length"), (inputs("a", 0), "error")):
        number = client.submit(given)
        client.answer(number)
        counts = [
            value
            for m in client.messages[: client.messages.index(client.of(number)[-1])]
            for name, labels, value in m.get("values", [])
            if (name, labels) == ("shadowkv_requests_total", {"reason": reason})
        ]
        assert counts == list(range(client.metrics[f"requests_total:{reason}"] + 1))


def test_metrics_add_up(client: Client, llm: LLM) -> None:
    known = {name.removeprefix("shadowkv_"): kind for name, kind, _ in worker.METRICS}
    answers = [client.submit(inputs(what, 20)) for what in (prompt(300), prompt(600, 1), "abc")]
    token = alone(llm, "abc").outputs[0].token_ids[0]
    stopped = client.submit(inputs("abc", stop_token_ids=[token]))
    refused = [client.submit(inputs("abc", 0)) for _ in range(2)]
    failed = client.submit(inputs(NAN))
    for number in (*answers, stopped, *refused, failed):
        client.answer(number)
    cancelled = [client.submit(inputs("abcde", 3000, stream=[True])) for _ in range(2)]
    for number in cancelled:
        client.started(number)
    client.wait(lambda: client.metrics["requests_running"] == 2, "both run")
    assert client.metrics["device_memory_used_bytes"] > 0
    assert client.metrics["device_memory_bytes"] == llm.usage().device_memory
    assert client.metrics["host_memory_bytes"] == llm.usage().host_memory
    for number in cancelled:
        client.cancel(number)
        client.answer(number)
    reasons = {"length": 3, "stop": 1, "error": 3, "cancelled": 2}
    assert {name.partition(":")[2]: n for name, n in client.metrics.items() if ":" in name} == reasons
    assert client.metrics["prompt_tokens_total"] == 300 + 600 + 3 + 3 + 1 + 2 * 5
    pieces = [m["outputs"] for number in cancelled for m in client.of(number) if m["op"] == "response"]
    seen = sum(len(piece.get("output_ids", ())) for piece in pieces)
    assert seen <= client.metrics["generated_tokens_total"] - (3 * 20 + 1) < 2 * 3000
    outputs = [client.of(number)[-1]["outputs"] for number in answers]
    for name, output in (
        ("bytes_fetched_total", "shadowkv_bytes_fetched"),
        ("sealed_tokens_total", "shadowkv_sealed_tokens"),
    ):
        assert client.metrics[name] >= sum(o[output][0] for o in outputs) > 0
    hits, misses = client.metrics["chunks_hit_total"], client.metrics["chunks_missed_total"]
    assert client.metrics["hit_rate"] == hits / (hits + misses)
    assert {name.partition(":")[0] for name in client.metrics} == set(known)
    gauges = ("requests_waiting", "requests_running", "device_memory_used_bytes", "host_memory_used_bytes")
    client.wait(lambda: all(client.metrics[name] == 0 for name in gauges), "gauges are zero")
    assert {name for name, kind in known.items() if kind == "COUNTER"} == {n for n in known if n.endswith("_total")}


def test_metrics_that_did_not_change_are_not_sent(client: Client) -> None:
    client.wait(lambda: bool(client.messages), "the first message came")
    time.sleep(3 * worker._INTERVAL)
    assert len(client.messages) == 1
