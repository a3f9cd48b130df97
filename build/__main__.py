"""``python -m trtllm_shadowkv.build`` is the command ``trtllm-shadowkv build``."""

from __future__ import annotations

import sys

from trtllm_shadowkv.cli.main import main

if __name__ == "__main__":
    __package__ = ""  # or usage lines would name this module before the command
    sys.argv[:1] = ["trtllm-shadowkv", "build"]
    main()
