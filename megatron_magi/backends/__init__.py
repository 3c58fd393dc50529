"""Implementations of attention over bands on one device. `base` says what they have in common, `registry` names them."""
