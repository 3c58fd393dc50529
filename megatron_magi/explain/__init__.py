"""What a mask costs on some ranks, for each way to dispatch it: tables and pictures, without a GPU.

``python -m megatron_magi explain`` is the command line of it (`command`); `report` makes the tables.
"""
