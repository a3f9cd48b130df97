"""Requests in words that Triton and LLM share, in each way that the server takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.triton_server import TritonServer
from trtllm_shadowkv import LLM, AttentionParams, RequestOutput, SamplingParams
from trtllm_shadowkv.request import CompletionOutput


@dataclass(frozen=True)
class Ask:
    """A request in words that Triton and LLM share; settings: inputs of one, keywords of SamplingParams of the other.

    ``stop``, ``mode`` (of attention) and ``chunks`` (its top_k) have other names in one of the two.
    """

    prompt: str | list[int]
    settings: Mapping[str, Any]
    stop: Sequence[str] = ()
    mode: Literal["shadowkv", "dense"] | None = None
    chunks: int | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """For Triton."""
        inputs = {"text_input" if isinstance(self.prompt, str) else "input_ids": self.prompt, **self.settings}
        others = {"stop_words": list(self.stop) or None, "attention_mode": self.mode, "attention_top_k": self.chunks}
        return inputs | {name: value for name, value in others.items() if value is not None}

    def alone(self, llm: LLM) -> CompletionOutput:
        """What LLM answers in this process when it does nothing else."""
        params = SamplingParams(stop=list(self.stop), **self.settings)
        output = llm.generate(self.prompt, params, attention=AttentionParams(self.mode, self.chunks))
        assert isinstance(output, RequestOutput)
        return output.outputs[0]


@dataclass(frozen=True)
class Got:
    """What came for a request; last: the last response, which has the figures; pieces: their texts."""

    text: str
    ids: list[int]
    last: dict[str, Any]
    pieces: list[str]


WAYS = ("generate", "generate_stream", "gRPC", "gRPC stream")


def ask(server: TritonServer, model: str, request: Ask, way: str = "generate", **more: Any) -> Got:
    """Send a request in one of ``WAYS``; more: inputs that LLM has no equal of."""
    inputs = {**request.inputs, **more}
    if way == "generate":
        responses = [server.generate(model, **inputs)]
    elif way == "generate_stream":
        responses = list(server.generate_stream(model, stream=True, **inputs))
    else:
        with server.grpc_stream(model, stream=way == "gRPC stream", **inputs) as stream:
            responses = list(stream)
    return got(responses)


def got(responses: list[dict[str, Any]]) -> Got:
    """Put the responses to a request together; see that they fit each other."""
    count = 0
    for response in responses:
        count += len(response.get("output_ids", []))
        assert response["sequence_length"] == count
        assert ("finish_reason" in response) == (response is responses[-1])
    pieces = [response["text_output"] for response in responses]
    ids = [token for response in responses for token in response.get("output_ids", [])]
    return Got("".join(pieces), ids, responses[-1], pieces)
