"""The backend ``cudnn``: `cudnn.flex_attention` of nvidia-cudnn-frontend (extra ``cudnn``).

- `support`: what it lacks, in one table.
- `sequences`: which masks are given as sequences of their own, as packed documents, and which as a whole.
- `plans`: mask plans on a device, made from the intervals of keys that rows see; kept with prepared batches.
- `passes`: forward and backward.
"""
