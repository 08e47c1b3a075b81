"""The report as Markdown, to paste into an issue; and as a line that GitHub shows at the source."""

from __future__ import annotations

import os
import re

from firstnan.diagnose.causes import catalogue
from firstnan.records import Remedy, Report, TensorStat
from firstnan.records.words import count, headline, number, short_path
from firstnan.report.characters import Charset
from firstnan.report.sentences import (
    at_expression,
    batch_line,
    feature_line,
    path_line,
    ranks_line,
    remedy_result,
    replay_line,
)
from firstnan.report.source_excerpt import TAB, excerpt, location
from firstnan.report.text import evidence_lines, extra_values, short_dtype, tensor_facts

_CHARS = Charset()
_MOST = {"inputs": 8, "features": 8, "notes": 8, "events": 20, "diff": 200}


def render_markdown(report: Report) -> str:
    """The report in GitHub's Markdown."""
    blocks = [f"### firstnan: {_text(headline(report))}"]
    if line := batch_line(report):
        blocks.append(f"**{_text(line)}**")
    # Whoever opens the issue sees its beginning: what happened, where, why, what to do.
    blocks += [*_source(report), *_cause(report), *_remedies(report)]
    if details := [*_evidence(report), *_values(report), *_rest(report)]:
        blocks += ["#### Details", *details]
    blocks += [f"- note: {_text(note)}" for note in report.notes[: _MOST["notes"]]]
    if environment := ", ".join(f"{key} {value}" for key, value in report.environment.items() if value):
        blocks.append(f"<sub>{_text(environment)}</sub>")
    return "\n\n".join(blocks) + "\n"


def _source(report: Report) -> list[str]:
    origin = report.origin
    if origin is None or origin.site is None:
        return []
    rows = [row for row in excerpt(origin.site) if row.number is not None]
    width = max((len(str(row.number)) for row in rows), default=1)
    lines = []
    for row in rows:
        text = _code(row.text)
        lines.append(f"{row.number:>{width}} | {text}".rstrip())
        if row.mark:
            start, end = (len(_CHARS.show(row.text[:at].expandtabs(TAB))) for at in row.mark)
            lines.append(f"{'':>{width}} | {' ' * start}{'^' * max(min(end, len(text)) - start, 1)}")
    where = f"{_text(location(origin.site, origin.library_site))}: {_text(at_expression(origin))}"
    return [where, _fenced("\n".join(lines), "python")] if lines else [where]


def _cause(report: Report) -> list[str]:
    cause = report.cause
    if cause is None:
        return ["No known cause fits."] if report.origin else []
    sure = "Cause" if cause.confidence >= 0.4 else "Maybe"
    blocks = [f"**{sure}: {_text(cause.title)}** (`{_bare(cause.slug)}`)", _text(cause.why)]
    return [block for block in blocks if block]


def _evidence(report: Report) -> list[str]:
    evidence = evidence_lines(report) if report.cause is not None else ()
    return ["\n".join(f"- {_text(line)}" for line in evidence)] if evidence else []


def _values(report: Report) -> list[str]:
    origin = report.origin
    if origin is None:
        return []
    rows = [_row(stat.name, stat) for stat in origin.inputs[: _MOST["inputs"]]]
    if origin.produced and origin.inputs != (origin.produced,):
        rows.append(_row(f"→ {origin.produced.name}", origin.produced))
    blocks = ["\n".join(("| tensor | shape | type | values |", "| --- | --- | --- | --- |", *rows))] if rows else []
    if line := extra_values(report):
        blocks.append(_text(line))
    return blocks


def _row(name: str, stat: TensorStat) -> str:
    cells = (name, str(list(stat.shape)), short_dtype(stat.dtype), "; ".join(tensor_facts(stat)))
    return "| " + " | ".join(_text(cell) for cell in cells) + " |"


def _rest(report: Report) -> list[str]:
    blocks = []
    if report.batch:
        lines = [feature_line(feature, report.batch.unit) for feature in report.batch.features[: _MOST["features"]]]
        blocks += ["\n".join(f"- {_text(line)}" for line in [*lines, *filter(None, [report.batch.note])])]
    for label, line in (
        ("Path", path_line(report)),
        ("Ranks", ranks_line(report.ranks, report.world_size) if report.ranks else ""),
        ("Replay", replay_line(report)),
    ):
        blocks += [f"{label}: {_text(line)}"] if line else []
    losses = [record.loss for record in report.history.steps if record.loss is not None][-8:]
    if len(losses) > 1:
        blocks.append(f"Last losses: {', '.join(map(number, losses))}")
    if report.cause and report.cause.slug in catalogue():
        blocks.append(f"More: `firstnan causes {report.cause.slug}`")
    return [block for block in blocks if block]


def _remedies(report: Report) -> list[str]:
    blocks: list[str] = []
    for i, remedy in enumerate(report.remedies):
        label = "Fix" if len(report.remedies) == 1 else f"Fix {i + 1}"
        why = f": {_text(remedy.why)}" if remedy.why else ""
        text = f"**{label}: {_text(remedy.title)}**{why}\n{_text(remedy_result(remedy, report))}"
        lines = _diff(remedy).split("\n")
        if remedy.diff and (remedy.proven or i == 0):
            left_out = f"\n… {count(len(lines) - _MOST['diff'], 'more line')}" if len(lines) > _MOST["diff"] else ""
            text += "\n\n" + _fenced("\n".join(map(_code, lines[: _MOST["diff"]])) + left_out, "diff")
        blocks.append(text)
    return blocks


def _diff(remedy: Remedy) -> str:
    """The diff, with paths as they are below the current folder."""
    return re.sub(
        r"^(--- a/|\+\+\+ b/)(.+)$",
        lambda found: found[1] + short_path(found[2]).lstrip("/"),
        remedy.diff.strip("\n"),
        flags=re.MULTILINE,
    )


def _text(text: str) -> str:
    """Text that Markdown and HTML leave as it is, in one line; what it has in backticks is code."""
    parts = _CHARS.prose(text).split("`")
    if len(parts) % 2 == 0:
        return _escaped("`".join(parts))
    return "".join(f"`{part}`" if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = re.sub(r"[\\`*\[<|#~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
    return re.sub(r"@(?=\w)|\b(?:https?|ftp):(?=//)|\bwww(?=\.)", lambda found: found[0] + "\u2060", text)


def _bare(text: str) -> str:
    return _CHARS.prose(text).replace("`", "'")


def _code(line: str) -> str:
    return _CHARS.cut(_CHARS.show(line.expandtabs(TAB).rstrip()), 400)


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


# --- the source line, in the log of a workflow ---------------------------------------------------------------------


def github_annotation(report: Report) -> str:
    """The command by which a GitHub workflow shows the finding at its source line; empty for a clean report."""
    if report.verdict == "clean":
        return ""
    site, cause = report.origin.site if report.origin else None, report.cause
    where = []
    if site is not None:
        where = [("file", _below_root(site.file)), ("line", str(site.line))]
        if site.end_line is not None and site.end_line >= site.line:
            where.append(("endLine", str(site.end_line)))
        if site.column is not None:
            where.append(("col", str(site.column + 1)))
            if site.end_column is not None and site.end_line in (None, site.line):
                where.append(("endColumn", str(site.end_column)))
    where.append(("title", f"firstnan: {cause.title or cause.slug}" if cause else "firstnan"))
    proven = next((remedy for remedy in report.remedies if remedy.proven), None)
    lines = [headline(report), batch_line(report), cause.why if cause else ""]
    lines += [f"Proven fix: {proven.title}", _diff(proven)] if proven else []
    message = "\n".join(line for line in lines if line)
    properties = ",".join(f"{name}={_workflow(value, ':,')}" for name, value in where)
    return f"::error {properties}::{_workflow(message)}\n"


def _below_root(path: str) -> str:
    """The file as the repository has it: GitHub knows paths from the root of the checkout only."""
    root = os.environ.get("GITHUB_WORKSPACE") or os.curdir
    try:
        found = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    except (OSError, ValueError):
        return path
    return path if found.startswith(os.pardir) else found


def _workflow(text: str, more: str = "") -> str:
    """Escaped as workflow commands ask for; properties have two more characters to escape."""
    text = "\n".join(_CHARS.show(line) for line in text.split("\n"))
    for char in "%\r\n" + more:
        text = text.replace(char, f"%{ord(char):02X}")
    return text
