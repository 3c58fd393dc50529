"""The backend ``cudnn``: `cudnn.flex_attention` of nvidia-cudnn-frontend (extra ``cudnn``).

- `support`: what it lacks, in one table.
- `plans`: mask plans on a device, made from the intervals of keys that rows see; kept with prepared batches.
- `passes`: forward and backward.
"""
