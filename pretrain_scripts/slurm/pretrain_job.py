"""pretrain_gpt.py for jobs: outlives the TERM of its job until it has saved, and says when training is complete.

pretrain_job.py COMPLETE_FILE ARGUMENT...

The file is made when the last iteration is done, not when training was saved and stopped before.
"""

import multiprocessing
import signal
import sys
from pathlib import Path

from megatron_magi.mcore.entry import main


def run(complete_file: Path, arguments: list[str]) -> None:
    """Trains; makes the file if training is complete."""
    # Workers of torch's data loaders end at a TERM even where it is ignored, and their rank with them: it is blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        # Megatron ends the process itself where it stops before the last iteration.
        main(arguments)
        complete_file.touch()
    finally:
        # At exit Python would send these workers a TERM and wait for their end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in multiprocessing.active_children():
            if process.daemon:
                process.kill()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
