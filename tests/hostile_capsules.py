"""`hostile_capsules.py CAPSULE N`: opens N corrupted copies of a capsule and checks what happens.

A corrupt file is refused by a CapsuleError of one line. A file with a recomputed digest may be a valid capsule: then
its content is restored into a model, which must not raise either. Anything else ends this program with an error: an
import, a system call, a file opened for writing, more memory than reading a small file needs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import random
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from capsules import net, put_together, signed, taken_apart, trained
from firstnan.capsule.content import load
from firstnan.capsule.file import CapsuleError
from firstnan.capsule.state import Restorer
from firstnan.tensors.models import TrainingObjects

torch.set_num_threads(1)
FORBIDDEN = (
    "os.system",
    "subprocess.Popen",
    "exec",
    "compile",
    "pickle.find_class",
    "os.remove",
    "os.rename",
    "os.exec",
)
WEIRD = [
    None, True, -1, 0, 1 << 70, 1e308, "", "../../x", "x" * 100_000, [], {}, [[]], {"tensor": {}}, {"object": {}},
    {"tensor": {"name": "t0", "dtype": "object", "shape": [1]}}, {"array": {"data": None, "dtype": "O", "shape": [9]}},
    {"tensor": {"name": "t0", "dtype": "float32", "shape": [1 << 40], "strides": [0]}}, {"missing": "builtins.eval"},
    {"object": {"kind": "os.system", "how": "attributes", "members": [["__class__", 1], ["__dict__", {"dict": []}]]}},
    {"sparse": {"indices": {"tensor": {}}, "values": None, "shape": [1 << 50], "coalesced": True}}, {"bytes": "%%%"},
    {"dict": [[[], 1]]}, {"float": "nan"}, {"complex": ["a", 1]}, {"tuple": "abc"}, {"float": ["nan"]},
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as a container and a key."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        at = waiting.pop()
        keys: Any = at.keys() if isinstance(at, dict) else range(len(at))
        for key in keys:
            found.append((at, key))
            if isinstance(at[key], dict | list) and len(found) < 5000:
                waiting.append(at[key])
    return found


class Breaker:
    def __init__(self, content: bytes, seed: int) -> None:
        self.content, self.chance = content, random.Random(seed)
        self.header, self.tensors = taken_apart(content)
        self.manifest = json.loads(self.header["__metadata__"]["firstnan"])

    def flipped(self) -> bytes:
        broken = bytearray(self.content)
        for _ in range(self.chance.choice((1, 1, 2, 8))):
            broken[self.chance.randrange(len(broken))] ^= 1 << self.chance.randrange(8)
        return bytes(broken) if bytes(broken) != self.content else self.content[:-1]

    def cut(self) -> bytes:
        return self.content[: self.chance.randrange(len(self.content))]

    def header_broken(self) -> bytes:
        """Another safetensors header, with a valid digest."""
        header = copy.deepcopy({k: v for k, v in self.header.items() if k != "__metadata__"})
        at, key = self.chance.choice(places(header))
        at[key] = self.chance.choice([*WEIRD, 1 << 62, -5, "F64", [1 << 31, 1 << 31, 8], [0, 1 << 62]])
        return signed({"__metadata__": self.header["__metadata__"], **header}, self.tensors)

    def content_broken(self) -> bytes:
        """Another manifest, with a valid digest."""
        manifest = copy.deepcopy(self.manifest)
        for _ in range(self.chance.choice((1, 1, 3))):
            at, key = self.chance.choice(places(manifest))
            if isinstance(at, dict) and self.chance.random() < 0.3:
                at.pop(key, None)
            else:
                at[key] = copy.deepcopy(self.chance.choice(WEIRD))
        return self.with_text(json.dumps(manifest))

    def numbers_broken(self) -> bytes:
        """Other bytes in the tensors, such as random states and indices, with a valid digest."""
        tensors = self.chance.randbytes(len(self.tensors))
        return signed(self.header, tensors)

    def text_broken(self) -> bytes:
        text = self.chance.choice(
            [
                "[" * 200_000,
                "{}",
                "[]",
                "",
                "NaN",
                '{"a":' * 5_000,
                "[" + "{}," * 300_000 + "1]",
                "9" * 5000,
                "\ud800",
                "\0",
            ]
        )
        return self.with_text(text)

    def with_text(self, text: str) -> bytes:
        metadata = {"sha256": "0" * 64, "firstnan": text}
        return signed({"__metadata__": metadata, **{k: v for k, v in self.header.items() if k[0] != "_"}}, self.tensors)

    def pickled(self) -> bytes:
        return self.chance.choice([pickle.dumps(WEIRD), put_together(self.content[8:40] + pickle.dumps([1]), b"")])


def main(path: str, many: int) -> None:
    breaker = Breaker(Path(path).read_bytes(), seed=1)
    kinds = [breaker.flipped, breaker.cut, breaker.header_broken, breaker.content_broken, breaker.numbers_broken]
    kinds += [breaker.content_broken, breaker.text_broken, breaker.pickled]
    target = Path("hostile.capsule")
    model, optimizer = trained()
    objects = TrainingObjects.find([optimizer], {"": model})
    restore(load(path), objects)  # loads everything that is imported late
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (virtual_size() + (512 << 20),) * 2)
    sys.addaudithook(guard)
    counts = {"refused": 0, "harmless": 0}
    for i in range(many):
        kind = kinds[i % len(kinds)]
        with open(target, "wb") as file:
            file.write(kind())
        GUARDED.append(kind.__name__)
        try:
            capsule = load(target)
        except CapsuleError as error:
            said, counts["refused"] = str(error), counts["refused"] + 1
        else:
            said, counts["harmless"] = "", counts["harmless"] + 1
            assert kind.__name__ not in ("flipped", "cut", "pickled", "text_broken"), f"{kind.__name__} was taken"
            restore(capsule, objects)
        assert "\n" not in said, said
        assert len(said) < 300, said
        GUARDED.clear()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < limit, f"{kind.__name__} took much memory"
    for name, count in counts.items():
        print(name, count)


def restore(capsule: Any, objects: TrainingObjects) -> None:
    """Restores a capsule as a replay does; only a batch may raise, because the program decides on its structure."""
    restorer = Restorer(capsule, objects)
    restorer.weights()
    restorer.training()
    for batch in capsule.batches:
        restorer.random(batch.random)
        with contextlib.suppress(RuntimeError, ValueError, TypeError, OverflowError):
            restorer.unpacker.value(batch.value, [torch.zeros(2, 3), "text", {"k": 1}])


GUARDED: list[str] = []


def guard(event: str, args: Any) -> None:
    if not GUARDED:
        return
    if event in FORBIDDEN or (event == "import" and args[0] not in sys.modules):
        raise SystemExit(f"{GUARDED[0]}: {event} {args!r}"[:300])
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise SystemExit(f"{GUARDED[0]}: open {args!r}"[:300])


def virtual_size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    net()
    main(sys.argv[1], int(sys.argv[2]))
