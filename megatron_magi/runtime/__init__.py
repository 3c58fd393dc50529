"""What parts of the package share at run time: a cache, memory between processes and on devices, graphs, libraries."""
