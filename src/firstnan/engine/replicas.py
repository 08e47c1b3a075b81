"""Compares the parameters of replicas now and then: a faulty device or a forgotten reduction lets them drift apart.

Each rank sends one checksum through the store of the process group and gets that of the first rank to arrive. Nobody
waits, unless they differ, and no collective is called: ranks that make different numbers of updates hang nowhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.ranks import world
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.models import parameters_of

_PATIENCE = 5.0
"""Seconds to wait for the other ranks to compare, once there is a difference."""
_MOST_NAMED = 3


class ReplicaGroup:
    """Ranks that hold the same parameters."""

    def __init__(self, ranks: list[int], is_certain: bool) -> None:
        self.ranks, self.is_certain = ranks, is_certain
        """`is_certain`: they are replicas by construction. Others count as replicas once they have agreed."""
        self.key = hashlib.sha256(json.dumps([ranks, is_certain]).encode()).hexdigest()[:16]
        self.names: list[str] = []
        self.parameters: list[Any] = []
        self.agreed_in: int | None = None
        """The last step after which this rank agreed with the others."""
        self.is_over = False


class Replicas:
    """Compares what ranks should have in common, after every `every` updates."""

    _numbers = itertools.count()

    def __init__(self, every: int, tell: Callable[[str, int, str], None]) -> None:
        """`tell` is called with a sentence, the step and the name of a parameter: once, by one of the ranks."""
        self._every, self._tell, self._process = every, tell, os.getpid()
        self._groups: list[ReplicaGroup] | None = None
        self._store: Any = None
        # Ranks attach the same detectors in the same order; what an earlier one has sent must not be read.
        self._key = f"firstnan/replicas/{next(self._numbers)}"

    def updated(self, updates: int, step: int, optimizers: Iterable[Any], name: Callable[[Tensor], str]) -> None:
        """The update number `updates` has been made, in this step."""
        if updates % self._every or os.getpid() != self._process or world().is_alone:
            return
        if self._groups is None:
            distributed = sys.modules["torch.distributed"]
            self._store = distributed.distributed_c10d._get_default_store()
            self._groups = _groups(distributed, optimizers, name)
        for group in self._groups:
            if not group.is_over:
                self._compare(group, updates, step)

    def told(self) -> str:
        """What any of the ranks has found; empty if nothing."""
        with contextlib.suppress(Exception):  # the store is gone with the process that held it
            if self._store is not None and self._store.check([f"{self._key}/told"]):
                return str(self._store.get(f"{self._key}/told").decode())
        return ""

    def _compare(self, group: ReplicaGroup, updates: int, step: int) -> None:
        store, rank, key = self._store, world().rank, f"{self._key}/{group.key}/{updates}"
        sums = torch.stack([_checksum(p) for p in group.parameters]).tolist()
        own = f"{hashlib.sha256(repr((group.names, sums)).encode()).hexdigest()[:16]} {rank}"
        first, _, by = store.compare_set(key, "", own).decode().partition(" ")
        if int(by) == rank:
            store.set(f"{key}/sums", json.dumps([group.names, sums]))
            old = f"{self._key}/{group.key}/{updates - 2 * self._every}"
            for one in (old, f"{old}/sums", f"{old}/agrees") if updates > 2 * self._every else ():
                store.delete_key(one)
        differs = first != own.partition(" ")[0]
        # If most ranks differ from the first one, it is the first that is odd.
        store.add(f"{key}/{'differs' if differs else 'agrees'}", 1)
        if not differs:
            group.agreed_in = step
            return
        group.is_over = True
        if group.is_certain or group.agreed_in is not None:
            self._explain(group, key, step, int(by), sums)

    def _explain(self, group: ReplicaGroup, key: str, step: int, first: int, sums: list[int]) -> None:
        store, rank = self._store, world().rank
        until, differ, agree = time.monotonic() + _PATIENCE, 1, 1
        while time.monotonic() < until and differ + agree < len(group.ranks):
            time.sleep(0.02)
            differ, agree = store.add(f"{key}/differs", 0), store.add(f"{key}/agrees", 0)
        if store.add(f"{self._key}/tells", 1) > 1:
            return  # another rank says it
        names, others = json.loads(store.get(f"{key}/sums"))
        there = dict(zip(names, others, strict=True))
        odd = [n for n, own in zip(group.names, sums, strict=True) if there.get(n) != own] or group.names
        text = _sentence(odd, step, group, (rank, first), (differ, agree))
        store.set(f"{self._key}/told", text)
        self._tell(text, step, odd[0])


def _sentence(odd: list[str], step: int, group: ReplicaGroup, ranks: tuple[int, int], counts: tuple[int, int]) -> str:
    (rank, first), (differ, agree) = ranks, counts
    if differ > agree:  # most ranks differ from the first one to arrive
        rank, first = first, rank
    more = f" and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
    what = f"{'parameters' if len(odd) > 1 else 'parameter'} {', '.join(odd[:_MOST_NAMED])}{more}"
    since = "they were never equal" if group.agreed_in is None else f"they were equal after step {group.agreed_in}"
    verb, others = "have" if len(odd) > 1 else "has", min(differ, agree)
    where = f"{verb} other values on rank {rank} than on rank {first}"
    if others > 1:
        where += f", and {others} of {len(group.ranks)} ranks are like rank {rank}"
    return f"replicas differ after step {step}: {what} {where}; {since}"


def _checksum(parameter: Any) -> Tensor:
    """The sum of this rank's part, its bits read as whole numbers: no single difference cancels out."""
    with torch.no_grad():
        own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        flat = own.detach().contiguous().view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        return flat.view(kind).sum(dtype=torch.int64).cpu()


def _groups(distributed: Any, optimizers: Iterable[Any], name: Callable[[Tensor], str]) -> list[ReplicaGroup]:
    """The groups of ranks that have parameters in common, with these parameters."""
    wrapped = {id(p): module for module in _replicated() for p in module.module.parameters()}
    groups: dict[tuple[tuple[int, ...], bool], ReplicaGroup] = {}
    for parameter in dict.fromkeys(p for one in optimizers for p in parameters_of(one)):
        for ranks, is_certain in _holders(distributed, parameter, wrapped.get(id(parameter))):
            group = groups.setdefault((tuple(ranks), is_certain), ReplicaGroup(ranks, is_certain))
            group.names.append(name(parameter) or f"parameter {len(group.names)}")
            group.parameters.append(parameter)
    return [group for group in groups.values() if len(group.ranks) > 1]


def _replicated() -> list[Any]:
    """The models of this process whose gradients torch averages over ranks in the backward call."""
    library = sys.modules.get("torch.nn.parallel.distributed")
    return find_live_objects(library.DistributedDataParallel) if library is not None else []


def _holders(distributed: Any, parameter: Any, wrapper: Any) -> Iterable[tuple[list[int], bool]]:
    """The ranks that hold the same numbers, and whether that is certain."""
    if hasattr(parameter, "device_mesh"):
        mesh = parameter.device_mesh
        for i, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                yield distributed.get_process_group_ranks(mesh.get_group(i)), True
    elif wrapper is not None:
        yield distributed.get_process_group_ranks(wrapper.process_group), True
    else:
        yield list(range(distributed.get_world_size())), False
