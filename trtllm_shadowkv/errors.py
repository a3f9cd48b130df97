"""Every error this package raises on purpose. A message says what was found, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtllm_shadowkv.request import RequestOutput


class ShadowKVError(Exception):
    """Base of all errors of this package.

    Args:
        found: what is wrong, with the offending value.
        expected: what would have been right (optional).
        todo: what the user can do about it (optional).
    """

    def __init__(self, found: str, expected: str = "", todo: str = "") -> None:
        parts = [found, f"expected {expected}" if expected else "", todo]
        super().__init__("; ".join(p for p in parts if p))


class ConfigError(ShadowKVError, ValueError):
    """A configuration (YAML, keyword or config.json) that cannot be used."""


class CheckpointError(ShadowKVError):
    """A model directory that is incomplete, damaged or of an unsupported kind."""


class EngineError(ShadowKVError):
    """An engine directory that is incomplete, altered or of another schema."""


class RequestError(ShadowKVError, ValueError):
    """A generation request that is refused before it reaches the scheduler."""


class CapacityError(RequestError):
    """A request that can never fit into the memory this process was given."""


class StateError(ShadowKVError, RuntimeError):
    """The calls on a state came in an order, or with values, that the contract forbids."""


class NoRoomError(StateError):
    """What is asked for does not fit at present; it may once something else has ended. Nothing was taken."""


class GenerationError(ShadowKVError, RuntimeError):
    """A request failed while it ran (its neighbours go on).

    Attributes:
        outputs: from ``LLM.generate``: the results of the batch, None where a request failed.
    """

    outputs: Sequence[RequestOutput | None] = ()


class MissingDependencyError(ShadowKVError, ImportError):
    """An optional part (package, library, toolkit) that this call needs is not installed."""


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """`` (did you mean 'x'?)`` for the closest known name, or an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require(module: str, extra: str) -> None:
    """Raise :class:`MissingDependencyError` in one line unless ``module`` can be imported."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingDependencyError(
            f"the Python package {module!r} is not installed",
            todo=f"install it with: pip install 'trtllm-shadowkv[{extra}]'",
        )
