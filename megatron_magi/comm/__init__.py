"""Moving tokens between ranks: takes tensors, index tensors and split sizes; knows no plan.

`dispatch` shards whole tensors, `group_collective` exchanges the rows that attention needs, `transport` decides between
NVLink, NCCL and gloo, `agreement` and `collective_checks` check that all ranks mean the same.
"""
