"""``python -m trtllm_shadowkv`` is the command ``trtllm-shadowkv``."""

from __future__ import annotations

from trtllm_shadowkv.cli.main import main

if __name__ == "__main__":
    main()
