"""What `ready` and `bits` train, and for how long: tests know this without torch."""

ROWS = ("plain", "accumulate", "unused", "compile", "thawed")
STEPS, THAWED_AT, SLOW, PAUSE_S = 16, 10, 1, 0.03

CASES = (
    "plain",
    "static graph",
    "unused",
    "bucket view",
    "bucket view and zeros",
    "accumulate",
    "tied",
    "used twice",
    "checkpoint",
    "users' hooks",
    "comm hook",
    "comm hook that waits",
    "frozen, then thawed",
    "compile",
)
COMPARED_STEPS = 12
