"""Where a calibration is kept, and which rates hold here."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from megatron_magi import envs
from megatron_magi.backends.costs import DEFAULT, rates_of
from megatron_magi.config import MagiConfig
from megatron_magi.cost_model import Rates
from megatron_magi.cuda.build import default_cache_dir

logger = logging.getLogger(__name__)


def calibration_file(device_name: str) -> Path:
    """The file in which the rates of a GPU, by its CUDA name, are kept: in the folder of compiled kernels."""
    return default_cache_dir() / f"calibration-{re.sub('[^A-Za-z0-9]+', '_', device_name)}.json"


def keep(rates: Rates) -> Path:
    """Writes rates to the file of their device.

    Raises:
        OSError: the folder cannot be written to.
    """
    file = calibration_file(rates.device)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(rates.to_json())
    draft.replace(file)
    return file


def present_rates() -> Rates:
    """The rates of the current GPU: as calibrated, else those of its kind; `DEFAULT` where there is no GPU.

    Raises:
        ValueError: there is a calibration that is damaged; the message names the file.
    """
    if not torch.cuda.is_available():
        return DEFAULT
    return _read(torch.cuda.get_device_name(), envs.workspace())


def with_present_rates(config: MagiConfig) -> MagiConfig:
    """``config`` with `present_rates` where it has none of its own and chooses dispatches by them."""
    if config.dispatch.algorithm != "auto" or config.dispatch.rates is not None:
        return config
    return _with_rates(config, present_rates())


@lru_cache(maxsize=64)  # keys of one model have one
def _with_rates(config: MagiConfig, rates: Rates) -> MagiConfig:
    return replace(config, dispatch=replace(config.dispatch, rates=rates))


@cache
def _read(device_name: str, _workspace: str | None) -> Rates:
    """Read once a process and workspace: ranks that begin together go on with the same rates."""
    file = calibration_file(device_name)
    try:
        rates = Rates.from_json(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return rates_of(device_name)
    except OSError as error:  # the home directory of another user, as in a container
        logger.warning("%s cannot be read (%s) and is not used", file, error)
        return rates_of(device_name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; remove it, or calibrate again") from None
    logger.info("dispatches are chosen by the rates in %s", file)
    return rates
