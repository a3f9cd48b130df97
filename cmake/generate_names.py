"""Write the C++ twin of trtllm_shadowkv/names.py: ``python generate_names.py NAMES_PY HEADER``.

Runs the file by itself: importing the package would need its dependencies, which a build has not got.
"""

import sys
from pathlib import Path


def main() -> None:
    source, header = map(Path, sys.argv[1:])
    namespace: dict[str, object] = {"__name__": "names"}
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), namespace)
    cpp_header = namespace["cpp_header"]
    assert callable(cpp_header)
    text = cpp_header()
    # An unchanged header keeps its time stamp, so that nothing is compiled again.
    if not header.exists() or header.read_text(encoding="utf-8") != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
