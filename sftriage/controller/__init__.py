"""One job: put its windows together, judge them, decide, and put both on record."""
