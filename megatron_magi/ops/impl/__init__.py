"""Implementations of slice attention. Each module has `forward` and `backward`; none imports another."""
