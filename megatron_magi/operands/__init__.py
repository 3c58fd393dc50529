"""What an attention pass takes and returns, and its checks; merging of partial results."""
