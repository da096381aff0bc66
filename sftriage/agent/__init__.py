"""One host of a job: reads its ranks' rings, keeps every step, captures ranks, stores traces and queries GPUs."""
