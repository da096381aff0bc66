"""One job: put its windows together, judge them, decide, and put both on record.

`windows` puts windows together, `controller` judges and decides, and `desired` has what a controller needs of its
agents, the captures that it wants now and what an earlier controller left.
"""
