"""Answers already given, in one file, so that an evaluation that was interrupted goes on where it stopped.

lm-eval's own response cache knows a request but not who answered it, so that a second setting would read the first
one's answers. Here the key holds both, and the values are JSON, which cannot run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sinks.errors import InputError
from sinks.files import brief


class Answers:
    """A table from (settings, request) to an answer; several processes may use one file at a time."""

    def __init__(self, path: str, settings: str) -> None:
        """``settings`` is a digest of everything that decides an answer. InputError if the file cannot be used."""
        self.path, self.settings = path, settings
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with self._opened() as database:
                database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"cannot use {path} for answers ({brief(error)}); give another --use_cache path"
            ) from error

    def _opened(self) -> closing[sqlite3.Connection]:
        """For one question each: it takes no time beside an answer, and nothing stays open."""
        return closing(sqlite3.connect(self.path, timeout=60, isolation_level=None))

    def _key(self, kind: str, request: Sequence[Any]) -> str:
        text = json.dumps([self.settings, kind, list(request)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, kind: str, request: Sequence[Any]) -> Any | None:
        try:
            key = [self._key(kind, request)]
            with self._opened() as database:
                row = database.execute("SELECT answer FROM answers WHERE key = ?", key).fetchone()
            return None if row is None else json.loads(row[0])
        except (sqlite3.Error, ValueError, TypeError, RecursionError) as error:
            raise InputError(
                f"the kept answers in {self.path} are damaged ({brief(error)}); give another file"
            ) from error

    def put(self, kind: str, request: Sequence[Any], answer: Any) -> None:
        values = [self._key(kind, request), json.dumps(answer)]
        try:
            with self._opened() as database:
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", values)
        except sqlite3.Error as error:
            raise InputError(f"cannot keep answers in {self.path} ({brief(error)}); give another file") from error
