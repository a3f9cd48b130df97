"""A TensorRT module for tests: it notes what is asked of it in FAKE_LOG and does what FAKE says.

FAKE: nothing (all goes well), parse, build, abort, kill, hang, raise, start (abort when it is loaded), old (no progress
monitor, no flag for strongly typed networks), other (every timing cache is of another machine).
"""

from __future__ import annotations

import enum
import json
import os
import signal
import sys
import time
from types import SimpleNamespace

__version__ = "10.6.0"
_fake = os.environ.get("FAKE", "")


def _note(what, *values):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps([what, *values]) + "\n")


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class _Registry:
    def load_library(self, path):
        _note("library", path)
        if _fake == "start":
            os.abort()

    def get_creator(self, name, version, namespace):
        return None if _fake == "creator" else (name, version, namespace)


def get_plugin_registry():
    return _Registry()


class NetworkDefinitionCreationFlag(enum.IntEnum):
    if _fake != "old":
        STRONGLY_TYPED = 1


if _fake != "old":

    class IProgressMonitor:
        pass


class _Cache:
    def __init__(self, content):
        self.content = content

    def serialize(self):
        return self.content + b"+"


class _Config:
    def __init__(self):
        self.progress_monitor = None

    def __setattr__(self, name, value):
        if name == "max_aux_streams":
            _note(name, value)
        super().__setattr__(name, value)

    def add_optimization_profile(self, profile):
        _note("profile", profile)

    def create_timing_cache(self, content):
        _note("cache", content.decode())
        return _Cache(content)

    def set_timing_cache(self, cache, ignore_mismatch):
        self.cache = cache
        return _fake != "other" or not cache.content

    def get_timing_cache(self):
        return self.cache


class _Profile(dict):
    def set_shape(self, name, least, likely, most):
        self[name] = [*least, *likely, *most]


class Builder:
    def __init__(self, logger):
        self.logger = logger

    def create_network(self, flags):
        _note("network", flags)

    def create_builder_config(self):
        return _Config()

    def create_optimization_profile(self):
        return _Profile()

    def build_serialized_network(self, network, config):
        self.logger.log(ILogger.Severity.INFO, "a line of interest")
        print("a line on standard output")
        monitor = config.progress_monitor
        if monitor:
            monitor.phase_start("all", None, 2)
            monitor.step_complete("all", 0)
        _note("pid", os.getpid())
        if _fake == "build":
            self.logger.log(ILogger.Severity.WARNING, "a warning")
            self.logger.log(ILogger.Severity.ERROR, "the first\nerror")
            for i in range(9):
                self.logger.log(ILogger.Severity.ERROR, f"error {i}")
            return None
        if _fake == "abort":
            sys.stderr.write("terminate called\n")
            os.abort()
        if _fake == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if _fake == "raise":
            raise AttributeError("no such thing")
        while _fake == "hang":
            time.sleep(0.05)
        return b"compiled"


class OnnxParser:
    num_errors = 1

    def __init__(self, network, logger):
        pass

    def parse_from_file(self, path):
        with open(path, "rb") as file:
            _note("parse", len(file.read()))
        return _fake != "parse"

    def get_error(self, i):
        return SimpleNamespace(desc=lambda: "no importer for this node")
