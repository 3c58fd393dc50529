"""How long ranks wait and how often they look where they verify calls; in seconds."""

LOOK_S = 1.0
"""How often the thread looks at the store; less often in jobs of more than a thousand ranks, which share one store."""
BUSY_S = 0.1
"""How often it looks while something is to be answered or decided."""
ASK_S = 1.0
"""How long a rank waits for the others before it asks what they are doing."""
GRACE_S = 2.0
"""How long ranks that take part in a call wait, after another has raised an error in it, to raise one of their own."""
EXPLAIN_S = 3 * LOOK_S
"""How long a rank whose collective has failed waits for an explanation."""
WARN_S = 30.0
"""How long a rank waits for the others before it says so in the log."""
