# SPDX-License-Identifier: Apache-2.0
"""Keys of model endpoints and Slack, and how models are asked; no key is required anywhere."""

from __future__ import annotations

import os

from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

__all__ = [
    "DEFAULT_LLM_API_KEY_PATHS",
    "DEFAULT_LLM_SAMPLING",
    "llm_api_key_help_text",
    "llm_api_key_missing_message",
    "load_llm_api_key",
    "load_slack_bot_token",
]

DEFAULT_LLM_API_KEY_PATHS = ("~/.llm_api_key", "~/.config/nvrx/llm_api_key")

# How a model is asked where nobody says otherwise.
DEFAULT_LLM_SAMPLING = {"temperature": 0.2, "top_p": 0.7, "max_tokens": 8192}

_SLACK_PATHS = ("~/.slack_bot_token", "~/.slack_token", "~/.config/nvrx/slack_bot_token")
_LIMIT_BYTES = 1 << 16


def load_llm_api_key() -> str:
    """Return the key of the model endpoint; empty when there is none.

    Looked at in this order: LLM_API_KEY, the file LLM_API_KEY_FILE, `DEFAULT_LLM_API_KEY_PATHS`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict(os.environ, {"LLM_API_KEY": "secret"}):
        ...     load_llm_api_key()
        'secret'
    """
    return _load("LLM_API_KEY", "LLM_API_KEY_FILE", DEFAULT_LLM_API_KEY_PATHS)


def load_slack_bot_token() -> str:
    """Return Slack's token in the same way: SLACK_BOT_TOKEN, SLACK_BOT_TOKEN_FILE, files."""
    return _load("SLACK_BOT_TOKEN", "SLACK_BOT_TOKEN_FILE", _SLACK_PATHS)


def llm_api_key_help_text() -> str:
    """Return where a key is looked for, in one line."""
    return f"LLM_API_KEY, the file LLM_API_KEY_FILE, {', '.join(DEFAULT_LLM_API_KEY_PATHS)}"


def llm_api_key_missing_message(
    *, include_empty: bool = False, context: str = "", suffix: str = ""
) -> str:
    """Return one line that says that there is no key.

    Args:
        include_empty: Say that an empty key counts as none. Default False.
        context: What needs it, in front.
        suffix: What follows from it, at the end.
    """
    found = "no key, or an empty one," if include_empty else "no key"
    text = f"{found} of a model endpoint was found; looked at: {llm_api_key_help_text()}"
    return f"{context}: {text}{suffix}" if context else text + suffix


def _load(variable: str, file_variable: str, paths: tuple[str, ...]) -> str:
    key = os.environ.get(variable, "").strip()
    if key:
        return key
    named = os.environ.get(file_variable)
    for path in [named] if named else list(paths):
        try:
            data = read_regular_file(os.path.expanduser(path), _LIMIT_BYTES, follows_symlink=True)
        except (OSError, ValueError):
            continue
        text = data.decode("utf-8", "replace").strip()
        if text:
            return text
    return ""
