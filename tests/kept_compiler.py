"""A C++ compiler that compiles each object once a run of the tests: ``python kept_compiler.py FOLDER COMPILER ARGS...``

Objects are kept in ``FOLDER`` under a name by their content: the arguments, and all sources in C++ of the checkout that
is the working directory. All else, such as linking, is left to ``COMPILER``. Needs the standard library alone.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(folder: Path, command: list[str]) -> int:
    """Exit status of the compiler."""
    if "-c" not in command:
        return subprocess.call(command)
    place = command.index("-o") + 1
    target = Path(command[place])
    key = hashlib.sha256("\0".join([*command[:place], *command[place + 1 :]]).encode())
    for path in sorted(path for path in Path("csrc").rglob("*") if path.suffix in (".cpp", ".hpp")):
        key.update(f"\0{path}\0".encode() + path.read_bytes())
    kept = folder / key.hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            part = kept.with_suffix(".part")
            if status := subprocess.call([*command[:place], str(part), *command[place + 1 :]]):
                return status
            os.replace(part, kept)
    shutil.copyfile(kept, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
