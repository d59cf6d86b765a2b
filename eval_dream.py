"""Evaluate Dream, DreamCoder or DiffuCoder with lm-eval, with or without sink masking; README.md shows the commands."""

from sinks.arguments import DREAM_SCRIPT
from sinks.commandline import exits_cleanly, needs

with needs("eval"):
    from sinks.evaluation import main

if __name__ == "__main__":
    exits_cleanly(lambda: main(DREAM_SCRIPT))()
