"""What a job would run at without its stragglers: its recorded operations replayed with other durations.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713). Pure: operations in,
figures out.
"""
