"""What parts of the package share at run time: a cache (`lru`), memory between processes (`shm_transport`) and on
devices (`upload`), graphs, libraries.
"""
