"""For tests and benchmarks only: no product code imports this. `spawn` runs functions on several ranks, `error_budget`
compares in low precision."""
