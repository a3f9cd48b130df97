"""Typed access to a mapping that came from JSON."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any

from trtllm_shadowkv.errors import ConfigError, nearest

_ABSENT = object()
_LARGEST = 2**31 - 1


class JsonReader:
    """A mapping with typed access to its keys.

    Every method raises :class:`ConfigError`, which says where the mapping came from, for a value of another kind.
    ``default`` stands in for a key that is absent or null; without one the key is required.
    """

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ConfigError(f"{where} holds {type(data).__name__}", "a JSON object that describes a model")
        self.data: dict[str, Any] = data
        self.where = where

    def error(self, key: str, expected: str, todo: str = "") -> ConfigError:
        if key in self.data:
            return ConfigError(f"{self.where}: {key} is {short(self.data[key])}", expected, todo)
        return ConfigError(f"{self.where} has no {key}{nearest(key, [*map(str, self.data)])}", expected, todo)

    def integer(self, key: str, default: Any = _ABSENT, low: int = 1) -> int:
        value = self.data.get(key)
        if value is None and default is not _ABSENT:
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _LARGEST:
            raise self.error(key, f"a whole number from {low} to {_LARGEST}")
        return value

    def positive(self, key: str, default: Any = _ABSENT) -> float:
        value = self.data.get(key)
        if value is None and default is not _ABSENT:
            return float(default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self.error(key, "a positive, finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def token_ids(self, key: str, default: int | None) -> tuple[int, ...]:
        """Here null is a value: no token. ``default`` is for an absent key only."""
        value = self.data.get(key, default)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= _LARGEST for v in values):
            raise self.error(key, "a token id, a list of token ids or null")
        return tuple(values)

    def token_id(self, key: str, default: int | None) -> int | None:
        ids = self.token_ids(key, default)
        if len(ids) > 1:
            raise self.error(key, "one token id or null")
        return ids[0] if ids else None

    def exactly(self, key: str, wanted: Any, what: str) -> None:
        """Refuse any value but ``wanted``, null and absent; ``what`` names the unsupported thing."""
        if self.data.get(key) not in (None, wanted):
            raise self.error(key, repr(wanted), f"{what} is not supported")
