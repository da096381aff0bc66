"""One job: assemble its windows, judge them, decide, and record both."""
