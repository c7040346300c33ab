"""Tables of the report, in HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def number(value: float | None) -> str:
    """Four digits, or a dash for what is left out."""
    return "–" if value is None else f"{value:#.4g}"


def table(
    title: str,
    note: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    foot: Iterable[Sequence[str]],
    kind: str = "",
) -> str:
    """A table with a caption and `foot` set apart below; `kind` is a class of the page's CSS."""

    def line(cells: Sequence[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    caption = f"{escape(title)} <span>· {escape(note)}</span>"
    return (
        f'<div class="{f"table {kind}".strip()}"><table><caption>{caption}</caption>'
        f"<thead>{line(head, 'th')}</thead><tbody>{''.join(map(line, rows))}</tbody>"
        f"<tfoot>{''.join(map(line, foot))}</tfoot></table></div>"
    )
