"""What recording costs a training step, against other tools: see `bench/overhead.py`."""
