"""Intervals and timeouts of the verification of calls, in seconds."""

LOOK_S = 1.0
"""Polling interval of the thread; longer in jobs of more than a thousand ranks, which share one store."""
BUSY_S = 0.1
"""Polling interval while something is to be answered or decided."""
ASK_S = 1.0
"""How long a rank waits for the others before it asks them."""
GRACE_S = 2.0
"""How long participants of a call in which another rank has raised wait for an error of their own."""
EXPLAIN_S = 3 * LOOK_S
"""How long a rank whose collective has failed waits for an explanation."""
WARN_S = 30.0
"""How long a rank waits for the others before it logs a warning."""
