"""Implementations of the exchange of rows; none imports another. `native` is the one over NVLink, `packed` the base of
those that exchange buffers."""
