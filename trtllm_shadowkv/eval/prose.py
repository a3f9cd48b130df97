"""Real English prose that every Python installation has: the language reference, as the interactive help keeps it."""

from __future__ import annotations


def python_reference() -> str:
    """About 900,000 characters of the Python language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))
