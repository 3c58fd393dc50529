"""pretrain_gpt.py for jobs: leaves a file when training is complete, not when it has only saved and stopped.

pretrain_job.py COMPLETE_FILE ARGUMENT...
"""

import sys
from pathlib import Path

from megatron_magi.mcore.entry import main

if __name__ == "__main__":
    complete_file, *arguments = sys.argv[1:]
    # Megatron ends the process itself where it stops before the last iteration.
    main(arguments)
    Path(complete_file).touch()
