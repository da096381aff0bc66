"""One host of a job: reads its ranks' rings, keeps every step, captures ranks and stores traces; asks GPUs."""
