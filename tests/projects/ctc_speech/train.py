import json
import os
import sys

from asr.solver import Solver

DEFAULT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf", "base.json")

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("ASR_CONF", DEFAULT)
    with open(path) as handle:
        conf = json.load(handle)
    Solver(conf).train()
