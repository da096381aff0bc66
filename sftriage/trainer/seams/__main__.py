"""Prints the folder that goes first on the PYTHONPATH of trainers that `sftriage run` does not start."""

import sys
from pathlib import Path

sys.stdout.write(f"{Path(__file__).resolve().parent / 'site'}\n")
