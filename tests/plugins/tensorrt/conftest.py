"""The compiled library's plugins, and TensorRT's headers to drive them with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.tensorrt.harness import Harness, HeadersMissing, NoPlugins, compile_harness
from tests.plugins.tensorrt.kinds import Logger
from trtllm_shadowkv import library


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The library's plugins; skips where TensorRT's headers are not on this machine.

    Where they are, a library without plugins is a fault.
    """
    try:
        compiled = compile_harness(tmp_path_factory.mktemp("harness"))
    except HeadersMissing as e:
        pytest.skip(str(e))
    try:
        harness = Harness(compiled, library.load().path.resolve())
    except NoPlugins as e:
        pytest.fail(str(e))
    yield harness
    harness.set_logger(Logger.NO_FINDER)


@pytest.fixture
def harness(plugins: Harness) -> Iterator[Harness]:
    """The same with an empty log; a line that a test does not take is a fault."""
    plugins.set_logger(Logger.COLLECTS)
    plugins.take_log()
    yield plugins
    assert plugins.take_log() == []
