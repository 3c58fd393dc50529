"""Frameworks themselves over this package: `make test-frameworks` puts each into a folder and on the path."""
