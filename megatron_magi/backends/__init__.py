"""Implementations of attention over bands on one device; `base` says what they share, `registry` names them."""
