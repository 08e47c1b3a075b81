"""Reads a log of strace: which calls reached the network, made by the program itself or by what runs again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_CALL = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)$")
_RETURNED = re.compile(r"= (\d+)(?: /\* (\d+) in strace's PID NS \*/)?", re.IGNORECASE)
_MAKES_A_PROCESS = ("clone", "clone3", "fork", "vfork")


@dataclass
class NetworkCalls:
    of_main: list[str] = field(default_factory=list)
    of_others: list[str] = field(default_factory=list)
    """Calls of other processes on the network that they share with everybody."""
    isolated: int = 0
    """How many processes had a network of their own."""


def network_calls(log: str) -> NetworkCalls:
    """A process with a network of its own (CLONE_NEWNET), and all that it starts, may call what it likes."""
    calls = NetworkCalls()
    leader: dict[str, str] = {}  # of every thread, its process
    unfinished: dict[str, str] = {}
    apart: set[str] = set()
    main = ""
    for line in log.splitlines():
        match = _CALL.match(line)
        if not match:
            continue
        pid, call, rest = match.groups()
        main = main or pid
        if rest.endswith("<unfinished ...>"):
            unfinished[pid] = rest.removesuffix("<unfinished ...>")
            if call not in ("connect", "bind", "sendto"):
                continue
        elif " resumed>" in line:
            rest = unfinished.pop(pid, "") + rest
            if call in ("connect", "bind", "sendto"):
                continue  # it was counted when it began
        process = leader.setdefault(pid, pid)
        if call in _MAKES_A_PROCESS:
            returned = _RETURNED.search(rest)
            if returned:
                child = returned[2] or returned[1]
                leader[child] = process if "CLONE_THREAD" in rest else child
                if process in apart or "CLONE_NEWNET" in rest:
                    apart.add(leader[child])
        elif call in ("unshare", "setns") and "CLONE_NEWNET" in rest:
            apart.add(process)
        elif "AF_INET" in rest and process not in apart:
            (calls.of_main if process == main else calls.of_others).append(line)
    calls.isolated = len(apart)
    return calls
