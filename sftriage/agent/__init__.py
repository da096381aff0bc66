"""One host of a job: reads its ranks' rings, keeps every step, carries captures out and stores them; asks GPUs."""
