"""The rates of the GPU that is there: measured once by `python -m megatron_magi calibrate` (`measure`), else those of
its kind (`rates_file`).
"""

from megatron_magi.calibration.rates_file import calibration_file, present_rates, with_present_rates

__all__ = ["calibration_file", "present_rates", "with_present_rates"]
