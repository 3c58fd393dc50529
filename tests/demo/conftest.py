"""Lets this process import Megatron on a machine without GPUs, whatever other tests import first."""

from __future__ import annotations

from megatron_magi import cpu_device

cpu_device.install()
