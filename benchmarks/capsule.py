"""How long `firstnan replay` takes to report a failure in step 1,700, compared with `firstnan run`.

    python benchmarks/capsule.py

Both are whole processes, from start to finished report. CPU time is compared too, since it does not depend on what
else the machine does.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "fails_late.py"


def measured(*words: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds of the command, which has to find something."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "firstnan", *words], stdout=subprocess.DEVNULL, check=False)
    after, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    if done.returncode != 3:
        raise SystemExit(f"firstnan {words[0]} must exit with 3, got {done.returncode}")
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def origin(report: Path) -> tuple[Any, ...]:
    data = json.loads(report.read_text())
    return data["step"], data["origin"]["op"], data["origin"]["line"], data["cause"]["slug"], str(data["batch"])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, again = folder / "first.json", folder / "again.json"
        run = measured("run", "--verify", "0", "--capsule", name, "--json", str(first), str(PROGRAM))
        (capsule,) = folder.glob("*.capsule")
        replay = measured("replay", "--json", str(again), str(capsule), str(PROGRAM))
        size = capsule.stat().st_size / 2**20
        print(f"origin of the run     {origin(first)}")
        print(f"origin of the replay  {origin(again)}  ({size:.1f} MiB)")
        for what, a, b in (("clock", run[0], replay[0]), ("CPU", run[1], replay[1])):
            print(f"{what:<10} run {a:7.1f} s   replay {b:6.1f} s   {b / a:.1%}")
        if origin(first) != origin(again):
            raise SystemExit("run and replay report different origins")


if __name__ == "__main__":
    main()
