"""The records of a job: windows, verdicts, captures and events, one type each.

`windows` has what ranks recorded, `verdicts` what that shows, `captures` decisions and what they capture, `counters`
what the kernel counts of a rank, and `events` what the journal keeps and all sinks get.
"""
