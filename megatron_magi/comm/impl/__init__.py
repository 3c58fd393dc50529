"""Implementations of the exchange of rows; none imports another."""
