"""How fast a job would be without its stragglers: its recorded operations replayed with other durations.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713). Pure: operations in,
figures out. `runs.whatif` and `mitigate.advice` call it.
"""
