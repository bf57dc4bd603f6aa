"""One way out for every listing: a table for people, JSON or CSV for programs, on stdout and nothing else there."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

FORMATS = ("table", "json", "csv")
_WIDE = 240
"""Columns of a table that goes to a file or a pipe."""


def console_for(out: TextIO) -> Console:
    """A console on a stream, wide where that is no terminal; colours are rich's concern (NO_COLOR)."""
    return Console(file=out, width=None if out.isatty() else _WIDE, highlight=False, markup=False)


def print_table(out: TextIO, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under their columns; numbers, which begin with a digit, are set to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows]
        numeric = all(cell[:1].isdigit() or cell == "–" for cell in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = console_for(out)
    if title:
        console.print(title)
    console.print(table)


def print_json(out: TextIO, value: Any) -> None:
    """Print one JSON document."""
    out.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_csv(out: TextIO, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per row; nested values are JSON in their cell, a missing value is an empty one."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
