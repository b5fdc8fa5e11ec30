"""The server's log: text lines, or JSON objects with request ids for log collectors."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
LINE = "%(asctime)s %(levelname)s %(name)s %(message)s"
FACTS = "facts"  # attribute of a record: its structured fields, by name


def configure(log_format: str) -> None:
    """Log to standard error, as `ServerConfig.log_format` says."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(LINE))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request id, the record's `FACTS`, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            told["request_id"] = request_id
        told |= getattr(record, FACTS, {})
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)
