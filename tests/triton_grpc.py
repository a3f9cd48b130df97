"""gRPC to a Triton server, by tritonclient."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

LIMIT = 180.0
"""Seconds that anything may take."""
LISTS = ("output_ids", "output_log_probs")
"""Outputs of any number of elements; the others have one."""


class RequestFailed(Exception):
    """What the server answered in place of a response; status: of HTTP, 200 within a stream, None over gRPC."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class GrpcStream:
    """One stream of gRPC: iterate over the responses to a request. Closing it cancels what still runs."""

    def __init__(self, address: str, model: str) -> None:
        import tritonclient.grpc as triton

        self._model = model
        # By default clients of one process share their connections.
        arguments = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self._client = triton.InferenceServerClient(address, channel_args=arguments)
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._running = 0
        self._client.start_stream(callback=lambda result, error: self._answers.put((result, error)))

    def send(self, *tensors: Any, request_id: str = "", **inputs: Any) -> None:
        """Send a request: tensors as they are, and inputs as :func:`tensor` makes them."""
        made = [*tensors, *(tensor(name, value) for name, value in inputs.items())]
        self._client.async_stream_infer(self._model, made, request_id=request_id, enable_empty_final_response=True)
        self._running += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Responses up to the final one, each with the id of its request.

        Raises:
            RequestFailed: the server's message.
        """
        while True:
            response = self.next()
            final = response.pop("final")
            if len(response) > 1:
                yield response
            if final:
                return

    def next(self, limit: float = LIMIT) -> dict[str, Any]:
        """The next response of any request, with its ``id`` and whether it is the ``final`` one.

        Raises:
            RequestFailed: the server's message.
            queue.Empty: none came in time.
        """
        result, error = self._answers.get(timeout=limit)
        if error is not None:
            self._running -= 1
            raise RequestFailed(str(error)) from error
        response = result.get_response()
        values: dict[str, Any] = {"id": response.id}
        for output in response.outputs:
            array = result.as_numpy(output.name)
            assert array.shape[0] == 1 and array.ndim == 2
            values[output.name] = [v.decode() if isinstance(v, bytes) else v for v in array[0].tolist()]
        final = response.parameters["triton_final_response"].bool_param
        self._running -= final
        return listed(values) | {"final": final}

    @property
    def unread(self) -> int:
        """Responses that have come already."""
        return self._answers.qsize()

    def close(self) -> None:
        # Triton 2.51 never unloads a model whose stream is cancelled just after the final response.
        self._client.stop_stream(cancel_requests=self._running > 0)
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


TYPES: Mapping[str, str] = {
    **dict.fromkeys(("text_input", "stop_words", "bad_words", "attention_mode"), "BYTES"),
    **dict.fromkeys(("stream", "stop", "ignore_eos", "return_log_probs", "exclude_input_in_output"), "BOOL"),
    **dict.fromkeys(("temperature", "top_p", "min_p"), "FP32"),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "FP32"),
    **dict.fromkeys(("seed", "random_seed"), "UINT64"),
}
"""Of inputs; those that are missing here are INT32."""


def tensor(name: str, value: Any, datatype: str | None = None, shape: Sequence[int] | None = None) -> Any:
    """An input of shape [1, n], or of another shape or type."""
    import numpy as np
    import tritonclient.grpc as triton
    from tritonclient.utils import triton_to_np_dtype

    datatype = datatype or TYPES.get(name, "INT32")
    values = value if isinstance(value, list) else [value]
    if datatype == "BYTES":
        values = [v.encode() if isinstance(v, str) else v for v in values]
    array = np.array(values, dtype=triton_to_np_dtype(datatype)).reshape(shape or (1, len(values)))
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def listed(response: dict[str, Any]) -> dict[str, Any]:
    """JSON has a value in the place of a list of one."""
    for name, value in response.items():
        if name in LISTS and not isinstance(value, list):
            response[name] = [value]
        elif name not in LISTS and isinstance(value, list):
            (response[name],) = value
    return response
