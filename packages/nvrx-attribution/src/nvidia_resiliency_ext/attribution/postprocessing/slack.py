# SPDX-License-Identifier: Apache-2.0
"""Whom to tell in Slack, and in which words."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from nvidia_resiliency_ext.attribution.orchestration.client_response import (
    recommendation_should_stop,
)
from nvidia_resiliency_ext.shared_utils.console import plain

__all__ = ["format_slack_text", "post_slack_message", "should_notify_slack"]

_API = "https://slack.com/api/chat.postMessage"
_TIMEOUT_S = 10.0
_LONGEST = 1500


def should_notify_slack(action: Any) -> bool:
    """Return whether a message is sent for an action: only for STOP.

    Args:
        action: The action.
    """
    return recommendation_should_stop({"action": action})


def format_slack_text(record: dict[str, Any]) -> str:
    """Return the message about an exported record, without characters that Slack interprets.

    Args:
        record: The record; see `build_dataflow_record`.

    Example:
        >>> format_slack_text({"s_job_id": "42", "s_recommendation_action": "STOP"})
        'job 42: STOP'
    """
    parts = [
        f"job {record.get('s_job_id') or '?'}: {record.get('s_recommendation_action')}",
        str(record.get("s_auto_resume_explanation") or ""),
        str(record.get("s_log_path") or ""),
    ]
    text = plain(" | ".join(part for part in parts if part)[:_LONGEST])
    for char, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("`", "'"), ("*", "·")):
        text = text.replace(char, name)
    return text


def post_slack_message(token: str, channel: str, text: str, *, url: str = _API) -> None:
    """Send a message.

    Args:
        token: Token of the bot.
        channel: Name or identifier of the channel.
        text: The message.
        url: Address of Slack's API; default: Slack's own.

    Raises:
        OSError: Slack cannot be reached or refuses it.
    """
    body = json.dumps({"channel": channel, "text": text}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - a fixed address
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:  # noqa: S310 - as above
        answer = json.loads(reply.read(1 << 16) or b"{}")
    if not answer.get("ok"):
        raise OSError(f"Slack refuses the message: {str(answer.get('error'))[:100]}")
