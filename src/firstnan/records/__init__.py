"""The records that every room shares: frozen dataclasses of plain values; nothing here knows torch."""

from firstnan.records.codec import ReportError, decode, dumps, encode
from firstnan.records.forms import FORMAT, VERSION
from firstnan.records.report import (
    Batch,
    Cause,
    Edit,
    Feature,
    History,
    LayerTrack,
    NaNEvent,
    Noticed,
    Origin,
    PathStep,
    Remedy,
    Report,
    StepRecord,
)
from firstnan.records.trace import InFloat64, Operand, OpEvent, Phase, Role, Site, TensorStat, Trace

__all__ = [
    "FORMAT",
    "VERSION",
    "Batch",
    "Cause",
    "Edit",
    "Feature",
    "History",
    "InFloat64",
    "LayerTrack",
    "NaNEvent",
    "Noticed",
    "OpEvent",
    "Operand",
    "Origin",
    "PathStep",
    "Phase",
    "Remedy",
    "Report",
    "ReportError",
    "Role",
    "Site",
    "StepRecord",
    "TensorStat",
    "Trace",
    "decode",
    "dumps",
    "encode",
]
