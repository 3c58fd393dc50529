"""For tests and benchmarks only: no product code imports this."""
