"""Moving tokens: takes tensors, index tensors and split sizes; knows no plan.

`dispatch` holds the sharding of whole tensors, `group_collective` the exchange of rows that
attention needs, `agreement` the check that all ranks mean the same.
"""
