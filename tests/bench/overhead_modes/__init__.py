"""What recording costs a training step, against other tools: see `tests/bench/overhead.py`."""
