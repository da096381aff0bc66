"""One job: windows are gathered, judged and decided about, and what is decided goes on record.

`needs` says what a controller asks of its agents and of its record, `gathering` puts windows together, `controller`
judges and decides, `wanting` holds the captures that are wanted now, and `resuming` what an earlier controller left.
"""
