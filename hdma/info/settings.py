"""The HDMA_* variables as rows: what each means, what it is, and which have no effect."""

from __future__ import annotations

import difflib
import os
from typing import Any

from hdma import env
from hdma.errors import UsageError

Row = dict[str, Any]


def table() -> list[Row]:
    """A row for each variable of hdma, then one for each HDMA_* name that is set but is none of them.

    `set` is the text in the environment or None, `value` what is in force, `error` why it cannot be used, `nearest` the
    known name most like an unknown one, `agree` whether all ranks must have the same.
    """
    rows: list[Row] = []
    for variable in env.TABLE:
        row: Row = {"name": variable.name, "known": True, "meaning": variable.meaning, "agree": variable.agree}
        row |= {"default": _plain(variable.default), "set": os.environ.get(variable.name), "value": None}
        row |= {"error": "", "nearest": None}
        try:
            row["value"] = _plain(variable.read())
        except UsageError as error:
            row["error"] = str(error)
        rows.append(row)
    known = [variable.name for variable in env.TABLE]
    for name in sorted(name for name in os.environ if name.startswith("HDMA_") and name not in known):
        nearest = difflib.get_close_matches(name, known, n=1)
        row = {"name": name, "known": False, "meaning": "no such variable: it has no effect", "agree": False}
        row |= {"default": None, "set": os.environ[name], "value": None, "error": ""}
        rows.append(row | {"nearest": nearest[0] if nearest else None})
    return rows


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else str(value)
