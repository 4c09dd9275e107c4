"""A text that every Python carries: the language reference behind `help()`."""

import pydoc_data.topics


def standard_library_text() -> str:
    """The topics of Python's built-in help, in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))
