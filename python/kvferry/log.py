"""Sends the agents' log to an engine's log, each line at its level."""

from __future__ import annotations

import logging
from typing import Any

from kvferry.events import LogLevel, LogLine


def log_options(logger: logging.Logger, prefix: str = "") -> dict[str, Any]:
    """The options of an agent that logs to a logger: debug lines only if the logger takes them."""

    def log(line: LogLine) -> None:
        logger.log(line.level, "%s%s", prefix, line.text)

    wanted = LogLevel.DEBUG if logger.isEnabledFor(logging.DEBUG) else LogLevel.INFO
    return {"log": log, "log_level": wanted}
