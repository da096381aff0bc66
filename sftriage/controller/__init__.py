"""One job: put its windows together, judge them, decide, and put both on record.

`needs` is what a controller needs of its agents, `windows` puts windows together, `controller` judges and decides, and
`desired` holds the captures that it wants now and what an earlier controller left.
"""
