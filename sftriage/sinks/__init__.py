"""Who is told of what happens to a job."""
