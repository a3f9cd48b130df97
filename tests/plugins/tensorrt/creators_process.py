"""Drives creators through TensorRT's Python bindings: steps in, what came of each out, both JSON.

    python creators_process.py LIBRARY < steps

A step is ["load"], ["unload"] or ["create", op, phase, fields], a field being [name, type, values]. Without a GPU
TensorRT's registry works, but Builder ends the process, Runtime too when it is used or deleted, and so may the end of
the interpreter: hence a process of its own, which ends at once.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import tensorrt_bindings as trt

NUMPY_TYPES = {"INT32": np.int32, "INT64": np.int64, "FLOAT32": np.float32, "INT8": np.int8}
NAMESPACE = "trtllm_shadowkv"


def main() -> None:
    registry = trt.get_plugin_registry()
    handles: list[Any] = []
    answers: list[Any] = []
    for step, *arguments in json.load(sys.stdin):
        if step == "load":
            handle = registry.load_library(sys.argv[1])
            handles += [handle] if handle is not None else []
            answers.append({"new": handle is not None, "creators": creators(registry)})
        elif step == "unload":
            registry.deregister_library(handles.pop())
            answers.append({"creators": creators(registry)})
        else:
            answers.append(create(registry, *arguments))
    json.dump({"version": trt.__version__, "answers": answers}, sys.stdout)


def creators(registry: Any) -> list[list[str]]:
    """Kind, name and version of our creators, then their attributes."""
    ours = [c for c in registry.all_creators if c.plugin_namespace == NAMESPACE]
    return [
        [c.interface_info.kind, c.name, c.plugin_version, *(f"{f.name}:{f.type.name}:{f.size}" for f in c.field_names)]
        for c in ours
    ]


def create(registry: Any, op: str, phase: str, fields: list[tuple[str, str, list[float]]]) -> dict[str, Any] | None:
    """What the plugin says of itself, None where there is none."""
    # A field holds only a pointer.
    arrays = [np.array(values, NUMPY_TYPES[kind]) for _, kind, values in fields]
    given = [
        trt.PluginField(name, array, getattr(trt.PluginFieldType, kind))
        for (name, kind, _), array in zip(fields, arrays, strict=True)
    ]
    creator = registry.get_creator(op, "1", NAMESPACE)
    plugin = creator.create_plugin("node", trt.PluginFieldCollection(given), getattr(trt.TensorRTPhase, phase))
    if plugin is None:
        return None
    core, build, runtime = (
        plugin.get_capability_interface(getattr(trt.PluginCapabilityType, name))
        for name in ("CORE", "BUILD", "RUNTIME")
    )
    return {
        "core": [core.plugin_name, core.plugin_version, core.plugin_namespace],
        "outputs": build.num_outputs,
        "interfaces": [[i.interface_info.kind, i.interface_info.major] for i in (core, build, runtime)],
    }


if __name__ == "__main__":
    try:
        main()
        status = 0
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
