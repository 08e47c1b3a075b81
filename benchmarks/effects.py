"""Counts what a program does to files and the network, without firstnan and with it, by `strace`.

    python benchmarks/effects.py [--steps N] [--only PROGRAM...]

Each program writes in every step: a CSV file that stays open, a log, a database, a checkpoint that replaces the last
one, a request to a server, a program that it starts. Everything outside of an isolated process counts, by kind and
path. A healthy program must do the same with firstnan as without it. In the failing ones the last step fails, so
that the counts must be the same too, although that step was replayed, searched and tried with changed source.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BEGINNING = """\
import csv
import os
import sqlite3
import subprocess
import sys
import urllib.request

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, FAILS, PORT = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
os.makedirs("out", exist_ok=False)
kept = open("out/loss.csv", "w", newline="")
rows = csv.writer(kept)
database = sqlite3.connect("out/metrics.db")
database.execute("create table metrics (step integer, loss real)")


def write(step, loss):
    rows.writerow([step, loss])
    kept.flush()
    with open("out/log.txt", "a") as file:
        file.write(f"{step} {loss}\\n")
    with database:
        database.execute("insert into metrics values (?, ?)", (step, loss))
    torch.save(model.state_dict(), "out/new.pt")
    os.replace("out/new.pt", "out/last.pt")
    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", data=b"%d" % step).close()
    if step % 100 == 0:
        subprocess.run([sys.executable, "-S", "-c", f"open('out/started', 'a').write('{step} ')"], check=True)


x = torch.rand(STEPS * 8, 4) + 0.1
y = x.sum(1)
if FAILS >= 0:
    y[FAILS * 8 + 3] = 0.0
model = nn.Linear(4, 1)
"""

LOADER = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step, (inputs, target) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    loss = (model(inputs).squeeze(1) - target.log()).pow(2).mean()
    write(step, loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SLICES = """
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    inputs, target = x[step * 8 : step * 8 + 8], y[step * 8 : step * 8 + 8]
    optimizer.zero_grad()
    loss = (model(inputs).squeeze(1) - target.log()).pow(2).mean()
    write(step, loss.item())
    loss.backward()
    optimizer.step()
"""

CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=1)
for step in range(STEPS):
    inputs, target = x[step * 8 : step * 8 + 8], y[step * 8 : step * 8 + 8]

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs).squeeze(1) - target.log()).pow(2).mean()
        write(step, loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)
"""

# The cause lies in earlier steps: trials begin at the start of the program.
DIVERGES = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    if step == FAILS - 3:
        optimizer.param_groups[0]["lr"] = 1e6
    inputs, target = x[step * 8 : step * 8 + 8], x[step * 8 : step * 8 + 8].sum(1)
    optimizer.zero_grad()
    loss = (model(inputs).squeeze(1) - target).pow(2).mean()
    write(step, loss.item())
    loss.backward()
    optimizer.step()
"""
PROGRAMS = {"loader": LOADER, "slices": SLICES, "closure": CLOSURE, "diverges": DIVERGES}

_CALL = re.compile(
    r"^(?P<pid>\d+) +(?P<name>\w+)\((?P<words>.*)\) += (?P<result>-?\d+)(?: /\* (?P<outside>\d+) in strace's PID NS)?"
)
_BEGUN = re.compile(r"^(?P<pid>\d+) +(?P<text>.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<text>.*)$")
_CHANGES = {"rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "link", "linkat"}
_CHANGES |= {"symlink", "symlinkat", "truncate", "chmod", "fchmodat", "chown", "fchownat", "mknod", "mknodat", "creat"}
_SENDS = {"connect", "bind"}
_OWN = re.compile(r"/firstnan[-_][^/]*|/pymp-|/dev/|/proc/|/sys/|\.pyc|/torchinductor|/tmp/tmp\w+$|/tmp/\w{8}$")
"""Places of firstnan's own, devices, and the empty files with which Python looks for a folder that it may write to."""


def calls(trace: Path) -> list[tuple[int, str, str, int]]:
    """Process, name, arguments and result of each call that has returned, in the order in which they returned."""
    waiting: dict[str, str] = {}
    found = []
    for line in trace.read_text(errors="replace").splitlines():
        if match := _BEGUN.match(line):
            waiting[match["pid"]] = match["text"]
            continue
        if match := _RESUMED.match(line):
            line = f"{match['pid']} {waiting.pop(match['pid'], '')}{match['text']}"
        if match := _CALL.match(line):
            result = int(match["outside"] or match["result"])
            found.append((int(match["pid"]), match["name"], match["words"], result))
    return found


def effects(trace: Path, folder: Path) -> tuple[Counter[str], int]:
    """What processes did that are not isolated, by kind and path; and how many isolated ones there were."""
    apart: set[int] = set()
    unshared: set[int] = set()
    counted: Counter[str] = Counter()
    made = calls(trace)
    starts = ("clone", "clone3", "fork", "vfork")
    parents = {result: pid for pid, name, _, result in made if name in starts and result > 0}
    for pid, name, words, result in made:
        line: int | None = pid
        while line is not None and line not in apart:
            line = parents.get(line)
        if line is not None or (result < 0 and name != "connect"):
            continue
        if name == "unshare" and "CLONE_NEWNS" in words:
            unshared.add(pid)
        elif name in ("chroot", "pivot_root") and pid in unshared:
            apart.add(pid)
        elif (name == "openat" and re.search("O_WRONLY|O_RDWR|O_CREAT", words)) or name in _CHANGES:
            if "O_TMPFILE" in words:  # it has no name, and nobody else sees it
                continue
            path = ", ".join(re.findall(r'"([^"]*)"', words)).replace(f"{folder}/", "")
            if not _OWN.search(path):
                counted[f"{name} {path}"] += 1
        elif name in _SENDS and "AF_INET" in words:
            counted[f"{name} {'/'.join(re.findall(r'sin6?_port=htons[(][0-9]+', words))[-5:]}"] += 1
    return counted, len(apart)


class Server:
    """Counts the requests it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        steps = self.steps

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                steps.append(int(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()


def run(program: str, steps: int, fails: int, watched: bool) -> tuple[Counter[str], int, int, str, dict[str, object]]:
    server = Server()
    with tempfile.TemporaryDirectory(prefix="effects-") as place:
        folder = Path(place) / "work"
        folder.mkdir()
        (folder / "train.py").write_text(BEGINNING + program)
        trace = Path(place) / "trace"
        traced = "trace=%file,%network,clone,clone3,fork,vfork,unshare,chroot,pivot_root"
        command = [
            "strace",
            "-f",
            "-qq",
            "--decode-pids=pidns",
            "-s",
            "4096",
            "-e",
            traced,
            "-o",
            str(trace),
            sys.executable,
        ]
        command += ["-m", "firstnan", "run"] if watched else []
        command += ["train.py", str(steps), str(fails), str(server.port)]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HOME": place}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        counted, apart = effects(trace, folder)
        counted = Counter({name.replace(str(server.port), "PORT"): number for name, number in counted.items()})
        lines = {
            "posts": server.steps,
            "log": [int(line.split()[0]) for line in (folder / "out/log.txt").read_text().splitlines()],
            "csv": [int(line.split(",")[0]) for line in (folder / "out/loss.csv").read_text().splitlines()],
            "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
        }
    server.stop()
    return counted, apart, done.returncode, done.stderr, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    options = parser.parse_args()
    wrong = 0
    for name in options.only:
        for fails in (-1, options.steps - 1):
            program = PROGRAMS[name]
            bare, _, _, _, lines = run(program, options.steps, fails, watched=False)
            ours, apart, code, said, our_lines = run(program, options.steps, fails, watched=True)
            difference = {key: (bare[key], ours[key]) for key in bare | ours if bare[key] != ours[key]}
            tried = "tried:" in said
            ends = code == (3 if fails >= 0 else 0)
            same = not difference and lines == our_lines and ends
            wrong += not same
            kind = "failing" if fails >= 0 else "healthy"
            print(
                f"{name:9} {kind}: {sum(bare.values())} effects without, {sum(ours.values())} with firstnan, "
                f"{apart} isolated processes, exit code {code}{', a fix tried' if tried else ''}: "
                f"{'the same' if same else 'DIFFERENT'}",
                flush=True,
            )
            for key, (before, after) in sorted(difference.items()):
                print(f"    {before} without, {after} with: {key}")
            for key in lines:
                if lines[key] != our_lines[key]:
                    print(f"    {key}: {lines[key]!r:.300} without, {our_lines[key]!r:.300} with")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
