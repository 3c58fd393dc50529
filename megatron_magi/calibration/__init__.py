"""The rates of the GPU that is there: measured once by `python -m megatron_magi calibrate`, else those of its kind."""

from megatron_magi.calibration.kept import calibration_file, present_rates, with_present_rates

__all__ = ["calibration_file", "present_rates", "with_present_rates"]
